//! Uninstalling from a node, requested by a mounted ConfigMap.

use std::{
    fs,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use crate::common::mesh::Mesh;
use anyhow::ensure;
use inpod_proto::{podevents::v1::PodState, types::v1::Reason};
use integration::{Node, Pod, Spec, TIMEOUT, eventually};
use nix::sys::signal::Signal;

struct Leaving {
    mesh: Mesh,
    word: PathBuf,
    receipt: PathBuf,
}

impl Leaving {
    /// pod-events reads the file; some pods are in the mesh.
    fn new() -> Self {
        let mesh = Mesh::new().unwrap();
        let of_run = |name: &str| mesh.node.run_dir().join(name);
        let (word, receipt) = (of_run("word"), of_run("receipt"));
        let leaving = Self {
            mesh,
            word,
            receipt,
        };
        leaving.node().stop("pod-events", Signal::SIGTERM).unwrap();
        leaving.start();
        leaving.node().ready().unwrap();
        leaving
    }

    fn node(&self) -> &Node {
        &self.mesh.node
    }

    fn start(&self) {
        let [word, receipt] = [&self.word, &self.receipt].map(|path| path.to_str().unwrap());
        let settings = [
            "--peer",
            "uid",
            "--leave-file",
            word,
            "--receipt-file",
            receipt,
        ];
        self.node().start_with("pod-events", &settings).unwrap();
    }

    fn say(&self, word: &str) {
        fs::write(&self.word, word).unwrap();
    }

    /// Waits for its voluntary end; returns its last message.
    fn left(&self) -> String {
        let ended = self.node().until_ended("pod-events").unwrap();
        assert!(ended.success(), "{ended}");
        fs::read_to_string(&self.receipt).unwrap()
    }

    fn until_condition(&self, ok: bool, ready: bool, words: &str) {
        eventually(&format!("it is reported: {words}"), TIMEOUT, || {
            let status = self.node().api().status()?;
            let mut conditions = status.conditions.iter();
            let staying = conditions.find(|condition| condition.name == "staying");
            let is_so = staying.is_some_and(|it| it.ok == ok && it.message.contains(words));
            ensure!(is_so && status.ready == ready, "{status:?}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    fn stays_away(&self, long: Duration) {
        let began = Instant::now();
        while began.elapsed() < long {
            self.until_condition(false, false, "has left this node: uninstall");
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn listed(&self) -> usize {
        let list = self.node().state_dir().join("enrolled-namespaces");
        fs::read_to_string(list).unwrap().lines().count()
    }

    fn pods(&self) -> [&Pod; 2] {
        [&self.mesh.a, &self.mesh.b]
    }
}

const SERVICES: [&str; 3] = ["pod-events", "ztunnel-broker", "netconfig"];

/// Returns services' files and sockets by their directory.
fn kept(node: &Node) -> Vec<(&'static str, Vec<String>)> {
    let of = |name: &'static str| {
        let dir = node.run_dir().join(name).display().to_string();
        let found = integration::run("find", &[&dir, "-not", "-type", "d"]).unwrap();
        (name, found.lines().map(str::to_owned).collect())
    };
    SERVICES.into_iter().chain(["netns"]).map(of).collect()
}

fn stop_all(node: &Node) {
    for service in SERVICES {
        node.stop(service, Signal::SIGTERM).unwrap();
    }
}

fn rules_of_the_node(node: &Node) -> String {
    let netns = format!("--net={}", node.netns().path().display());
    integration::run("nsenter", &[&netns, "nft", "-s", "list", "ruleset"]).unwrap()
}

#[test]
fn a_node_that_is_uninstalled_takes_every_pod_out_and_leaves_nothing() {
    let leaving = Leaving::new();
    let node = leaving.node();
    assert!(
        rules_of_the_node(node).contains("inpod"),
        "or nothing could be left"
    );
    assert_eq!(leaving.listed(), 1);
    leaving.say("uninstall\n");
    let receipt = leaving.left();
    assert_eq!(
        receipt,
        "inpod left: uninstall; 2 pods were withdrawn from the mesh\n"
    );
    for pod in leaving.pods() {
        assert_eq!(
            pod.traces().unwrap(),
            Vec::<String>::new(),
            "{}",
            pod.spec.name
        );
    }
    assert!(!rules_of_the_node(node).contains("inpod"));
    assert_eq!(leaving.listed(), 0);
    assert_eq!(node.api().workloads().unwrap().workloads.len(), 0);
    assert_eq!(node.api().claims().unwrap().len(), 0);
}

#[test]
fn a_node_that_is_uninstalled_admits_every_pod_and_comes_back_when_the_mode_is_cleared() {
    let leaving = Leaving::new();
    let node = leaving.node();
    leaving.say("uninstall");
    leaving.left();
    // A container is restarted.
    leaving.start();
    leaving.until_condition(false, false, "has left this node: uninstall");
    let late = node.sandbox(Spec::new("late").ambient()).unwrap();
    node.add(&late).unwrap();
    let known = node.explain(&late.spec).unwrap();
    assert_eq!(
        (known.state(), known.reason()),
        (PodState::Out, Reason::NodeLeaves)
    );
    assert_eq!(late.traces().unwrap(), Vec::<String>::new());
    // The release still runs without its ConfigMap; the file is read every five seconds.
    fs::remove_file(&leaving.word).unwrap();
    leaving.stays_away(Duration::from_secs(12));
    leaving.say("");
    for pod in leaving.pods().into_iter().chain([&late]) {
        node.until_whole(&pod.spec).unwrap();
    }
    leaving.until_condition(true, true, "");
    leaving.mesh.between_enrolled_pods().unwrap();
    // Again: the first answer must not count for the second.
    leaving.say("uninstall");
    let receipt = leaving.left();
    assert!(receipt.contains("3 pods"), "{receipt}");
}

#[test]
fn what_services_keep_goes_with_them_once_the_node_is_left_and_stays_at_any_other_end() {
    let leaving = Leaving::new();
    let node = leaving.node();
    stop_all(node);
    for (directory, files) in kept(node) {
        assert!(!files.is_empty(), "{directory}: a successor takes it up");
    }
    assert!(node.zds_socket().exists());
    node.start("netconfig").unwrap();
    node.start("ztunnel-broker").unwrap();
    leaving.start();
    node.ready().unwrap();
    leaving.mesh.between_enrolled_pods().unwrap();
    leaving.say("uninstall");
    leaving.left();
    // A restarted container finds the file again.
    leaving.start();
    leaving.until_condition(false, false, "has left this node: uninstall");
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    leaving.start();
    leaving.until_condition(false, false, "has left this node: uninstall");
    stop_all(node);
    for (directory, files) in kept(node) {
        assert_eq!(files, Vec::<String>::new(), "{directory}");
    }
    assert!(!node.zds_socket().exists());
}

#[test]
fn a_node_that_is_handed_over_keeps_its_pods_as_they_are_and_repairs_nothing() {
    let leaving = Leaving::new();
    let node = leaving.node();
    let before = leaving.pods().map(|pod| pod.ruleset().unwrap());
    leaving.say("handover");
    let receipt = leaving.left();
    assert_eq!(receipt, "inpod left: handover; 2 pods stay as they are\n");
    assert_eq!(leaving.pods().map(|pod| pod.ruleset().unwrap()), before);
    leaving.mesh.between_enrolled_pods().unwrap();
    // inpod must not undo a successor's rules.
    leaving.start();
    leaving.until_condition(false, false, "has left this node: handover");
    leaving.mesh.b.exec(&["nft", "flush", "ruleset"]).unwrap();
    leaving
        .mesh
        .b
        .exec(&["nft", "add", "table", "inet", "successor"])
        .unwrap();
    // Neither netconfig's restart nor an operator's request repairs it.
    node.stop("netconfig", Signal::SIGKILL).unwrap();
    node.start("netconfig").unwrap();
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    leaving.start();
    leaving.until_condition(false, false, "has left this node: handover");
    let looked_at = node.api().resync().unwrap().pods;
    assert!(
        looked_at
            .iter()
            .filter(|pod| pod.state() == PodState::Enrolled)
            .count()
            == 2
    );
    let rules = leaving.mesh.b.ruleset().unwrap();
    assert!(
        rules.contains("successor") && !rules.contains("inpod"),
        "{rules}"
    );
    // Negative control: a staying inpod repairs that.
    leaving.say("");
    node.until_whole(&leaving.mesh.b.spec).unwrap();
    assert!(leaving.mesh.b.ruleset().unwrap().contains("inpod"));
}

#[test]
fn an_unknown_mode_changes_nothing() {
    let leaving = Leaving::new();
    leaving.say("uninstal");
    eventually("it is reported", TIMEOUT, || {
        let log = leaving.node().tail("pod-events", 200);
        ensure!(
            log.contains("expected uninstall, handover or nothing"),
            "{log}"
        );
        anyhow::Ok(())
    })
    .unwrap();
    for pod in leaving.pods() {
        leaving.node().until_whole(&pod.spec).unwrap();
    }
    leaving.until_condition(true, true, "");
    assert!(!leaving.receipt.exists());
}

#[test]
fn the_probe_set_stays_on_the_node_as_long_as_a_pod_is_in_it() {
    let leaving = Leaving::new();
    let node = leaving.node();
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    let refused = node.api().leave_node().unwrap_err();
    let refused = format!("{refused:#}");
    assert!(refused.contains("addresses of pods are in"), "{refused}");
    assert!(rules_of_the_node(node).contains("inpod"));
}
