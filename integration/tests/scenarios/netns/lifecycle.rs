//! Sandboxes start, change, are replaced and end, while services and ztunnels restart.

mod restarts;

use std::net::{SocketAddr, TcpStream};

use crate::common::mesh::{Mesh, PORT};
use anyhow::ensure;
use inpod_proto::podevents::v1::PodState;
use integration::{
    App, Call, Node, Pod, SERVICES, Spec, TIMEOUT, ask, connect, eventually, exchange, source_seen,
};
use nix::sys::signal::Signal;

const NOTHING: Vec<String> = Vec::new();

fn open(from: &Pod, to: &Pod) -> anyhow::Result<TcpStream> {
    source_seen(connect(&from.netns, SocketAddr::new(to.v4.into(), PORT))?)
        .map(|(_, stream)| stream)
}

#[test]
fn add_prints_the_previous_result_byte_for_byte_and_nothing_else() {
    let node = Node::running().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let call = node.call(Call::add, &pod);
    let stdin: serde_json::Value = serde_json::from_str(&call.stdin).unwrap();
    let outcome = call.run().unwrap();
    assert_eq!(
        (outcome.code, outcome.stdout),
        (0, stdin["prevResult"].to_string())
    );
}

#[test]
fn an_add_twice_equals_once() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    let before = (pod.ruleset().unwrap(), node.ztunnel_state().unwrap());
    node.add(&pod).unwrap();
    assert_eq!(
        (pod.ruleset().unwrap(), node.ztunnel_state().unwrap()),
        before
    );
    node.until_whole(&pod.spec).unwrap();
}

#[test]
fn a_label_on_a_running_pod_enrols_it_and_its_removal_withdraws_it() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a")).unwrap();
    let outsider = node.pod(Spec::new("outsider")).unwrap();
    let _app = App::start(&pod.netns, PORT).unwrap();
    assert_eq!(pod.traces().unwrap(), NOTHING);
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    node.until_whole(&pod.spec).unwrap();
    ask(&outsider.netns, SocketAddr::new(pod.v4.into(), PORT)).unwrap();
    assert_eq!(
        node.accesses()
            .unwrap()
            .last()
            .map(|access| access.listener),
        Some(15006)
    );

    node.write_manifest(&pod.spec).unwrap();
    node.until(&pod.spec, PodState::Out, TIMEOUT).unwrap();
    assert_eq!(pod.traces().unwrap(), NOTHING);
    assert!(node.api().claims().unwrap().is_empty());
    assert!(node.api().workloads().unwrap().workloads.is_empty());
    let before = node.accesses().unwrap().len();
    assert_eq!(
        ask(&outsider.netns, SocketAddr::new(pod.v4.into(), PORT)).unwrap(),
        outsider.v4
    );
    assert_eq!(node.accesses().unwrap().len(), before);
}

#[test]
fn a_captured_connection_lives_on_while_its_pod_withdraws_and_new_ones_go_direct() {
    let mesh = Mesh::new().unwrap();
    let mut captured = open(&mesh.outsider, &mesh.b).unwrap();
    mesh.node
        .write_manifest(&Spec {
            mode: None,
            ..mesh.b.spec.clone()
        })
        .unwrap();
    eventually("the pod drains", TIMEOUT, || {
        let known = mesh.node.explain(&mesh.b.spec)?;
        ensure!(
            known
                .timeline
                .iter()
                .any(|entry| entry.event.starts_with("draining 1 ")),
            "{:?}",
            known.timeline
        );
        anyhow::Ok(())
    })
    .unwrap();
    let before = mesh.node.accesses().unwrap().len();
    ask(
        &mesh.outsider.netns,
        SocketAddr::new(mesh.b.v4.into(), PORT),
    )
    .unwrap();
    assert_eq!(
        mesh.node.accesses().unwrap().len(),
        before,
        "a new connection was captured"
    );
    exchange(&mut captured, "still here").unwrap();
    drop(captured);
    mesh.node
        .until(&mesh.b.spec, PodState::Out, TIMEOUT)
        .unwrap();
    assert_eq!(mesh.b.traces().unwrap(), NOTHING);
}

