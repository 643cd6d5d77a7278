//! cnitool: libcni with CHECK, GC and STATUS, which containerd never calls.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use anyhow::ensure;
use integration::{App, Node, Spec, TIMEOUT, ask, eventually, run};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::runtime::{
    PORT,
    chain::{Chain, NETWORK, spooled, within},
};

/// The network that has only our plugin.
pub(crate) const ALONE: &str = "alone";

/// A node with a chain and cnitool.
pub(crate) struct Tool {
    pub(crate) chain: Chain,
    dir: PathBuf,
    pub(crate) node: Node,
}

impl Tool {
    pub(crate) fn running() -> Self {
        let node = Node::running().unwrap();
        let dir = node.manifests().with_file_name("cnitool");
        fs::create_dir_all(dir.join("var")).unwrap();
        let chain = Chain::install(&node, &dir).unwrap();
        chain.configure_alone(ALONE, "1.1.0", &[]).unwrap();
        Self { chain, dir, node }
    }

    pub(crate) fn netns(&self, name: &str) -> PathBuf {
        let name = format!("{}-{name}", self.node.name());
        run("ip", &["netns", "add", &name]).unwrap();
        let path = Path::new("/run/netns").join(name);
        // Runtimes do this; cnitool does not.
        within(&path, &["ip", "link", "set", "lo", "up"]).unwrap();
        path
    }

    /// libcni's cache, always below `/var/lib`, is this node's own.
    #[expect(
        clippy::disallowed_methods,
        reason = "integration/test tells where cnitool is"
    )]
    fn call(&self, verb: &str, network: &str, netns: &Path, pod: &str) -> Output {
        let tool = std::env::var("CNITOOL")
            .expect("CNITOOL names the cnitool to use: run ./integration/test");
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.node.netns().path().display()));
        command.args([
            "unshare",
            "--mount",
            "--propagation",
            "unchanged",
            "sh",
            "-c",
        ]);
        command.arg("mount --bind \"$0\" /var/lib && exec \"$@\"");
        command
            .arg(self.dir.join("var"))
            .args([&tool, verb, network])
            .arg(netns);
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command
            .env("NETCONFPATH", self.chain.lists())
            .env("CNI_PATH", self.chain.plugins());
        command.env("CNI_ARGS", pod).output().unwrap()
    }

    pub(crate) fn done(&self, verb: &str, network: &str, netns: &Path, pod: &str) -> String {
        let output = self.call(verb, network, netns, pod);
        let [stdout, stderr] =
            [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        assert!(output.status.success(), "{verb}: {stdout}{stderr}");
        stdout
    }

    pub(crate) fn refused(&self, verb: &str, network: &str, netns: &Path, pod: &str) -> String {
        let output = self.call(verb, network, netns, pod);
        assert!(!output.status.success(), "{verb} succeeded");
        [output.stdout, output.stderr]
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .concat()
    }

    pub(crate) fn claimed(&self) -> usize {
        self.node.api().claims().unwrap().len()
    }

    fn stop_agent(&self) {
        self.node.stop("pod-events", Signal::SIGKILL).unwrap();
    }

    fn start_agent(&self) {
        self.node.start("pod-events").unwrap();
        self.node.ready().unwrap();
    }

    fn until_nothing_is_claimed(&self) {
        eventually("nothing is claimed", TIMEOUT, || {
            let claims = self.node.api().claims()?;
            ensure!(claims.is_empty(), "{claims:?}");
            anyhow::Ok(())
        })
        .unwrap();
    }
}

pub(crate) fn named(spec: &Spec) -> String {
    format!(
        "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={}",
        spec.namespace, spec.name
    )
}

pub(crate) fn tables(netns: &Path) -> String {
    within(netns, &["nft", "list", "tables"]).unwrap()
}

