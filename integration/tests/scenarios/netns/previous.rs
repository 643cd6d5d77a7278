//! The current agent beside the previous release's plugin and rules in running pods.

use std::{fs, net::SocketAddr, path::PathBuf};

use crate::common::flows::Flow;
use crate::common::mesh::{Mesh, PORT};
use anyhow::{Context as _, ensure};
use inpod_proto::{podevents::v1::PodState, ztunnelbroker::v1::WorkloadPhase};
use integration::{Call, Node, Pod, SERVICES, Spec, TIMEOUT, eventually, kubernetes::previous};
use nix::sys::signal::Signal;

fn plugin() -> PathBuf {
    previous("inpod-cni").unwrap()
}

fn run(node: &Node, verb: fn(&Pod, &std::path::Path, &std::path::Path) -> Call, pod: &Pod) {
    let outcome = node.call(verb, pod).run_by(&plugin()).unwrap();
    assert_eq!(outcome.code, 0, "{outcome:?}");
}

#[test]
fn the_previous_plugin_drives_every_verb_of_the_agent_of_today() {
    let node = Node::running().unwrap();
    let pod = node.sandbox(Spec::new("web").ambient()).unwrap();
    run(&node, Call::add, &pod);
    node.until_whole(&pod.spec).unwrap();
    for verb in ["CHECK", "STATUS", "GC", "VERSION"] {
        let call = node.call(Call::add, &pod).with_var("CNI_COMMAND", verb);
        let alive = serde_json::json!([{"containerID": pod.container_id, "ifname": "eth0"}]);
        let call = call
            .with_key("cniVersion", "1.1.0")
            .with_key("cni.dev/valid-attachments", alive);
        let outcome = call.run_by(&plugin()).unwrap();
        assert_eq!(outcome.code, 0, "{verb}: {outcome:?}");
    }
    node.until_whole(&pod.spec).unwrap();
    run(&node, Call::del, &pod);
    eventually("its claim is released", TIMEOUT, || {
        ensure!(node.api().claims()?.is_empty());
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn what_the_previous_plugin_wrote_down_while_the_agent_was_away_is_acted_on() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("web").ambient()).unwrap();
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    run(&node, Call::del, &pod);
    pod.unmount().unwrap();
    node.start("pod-events").unwrap();
    node.ready().unwrap();
    eventually("the DEL is acted on", TIMEOUT, || {
        ensure!(node.api().claims()?.is_empty());
        ensure!(
            fs::read_dir(node.state_dir().join("spool"))?
                .next()
                .is_none()
        );
        anyhow::Ok(())
    })
    .unwrap();
}

/// Starts a node with one service of the previous release.
fn start(previous: &str) -> Node {
    let node = Node::new().unwrap();
    for service in SERVICES {
        restart(&node, service, previous);
    }
    node.start_ztunnel(&[]).unwrap();
    node.ready().unwrap();
    node
}

fn restart(node: &Node, service: &str, previous: &str) {
    if service == previous {
        node.start_previous(service).unwrap();
    } else {
        node.start(service).unwrap();
    }
}

fn until_served(node: &Node, pods: &[&Pod]) {
    let mut expected: Vec<_> = pods.iter().map(|pod| pod.spec.uid.clone()).collect();
    expected.sort();
    eventually(
        "ztunnel serves exactly the pods in the mesh",
        TIMEOUT,
        || {
            let listed = node.api().workloads()?.workloads;
            let states = listed.iter().flat_map(|it| &it.states);
            let added = states.filter(|state| state.phase() == WorkloadPhase::Added);
            let mut served: Vec<_> = added.map(|state| state.uid.clone()).collect();
            served.sort();
            ensure!(served == expected, "{served:?}, not {expected:?}");
            ensure!(listed.len() == expected.len(), "{listed:?}");
            anyhow::Ok(())
        },
    )
    .unwrap();
}

#[test]
fn a_previous_service_beside_those_of_today_enrolls_and_leaves() {
    for previous in ["pod-events", "ztunnel-broker"] {
        let node = start(previous);
        let one = node.pod(Spec::new("one").ambient()).unwrap();
        until_served(&node, &[&one]);
        for service in ["ztunnel-broker", "pod-events"] {
            node.stop(service, Signal::SIGKILL).unwrap();
            restart(&node, service, previous);
            node.ready().unwrap();
            node.until_whole(&one.spec).unwrap();
            until_served(&node, &[&one]);
        }
        node.stop("ztunnel", Signal::SIGKILL).unwrap();
        let unserved = node.sandbox(Spec::new("unserved").ambient()).unwrap();
        let call = node.call(Call::add, &unserved);
        let outcome = call.timeout_seconds(5).run().unwrap();
        assert_ne!(outcome.code, 0, "{outcome:?}");
        node.del(&unserved).unwrap();
        node.start_ztunnel(&[]).unwrap();
        until_served(&node, &[&one]);
        let two = node.pod(Spec::new("two").ambient()).unwrap();
        until_served(&node, &[&one, &two]);
        node.del(&one).unwrap();
        until_served(&node, &[&two]);
    }
}

/// Marks the rules as those of another schema, in one transaction.
fn age(pod: &Pod) -> anyhow::Result<()> {
    let rules = pod.exec(&["nft", "-s", "list", "ruleset"])?;
    ensure!(rules.contains("inpod schema=2"), "{rules}");
    let old = rules.replace("inpod schema=2", "inpod schema=1");
    // nft takes comments of 128 characters; the kernel takes more.
    let old = old.replace(" switched=tcp_migrate_req", "");
    let old = old.replace(" ports=1,6,8,53", "");
    let file = std::env::temp_dir().join(format!("{}.nft", pod.container_id));
    fs::write(&file, format!("flush ruleset\n{old}"))?;
    let loaded = pod.exec(&["nft", "-f", file.to_str().context("a path in UTF-8")?]);
    fs::remove_file(&file)?;
    loaded.map(drop)
}

#[test]
fn rules_marked_with_an_older_schema_are_replaced_at_the_start_of_the_agent_and_no_connection_is_cut()
 {
    let mesh = Mesh::new().unwrap();
    let to = SocketAddr::new(mesh.outsider.v4.into(), PORT);
    let flow = Flow::open(&mesh.b, to).unwrap();
    mesh.node.stop("pod-events", Signal::SIGKILL).unwrap();
    mesh.node.stop("netconfig", Signal::SIGKILL).unwrap();
    age(&mesh.b).unwrap();
    flow.goes_on().unwrap();
    mesh.node.start("netconfig").unwrap();
    mesh.node.start("pod-events").unwrap();
    mesh.node.ready().unwrap();
    mesh.node
        .until(&mesh.b.spec, PodState::Enrolled, TIMEOUT)
        .unwrap();
    mesh.node.until_whole(&mesh.b.spec).unwrap();
    let rules = mesh.b.ruleset().unwrap();
    assert!(rules.contains("inpod schema=2"), "{rules}");
    assert!(!rules.contains("inpod schema=1"), "{rules}");
    flow.goes_on().unwrap();
    mesh.reached_from_outside().unwrap();
}