// scenario: 6
#[test]
fn a_pod_that_is_labelled_again_while_it_drains_is_enrolled_again() {
    let mesh = Mesh::new().unwrap();
    let mut captured = open(&mesh.outsider, &mesh.b).unwrap();
    mesh.node
        .write_manifest(&Spec {
            mode: None,
            ..mesh.b.spec.clone()
        })
        .unwrap();
    mesh.node
        .until(&mesh.b.spec, PodState::Withdrawing, TIMEOUT)
        .unwrap();
    mesh.node.write_manifest(&mesh.b.spec).unwrap();
    mesh.node.until_whole(&mesh.b.spec).unwrap();
    exchange(&mut captured, "still here").unwrap();
    mesh.reached_from_outside().unwrap();
}

#[test]
fn the_end_of_a_captured_connection_or_of_the_grace_is_awaited_by_nobody_else() {
    let mesh = Mesh::new().unwrap();
    let _captured = open(&mesh.outsider, &mesh.b).unwrap();
    mesh.node
        .write_manifest(&Spec {
            mode: None,
            ..mesh.b.spec.clone()
        })
        .unwrap();
    mesh.node
        .until(&mesh.b.spec, PodState::Withdrawing, TIMEOUT)
        .unwrap();
    mesh.node.pod(Spec::new("c").ambient()).unwrap();
    let waits = mesh.node.explain(&mesh.b.spec).unwrap();
    assert_eq!(waits.state(), PodState::Withdrawing);
}

#[test]
fn after_del_nothing_of_the_pod_is_held_and_the_host_side_of_its_veth_is_gone() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    // The test's own descriptor would keep the netns alive.
    let veth = pod.veth.clone();
    node.call(Call::del, &pod).run().unwrap();
    pod.unmount().unwrap();
    let again = node.call(Call::del_again, &pod);
    let held = Held {
        veth,
        spec: pod.spec.clone(),
    };
    drop(pod.netns);
    eventually("the veth is gone", TIMEOUT, || {
        ensure!(!held.is_there(&node), "{} is there", held.veth);
        anyhow::Ok(())
    })
    .unwrap();
    assert_eq!(again.run().unwrap().code, 0);
    assert!(node.api().claims().unwrap().is_empty());
    assert!(node.api().workloads().unwrap().workloads.is_empty());
    assert!(node.explain(&held.spec).unwrap().sandbox.is_none());
    eventually("ztunnel has let go", TIMEOUT, || {
        let state = node.ztunnel_state()?.to_string();
        ensure!(!state.contains(&held.spec.uid), "{state}");
        anyhow::Ok(())
    })
    .unwrap();
}

struct Held {
    veth: String,
    spec: Spec,
}

impl Held {
    fn is_there(&self, node: &Node) -> bool {
        let net = format!("--net={}", node.netns().path().display());
        integration::run("nsenter", &[&net, "ip", "link", "show", &self.veth]).is_ok()
    }
}

#[test]
fn a_late_del_of_an_old_sandbox_leaves_the_new_one_enrolled() {
    let mesh = Mesh::new().unwrap();
    let spec = mesh.b.spec.clone();
    let newer = mesh.node.pod(spec.clone()).unwrap();
    let _app = App::start(&newer.netns, PORT).unwrap();
    let mut live = open(&mesh.outsider, &newer).unwrap();
    mesh.node.del(&mesh.b).unwrap();
    let known = mesh.node.until_whole(&spec).unwrap();
    assert_eq!(known.sandbox.unwrap().container_id, newer.container_id);
    exchange(&mut live, "still here").unwrap();
    ask(&mesh.outsider.netns, SocketAddr::new(newer.v4.into(), PORT)).unwrap();
    assert_eq!(
        mesh.node
            .accesses()
            .unwrap()
            .last()
            .map(|access| access.listener),
        Some(15006)
    );
    assert_eq!(mesh.node.api().claims().unwrap().len(), 2);
}

#[test]
fn del_of_an_unknown_sandbox_and_a_repeated_del_succeed() {
    let node = Node::running().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    node.del(&pod).unwrap();
    assert_eq!(node.call(Call::del_again, &pod).run().unwrap().code, 0);
}

