//! Gathers facts. Each function reads files below the node's root, or calls a service with a deadline.

mod kernel;
mod process;
mod rpc;
mod runtime;
mod services;
mod state;

use std::{collections::BTreeMap, time::Duration};

use super::{chain, chain::Chain, facts::Facts, mounts};
use crate::{
    arguments::HostOptions,
    host_fs::{HostFs, Observed},
    node::Node,
};

pub(crate) use kernel::{FEATURES, Need};
pub(crate) use services::metrics;

pub(crate) const INSTALLER: &str = "installer";

/// The services that every node has; the dependencies of a service come before the service.
pub(crate) const SERVICES: [&str; 4] = ["netconfig", "ztunnel-broker", "pod-events", INSTALLER];

/// The services that count as deployed only if their directory exists.
pub(crate) const OPTIONAL_SERVICES: [&str; 2] = ["repair", "injector"];

/// The limit of one call. The limit is short, because doctor is run on nodes where some service hangs.
pub(crate) const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// The sysctls to read, as paths below `/proc/sys`.
const SYSCTLS: [&str; 10] = [
    "net/ipv4/conf/all/rp_filter",
    "net/ipv4/conf/default/rp_filter",
    "net/ipv6/conf/all/disable_ipv6",
    "net/ipv6/conf/default/disable_ipv6",
    "net/netfilter/nf_conntrack_count",
    "net/netfilter/nf_conntrack_max",
    "fs/inotify/max_user_instances",
    "fs/inotify/max_user_watches",
    "fs/file-nr",
    "fs/file-max",
];

pub(crate) async fn collect(node: &Node, paths: &HostOptions, self_test: bool) -> Facts {
    let root = &paths.root();
    let services = services::all(root, node, &paths.run_dir).await;
    let answers = rpc::all(node, self_test).await;
    let (release, features) = kernel::kernel(root);
    let pid = |name: &str| {
        let service = services.iter().find(|service| service.name == name);
        let process = service.map(|service| service.process.as_ref());
        process.and_then(Result::ok).map(|process| process.pid)
    };
    let earlier = mounts_of(root, 1);
    let netconfig_mounts = pid("netconfig").map_or_else(
        || Err("the pid of netconfig is unknown".to_owned()),
        |pid| mounts_of(root, pid),
    );
    let chain = network_chain(root, paths);
    let plugin = runtime::plugin(root, &chain.plugins);
    Facts {
        release,
        features,
        mounts: mounts_of(root, 1).and_then(|later| Ok(mounts::lasting(&earlier?, later))),
        netconfig_mounts,
        selinux_enforcing: kernel::selinux(root),
        apparmor: kernel::apparmor(root),
        runtimes: runtime::sockets(root),
        plugin,
        chain,
        zds: process::zds(root, &paths.zds_socket, pid("ztunnel-broker")),
        services,
        status: answers.status,
        pods: answers.pods,
        workloads: answers.workloads,
        states: answers.states,
        findings: answers.findings,
        sysctls: sysctls(root),
        directories: state::directories(root, paths),
        kill_switch: state::kill_switch(root, &paths.plugin_state_dir),
        spool: state::spool(root, &paths.plugin_state_dir),
        self_test: answers.self_test,
    }
}

fn mounts_of(root: &HostFs, pid: i32) -> Observed<Vec<mounts::Mount>> {
    Ok(mounts::parse(&root.text(format!("/proc/{pid}/mountinfo"))?))
}

/// Reads the sysctls, which are the node's only if this process runs in the node's network namespace.
fn sysctls(root: &HostFs) -> BTreeMap<&'static str, Observed<String>> {
    let read = |name| {
        (
            name,
            root.text(format!("/proc/sys/{name}"))
                .map(|text| text.trim().to_owned()),
        )
    };
    SYSCTLS.into_iter().map(read).collect()
}

/// Reads the network configurations from the directories that the caller names, or else from the directories of the
/// runtime.
pub(crate) fn network_chain(root: &HostFs, paths: &HostOptions) -> Chain {
    let found = runtime::directories(root);
    let given = |given: &Option<String>, found: String| given.clone().unwrap_or(found);
    let directory = given(&paths.cni_conf_dir, found.conf);
    let source = if paths.cni_conf_dir.is_some() {
        "from the command line".to_owned()
    } else {
        found.source
    };
    Chain {
        networks: chain::networks(root, &directory),
        renamed: chain::renamed(root, &directory),
        plugins: given(&paths.cni_bin_dir, found.bin),
        directory,
        source,
    }
}