#[test]
fn a_pod_is_added_checked_and_deleted_with_its_uid_and_without() {
    let tool = Tool::running();
    let spec = Spec::new("web").ambient();
    tool.node.write_manifest(&spec).unwrap();
    let with_uid = format!("{};K8S_POD_UID={}", named(&spec), spec.uid);
    for (name, pod) in [("with", with_uid), ("without", named(&spec))] {
        let netns = tool.netns(name);
        let result: Value = serde_json::from_str(&tool.done("add", NETWORK, &netns, &pod)).unwrap();
        assert_eq!(
            result.pointer("/interfaces/2/sandbox"),
            Some(&json!(netns)),
            "{result}"
        );
        let known = tool.node.until_whole(&spec).unwrap();
        assert!(known.sandbox.unwrap().container_id.starts_with("cnitool-"));
        assert!(tables(&netns).contains("inpod-nat"));
        tool.done("check", NETWORK, &netns, &pod);
        for _ in 0..2 {
            tool.done("del", NETWORK, &netns, &pod);
            assert_eq!(
                (tool.claimed(), tool.chain.addresses().unwrap().len()),
                (0, 0)
            );
        }
    }
}

#[test]
fn a_check_names_what_is_broken() {
    let tool = Tool::running();
    let spec = Spec::new("web").ambient();
    tool.node.write_manifest(&spec).unwrap();
    let (netns, pod) = (tool.netns("web"), named(&spec));
    tool.done("add", NETWORK, &netns, &pod);
    let broken = ["nft", "flush", "chain", "inet", "inpod-nat", "output"];
    // Drift is repaired at once; a late check finds nothing.
    let message = eventually(
        "a check comes before the repair",
        TIMEOUT,
        || -> anyhow::Result<_> {
            within(&netns, &broken)?;
            let output = tool.call("check", NETWORK, &netns, &pod);
            ensure!(!output.status.success(), "it succeeded");
            Ok(String::from_utf8([output.stdout, output.stderr].concat())?)
        },
    );
    let message = message.unwrap();
    assert!(
        message.contains("inpod") && message.contains("inpod-nat"),
        "{message}"
    );
    tool.done("del", NETWORK, &netns, &pod);
}

#[test]
fn a_refused_pod_is_told_why_and_its_del_leaves_nothing() {
    let tool = Tool::running();
    let (netns, pod) = (tool.netns("nobody"), named(&Spec::new("nobody")));
    let message = tool.refused("add", NETWORK, &netns, &pod);
    assert!(
        message.contains("shop/nobody") && message.contains("[POD_UNKNOWN]"),
        "{message}"
    );
    // After a failed ADD, libcni's caller must delete.
    assert_eq!(tool.chain.addresses().unwrap().len(), 2);
    tool.done("del", NETWORK, &netns, &pod);
    assert_eq!(
        (tool.claimed(), tool.chain.addresses().unwrap().len()),
        (0, 0)
    );
}

#[test]
fn while_the_agent_is_away_an_enrolled_namespace_waits_and_a_del_succeeds() {
    let tool = Tool::running();
    let spec = Spec::new("web").ambient();
    tool.node.write_manifest(&spec).unwrap();
    let (netns, pod) = (tool.netns("web"), named(&spec));
    tool.done("add", NETWORK, &netns, &pod);
    tool.stop_agent();
    // The namespace is enrolled by its pod.
    let other = tool.netns("other");
    let message = tool.refused("add", NETWORK, &other, &named(&Spec::new("other")));
    assert!(
        message.contains("the pod waits") && message.contains("[AGENT_UNAVAILABLE]"),
        "{message}"
    );
    tool.done("del", NETWORK, &other, &named(&Spec::new("other")));
    tool.done("del", NETWORK, &netns, &pod);
    assert_eq!(
        (tool.claimed(), tool.chain.addresses().unwrap().len()),
        (1, 0)
    );
    assert_eq!(spooled(&tool.node), 2);
    tool.start_agent();
    assert_eq!(spooled(&tool.node), 0);
    tool.until_nothing_is_claimed();
}