#[test]
fn garbage_collection_drops_what_the_runtime_does_not_list_and_nothing_else() {
    let node = Node::running().unwrap();
    let stale = node.pod(Spec::new("stale").ambient()).unwrap();
    let alive = node.pod(Spec::new("alive").ambient()).unwrap();
    assert!(node.api().collect("othernet", &[]).unwrap().is_empty());
    let dropped = node
        .api()
        .collect("podnet", &[&alive.container_id])
        .unwrap();
    assert_eq!(dropped, [stale.container_id]);
    node.until_whole(&alive.spec).unwrap();
    assert_eq!(node.api().claims().unwrap().len(), 1);
}

#[test]
fn a_sandbox_whose_del_was_never_told_is_forgotten_when_its_netns_is_gone() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    pod.unmount().unwrap();
    eventually("the claim is released", TIMEOUT, || {
        ensure!(node.api().claims()?.is_empty(), "it is held");
        ensure!(
            node.api().workloads()?.workloads.is_empty(),
            "ztunnel is to serve it"
        );
        // It is forgotten after every other component.
        ensure!(
            node.explain(&pod.spec)?.sandbox.is_none(),
            "it is remembered"
        );
        anyhow::Ok(())
    })
    .unwrap();
}

// scenario: 7
#[test]
fn a_ztunnel_that_never_answers_ends_add_within_its_deadline_with_code_11_and_leaves_nothing() {
    let node = Node::new().unwrap();
    SERVICES
        .iter()
        .try_for_each(|service| node.start(service))
        .unwrap();
    node.start_ztunnel(&["--fault", "never-ack"]).unwrap();
    eventually("ztunnel is connected", TIMEOUT, || {
        ensure!(!node.api().workloads()?.sessions.is_empty(), "it is not");
        anyhow::Ok(())
    })
    .unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let outcome = node.call(Call::add, &pod).timeout_seconds(6).run().unwrap();
    assert!(outcome.took < TIMEOUT, "{:?}", outcome.took);
    assert_eq!(
        (outcome.code, &outcome.error().unwrap()["code"]),
        (1, &11.into()),
        "{outcome:?}"
    );
    left_nothing(&node, &pod);
}

#[test]
fn without_any_ztunnel_add_ends_within_its_deadline_and_says_that_none_ever_connected() {
    let node = Node::new().unwrap();
    SERVICES
        .iter()
        .try_for_each(|service| node.start(service))
        .unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let outcome = node.call(Call::add, &pod).timeout_seconds(5).run().unwrap();
    let error = outcome.error().unwrap();
    assert_eq!(error["code"], 11);
    assert!(
        error.to_string().contains("ZTUNNEL_NEVER_CONNECTED"),
        "{error}"
    );
    left_nothing(&node, &pod);
}

// scenario: 57
#[test]
fn a_ztunnel_that_refuses_is_quoted_in_the_error_and_nothing_is_left() {
    let node = Node::running().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let _taken = App::start(&pod.netns, 15008).unwrap();
    let outcome = node.call(Call::add, &pod).timeout_seconds(8).run().unwrap();
    let error = outcome.error().unwrap();
    assert_eq!(error["code"], 11);
    assert!(
        error.to_string().contains("failure to start proxy"),
        "{error}"
    );
    left_nothing(&node, &pod);
    // One bad pod blocks neither others nor ztunnel's readiness.
    node.pod(Spec::new("b").ambient()).unwrap();
    eventually("ztunnel is ready", TIMEOUT, || {
        let state = node.ztunnel_state()?;
        ensure!(state["ready"] == true, "{state}");
        anyhow::Ok(())
    })
    .unwrap();
}

fn left_nothing(node: &Node, pod: &Pod) {
    assert_eq!(pod.traces().unwrap(), NOTHING);
    assert!(node.api().claims().unwrap().is_empty());
    assert!(node.api().workloads().unwrap().workloads.is_empty());
    assert!(node.explain(&pod.spec).unwrap().sandbox.is_none());
}

#[test]
fn while_the_agent_is_away_an_add_is_told_to_try_again_and_a_del_is_spooled() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    let other = node.sandbox(Spec::new("b").ambient()).unwrap();
    node.stop("pod-events", Signal::SIGTERM).unwrap();
    let add = node.call(Call::add, &other).run().unwrap();
    assert_eq!((add.code, &add.error().unwrap()["code"]), (1, &11.into()));
    let del = node.call(Call::del, &pod).run().unwrap();
    assert_eq!((del.code, del.stdout.as_str()), (0, ""));
}
