//! Sidecar pods on a node from which inpod is uninstalled.

use std::{fs, path::PathBuf};

use inpod_proto::{podevents::v1::PodState, types::v1::Reason};
use integration::{Node, Spec};

use crate::netns::sidecars::{claims, rules, until_redirected};

#[test]
fn a_node_that_is_uninstalled_leaves_the_rules_to_sidecars_and_looks_after_them_again_where_it_stays()
 {
    let node = Node::new().unwrap();
    let [word, receipt]: [PathBuf; 2] = ["word", "receipt"].map(|name| node.run_dir().join(name));
    let start = || {
        let [word, receipt] = [&word, &receipt].map(|path| path.to_str().unwrap());
        let settings = [
            "--peer",
            "uid",
            "--leave-file",
            word,
            "--receipt-file",
            receipt,
        ];
        node.start_with("pod-events", &settings).unwrap();
    };
    for service in ["netconfig", "ztunnel-broker"] {
        node.start(service).unwrap();
    }
    node.start_ztunnel(&[]).unwrap();
    start();
    node.ready().unwrap();
    let ambient = node.pod(Spec::new("ambient").ambient()).unwrap();
    let sidecar = node.pod(Spec::new("sidecar").injected()).unwrap();
    let before = rules(&sidecar);
    fs::write(&word, "uninstall").unwrap();
    assert!(node.until_ended("pod-events").unwrap().success());
    assert_eq!(
        fs::read_to_string(&receipt).unwrap(),
        "inpod left: uninstall; 1 pods were withdrawn from the mesh, 1 stay redirected to their sidecars\n"
    );
    assert_eq!(ambient.traces().unwrap(), Vec::<String>::new());
    assert_eq!(rules(&sidecar), before);
    assert_eq!(claims(&node), 0);
    let list = fs::read_to_string(node.state_dir().join("enrolled-namespaces")).unwrap();
    assert_eq!(list.lines().count(), 0, "{list}");
    start();
    let late = node.sandbox(Spec::new("late").injected()).unwrap();
    node.add(&late).unwrap();
    let known = node.explain(&late.spec).unwrap();
    assert_eq!(
        (known.state(), known.reason()),
        (PodState::Out, Reason::NodeLeaves)
    );
    fs::write(&word, "").unwrap();
    for pod in [&sidecar, &late] {
        until_redirected(&node, pod);
    }
    node.until_whole(&ambient.spec).unwrap();
    assert_eq!(rules(&sidecar), before);
    assert_eq!(claims(&node), 3);
}

#[test]
fn a_node_that_is_handed_over_leaves_the_rules_to_sidecars() {
    let node = Node::new().unwrap();
    let [word, receipt]: [PathBuf; 2] = ["word", "receipt"].map(|name| node.run_dir().join(name));
    let [said, reported] = [&word, &receipt].map(|path| path.to_str().unwrap());
    let settings = [
        "--peer",
        "uid",
        "--leave-file",
        said,
        "--receipt-file",
        reported,
    ];
    for service in ["netconfig", "ztunnel-broker"] {
        node.start(service).unwrap();
    }
    node.start_with("pod-events", &settings).unwrap();
    node.start_ztunnel(&[]).unwrap();
    node.ready().unwrap();
    let pod = node.pod(Spec::new("sidecar").injected()).unwrap();
    let before = rules(&pod);
    fs::write(&word, "handover").unwrap();
    assert!(node.until_ended("pod-events").unwrap().success());
    assert_eq!(rules(&pod), before);
}
