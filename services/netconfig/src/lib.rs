//! Claims pods' network namespaces (netns), writes their redirection rules and reads them back. netconfig is the only
//! process of inpod that enters a pod's netns.
//!
//! [`rules`] describes a redirection as data; [`apply`] applies, compares and removes redirections. Callers name a
//! netns by their claim; only netconfig resolves paths. netconfig holds no credential, keeps no state, and changes
//! nothing outside of claimed netns but the probe set of [`probes`].

pub mod apply;
mod claims;
mod config;
pub mod conflicts;
mod conntrack;
pub mod discover;
pub mod error;
mod family;
pub mod inspect;
mod kernel_option;
pub mod kernel_version;
mod legacy;
mod marks;
mod metrics;
mod netlink;
mod netns_session;
mod netns_sock;
mod nftables;
mod notifications;
mod plan;
mod preflight;
pub mod probes;
mod read_queue;
mod routes;
pub mod rules;
mod selftest;
mod server;
mod sysctl;
mod uninstall;
mod watch;

// The scenarios of the tests in tests/ refer to the crate by its name.
#[cfg(test)]
extern crate self as netconfig;

#[cfg(test)]
#[path = "../tests/scenarios/scenarios.rs"]
mod scenarios;

pub use config::Config;
pub use family::Family;
pub use marks::Mark;
pub use netns_session::ReachError;
pub use sysctl::Sysctls;

use std::sync::Arc;

use anyhow::Context as _;
use inpod_proto::netconfig::v1::netconfig_service_server::NetconfigServiceServer;
use inpod_service::{Daemon, abort_on_panic};
use tokio::task::JoinSet;

use crate::{
    apply::Writer,
    claims::Claims,
    notifications::{DriftMetrics, Reader, Subscriptions},
    probes::ProbeSet,
    read_queue::Queue,
    server::Handler,
};

pub const SERVICE: inpod_service::Service = inpod_service::Service {
    name: "netconfig",
    about: "Claims pods' network namespaces, writes their redirection rules and reads them back",
    version: inpod_service::VERSION,
    keys: config::KEYS,
};

/// Serves until the process stops, which ends all claims but leaves the rules in place.
pub async fn run(config: Config, daemon: Daemon) -> anyhow::Result<()> {
    kernel_version::check()?;
    let probes = config.probes();
    let writer = Arc::new(Writer::default());
    let queue = Arc::new(Queue::new(config.verify));
    let claims = Arc::new(Claims::new(Arc::clone(&queue)));
    let counts = daemon.metrics().register(DriftMetrics::register);
    let subscriptions = Subscriptions::open(config.event_buffer_bytes, &queue, &counts);
    let subscriptions = subscriptions.context("cannot watch claimed netns")?;
    let reader = Reader::new(
        Arc::clone(&claims),
        Arc::clone(&writer),
        subscriptions,
        Arc::clone(&queue),
        counts,
    );
    let broker = netns_sock::listen(&daemon)?;
    let probe_set = ProbeSet::start(&probes, daemon.readiness().clone());
    let probe_set = Arc::new(probe_set.context("cannot open a netlink socket")?);
    let _guard = probe_set
        .start_reconciler(probes::READ_INTERVAL)
        .context("cannot start a thread")?;
    let mut tasks = JoinSet::new();
    tasks.spawn(abort_on_panic(
        "notifications",
        notifications::run(queue, reader.clone()),
    ));
    let sweep = claims::sweep::run(Arc::clone(&claims), config.sweep);
    tasks.spawn(abort_on_panic("sweep", sweep));
    let release_task = probes::release::run(Arc::clone(&probe_set), Arc::clone(&claims));
    tasks.spawn(abort_on_panic("probe-set", release_task));
    let netns_sock_task = netns_sock::serve(broker, claims, daemon.clone());
    tasks.spawn(abort_on_panic("netns.sock", netns_sock_task));
    let recheck = preflight::start(&mut tasks, &writer, probes, daemon.readiness());
    let handler = Handler::new(
        reader,
        config.netns_roots,
        writer,
        probes,
        probe_set,
        recheck,
        &daemon,
    );
    let server = daemon.server();
    let server = server.add_service(NetconfigServiceServer::new(handler));
    server.serve().await?;
    // netns.sock is served while the gRPC server drains its calls.
    tasks.shutdown().await;
    if daemon.removes_state_on_exit() {
        netns_sock::remove(&daemon)?;
    }
    Ok(())
}