#[test]
fn a_call_for_no_pod_passes_untouched() {
    let tool = Tool::running();
    let netns = tool.netns("plain");
    for pod in ["", "IgnoreUnknown=1;K8S_POD_NAME=web"] {
        tool.done("add", NETWORK, &netns, pod);
        assert_eq!((tool.claimed(), tables(&netns).as_str()), (0, ""));
        tool.done("check", NETWORK, &netns, pod);
        tool.done("del", NETWORK, &netns, pod);
    }
    assert!(tool.chain.addresses().unwrap().is_empty());
}

#[test]
fn the_plugin_alone_reads_the_addresses_in_the_netns_and_prints_an_empty_result() {
    let tool = Tool::running();
    let pod = tool.node.sandbox(Spec::new("web").ambient()).unwrap();
    let outsider = tool.node.sandbox(Spec::new("outsider")).unwrap();
    let arguments = named(&pod.spec);
    let printed = tool.done("add", ALONE, pod.path(), &arguments);
    let result: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(result, json!({"cniVersion": "1.1.0"}), "{printed}");
    tool.node.until_whole(&pod.spec).unwrap();
    let _app = App::start(&pod.netns, PORT).unwrap();
    let source = ask(&outsider.netns, SocketAddr::new(pod.v4.into(), PORT)).unwrap();
    assert_eq!(source, outsider.v4);
    let taken = tool
        .node
        .accesses()
        .unwrap()
        .first()
        .map(|access| access.listener);
    assert_eq!(taken, Some(15006));
    tool.done("check", ALONE, pod.path(), &arguments);
    tool.done("del", ALONE, pod.path(), &arguments);
    assert_eq!(tool.claimed(), 0);
}

#[test]
fn the_collection_of_garbage_drops_what_its_network_no_longer_has_and_nothing_else() {
    let tool = Tool::running();
    let pod = tool.node.sandbox(Spec::new("web").ambient()).unwrap();
    let (netns, chained) = (tool.netns("chained"), Spec::new("chained").ambient());
    tool.node.write_manifest(&chained).unwrap();
    tool.done("add", ALONE, pod.path(), &named(&pod.spec));
    tool.done("add", NETWORK, &netns, &named(&chained));
    let networks = || {
        let claims = tool.node.api().claims().unwrap();
        let names = claims
            .into_iter()
            .filter_map(|claim| Some(claim.sandbox?.network_name));
        names.collect::<Vec<_>>()
    };
    assert_eq!(networks().len(), 2);
    // libcni no longer knows the attachments and deletes none; cnitool passes no list of valid ones.
    fs::remove_dir_all(tool.dir.join("var/cni")).unwrap();
    let message = tool.refused("gc", ALONE, pod.path(), "");
    assert!(
        message.contains("cni.dev/valid-attachments: is missing"),
        "{message}"
    );
    assert_eq!(networks().len(), 2);
    // Other keys of a configuration reach the plugin unchanged.
    tool.chain
        .configure_alone(ALONE, "1.1.0", &[("cni.dev/valid-attachments", json!([]))])
        .unwrap();
    tool.done("gc", ALONE, pod.path(), "");
    assert_eq!(networks(), [NETWORK]);
    tool.done("del", NETWORK, &netns, &named(&chained));
    assert_eq!(tool.claimed(), 0);
}

#[test]
fn the_collection_of_garbage_in_a_chain_of_an_older_version_is_a_del_of_each() {
    let tool = Tool::running();
    let spec = Spec::new("web").ambient();
    tool.node.write_manifest(&spec).unwrap();
    let netns = tool.netns("web");
    tool.done("add", NETWORK, &netns, &named(&spec));
    assert_eq!(tool.claimed(), 1);
    tool.done("gc", NETWORK, &netns, "");
    assert_eq!(
        (tool.claimed(), tool.chain.addresses().unwrap().len()),
        (0, 0)
    );
}

#[test]
fn a_status_succeeds_with_the_agent_and_without() {
    let tool = Tool::running();
    let netns = tool.netns("none");
    tool.done("status", ALONE, &netns, "");
    tool.stop_agent();
    tool.done("status", ALONE, &netns, "");
    // It did call the plugin.
    tool.chain.remove_ours().unwrap();
    let output = tool.call("status", ALONE, &netns, "");
    assert!(!output.status.success());
}
