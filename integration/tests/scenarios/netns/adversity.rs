//! Services that are away, hang or restart, broken manifests and contradicting CNI calls: afterwards a pod is either
//! completely enrolled or completely withdrawn.

mod ends;
mod manifests;

use std::{fs, net::SocketAddr, thread, time::Duration};

use crate::common::mesh::{Mesh, PORT};
use anyhow::{Context as _, ensure};
use inpod_proto::types::v1::Reason;
use integration::{
    Call, Inhabitant, Node, Pod, SERVICES, Spec, TIMEOUT, ask, connect, eventually, exchange,
    source_seen,
};
use nix::sys::signal::Signal;

const AMBIENT_NAMESPACE: &str =
    "kind: Namespace\nmetadata: {name: shop, labels: {istio.io/dataplane-mode: ambient}}\n";

fn without_ztunnel() -> Node {
    let node = Node::new().unwrap();
    SERVICES
        .iter()
        .try_for_each(|service| node.start(service))
        .unwrap();
    eventually("the agent is ready", TIMEOUT, || {
        ensure!(node.api().status()?.ready, "it is not");
        anyhow::Ok(())
    })
    .unwrap();
    node
}

fn restart(node: &Node, service: &str) {
    node.stop(service, Signal::SIGKILL).unwrap();
    node.start(service).unwrap();
}

fn wait_for_event(node: &Node, pod: &Pod, event: &str) {
    eventually(event, Duration::from_secs(40), || {
        let known = node.explain(&pod.spec)?;
        ensure!(
            known
                .timeline
                .iter()
                .any(|entry| entry.event.starts_with(event)),
            "{:?}",
            known.timeline
        );
        anyhow::Ok(())
    })
    .unwrap();
}

fn is_out(node: &Node, pod: &Pod) {
    eventually("nothing of the pod is left", TIMEOUT, || {
        let (traces, claims) = (pod.traces()?, node.api().claims()?);
        let workloads = node.api().workloads()?.workloads;
        let own = claims
            .iter()
            .any(|claim| claim.path == pod.path().display().to_string());
        let served = workloads.iter().any(|status| {
            status
                .workload
                .as_ref()
                .is_some_and(|workload| workload.uid == pod.spec.uid)
        });
        ensure!(
            traces.is_empty() && !own && !served,
            "{traces:?}, claimed: {own}, served: {served}"
        );
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn an_add_that_comes_while_netconfig_is_away_goes_on_when_it_is_back_and_holds_up_nobody() {
    let node = Node::running().unwrap();
    let first = node.sandbox(Spec::new("a").ambient()).unwrap();
    let other = node.sandbox(Spec::new("b").ambient()).unwrap();
    node.stop("netconfig", Signal::SIGKILL).unwrap();
    let call = node.call(Call::add, &first);
    let early = thread::spawn(move || call.run());
    eventually("the agent knows that netconfig is away", TIMEOUT, || {
        ensure!(!node.api().status()?.ready, "it does not");
        anyhow::Ok(())
    })
    .unwrap();
    node.start("netconfig").unwrap();
    let late = node.call(Call::add, &other).run().unwrap();
    assert_eq!(late.code, 0, "{late:?}");
    let early = early.join().unwrap().unwrap();
    assert_eq!(early.code, 0, "{early:?}");
}

#[test]
fn pod_events_is_soon_ready_although_a_pod_waits_to_be_enrolled() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a")).unwrap();
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    node.start("pod-events").unwrap();
    node.ready().unwrap();
    node.until_whole(&pod.spec).unwrap();
}

#[test]
fn an_enrollment_that_a_crash_cut_short_is_taken_back_when_it_is_no_longer_wanted_and_may_be_made_later()
 {
    let node = without_ztunnel();
    let pod = node.pod(Spec::new("a")).unwrap();
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    wait_for_event(&node, &pod, "claimed");
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    node.write_manifest(&pod.spec).unwrap();
    node.start("pod-events").unwrap();
    node.start_ztunnel(&[]).unwrap();
    node.ready().unwrap();
    is_out(&node, &pod);
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    node.until_whole(&pod.spec).unwrap();
}

#[test]
fn what_cannot_be_taken_back_while_netconfig_is_away_is_taken_back_when_it_is_there() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    let _app = Inhabitant::of(&mesh.b).unwrap();
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    node.stop("netconfig", Signal::SIGKILL).unwrap();
    // As if it had been killed between the rules and the last write.
    rewrite_checkpoint(node, "b", |record| {
        record.insert("intent".into(), "enrolling".into())
    });
    node.write_manifest(&Spec {
        mode: None,
        ..mesh.b.spec.clone()
    })
    .unwrap();
    node.start("pod-events").unwrap();
    eventually("pod-events serves", TIMEOUT, || node.api().status()).unwrap();
    node.start("netconfig").unwrap();
    is_out(node, &mesh.b);
    ask(
        &mesh.outsider.netns,
        SocketAddr::new(mesh.b.v4.into(), PORT),
    )
    .unwrap();
}

fn rewrite_checkpoint<T>(
    node: &Node,
    pod: &str,
    change: impl Fn(&mut serde_json::Map<String, serde_json::Value>) -> T,
) {
    for entry in fs::read_dir(node.run_dir().join("pod-events/pods")).unwrap() {
        let path = entry.unwrap().path();
        let mut record: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let fields = record.as_object_mut().unwrap();
        if fields.get("name").and_then(|name| name.as_str()) == Some(pod) {
            change(fields);
            fs::write(&path, record.to_string()).unwrap();
            return;
        }
    }
    unreachable!("no checkpoint of {pod}")
}

fn wait_until_gone(node: &Node, pod: &Pod) {
    eventually("the source shows it no more", TIMEOUT, || {
        let reason = node.explain(&pod.spec)?.reason();
        ensure!(reason == Reason::PodUnknown, "{reason:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn a_claim_that_fails_once_after_a_restart_is_made_later_and_the_rules_are_repaired() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    let _app = Inhabitant::of(&mesh.b).unwrap();
    node.stop("netconfig", Signal::SIGKILL).unwrap();
    mesh.b.exec(&["nft", "flush", "ruleset"]).unwrap();
    mesh.b
        .exec(&["ip", "addr", "flush", "dev", "eth0"])
        .unwrap();
    node.start("netconfig").unwrap();
    eventually("the claim was refused", TIMEOUT, || {
        let failure = node
            .explain(&mesh.b.spec)?
            .last_failure
            .context("no failure")?;
        ensure!(failure.reason() == Reason::AddressMismatch, "{failure:?}");
        anyhow::Ok(())
    })
    .unwrap();
    let (v4, v6) = (format!("{}/16", mesh.b.v4), format!("{}/64", mesh.b.v6));
    mesh.b
        .exec(&["ip", "addr", "add", &v4, "dev", "eth0"])
        .unwrap();
    mesh.b
        .exec(&["ip", "addr", "add", &v6, "dev", "eth0", "nodad"])
        .unwrap();
    eventually("it is whole again", Duration::from_secs(60), || {
        node.until_whole(&mesh.b.spec)
    })
    .unwrap();
    mesh.reached_from_outside().unwrap();
}

#[test]
fn a_netconfig_that_does_not_see_the_netns_directory_ends_no_pod() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    let _apps = [
        Inhabitant::of(&mesh.a).unwrap(),
        Inhabitant::of(&mesh.b).unwrap(),
    ];
    node.stop("netconfig", Signal::SIGKILL).unwrap();
    node.start_netconfig_blind().unwrap();
    eventually(
        "it is distinguished from the end of the pod",
        TIMEOUT,
        || {
            let failure = node
                .explain(&mesh.b.spec)?
                .last_failure
                .context("no failure")?;
            ensure!(failure.reason() == Reason::NetnsUnreachable, "{failure:?}");
            anyhow::Ok(())
        },
    )
    .unwrap();
    restart(node, "netconfig");
    node.until_whole(&mesh.b.spec).unwrap();
    mesh.reached_from_outside().unwrap();
}

#[test]
fn an_add_of_a_living_sandbox_with_another_netns_is_refused_and_changes_nothing() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    let _app = Inhabitant::of(&mesh.b).unwrap();
    let mut wrong = node.sandbox(mesh.b.spec.clone()).unwrap();
    wrong.container_id = mesh.b.container_id.clone();
    let error = node.call(Call::add, &wrong).run().unwrap().error().unwrap();
    assert!(error.to_string().contains("NETNS_MISMATCH"), "{error}");
    node.until_whole(&mesh.b.spec).unwrap();
    mesh.reached_from_outside().unwrap();
    assert!(wrong.traces().unwrap().is_empty());
}

#[test]
fn a_failed_return_into_the_mesh_cuts_no_connection_that_still_drains() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    let to = SocketAddr::new(mesh.b.v4.into(), PORT);
    let (_, mut live) = source_seen(connect(&mesh.outsider.netns, to).unwrap()).unwrap();
    node.write_manifest(&Spec {
        mode: None,
        ..mesh.b.spec.clone()
    })
    .unwrap();
    wait_for_event(node, &mesh.b, "draining 1");
    node.stop("ztunnel-broker", Signal::SIGKILL).unwrap();
    node.write_manifest(&mesh.b.spec).unwrap();
    eventually("the label is seen", TIMEOUT, || {
        ensure!(
            node.explain(&mesh.b.spec)?.reason() == Reason::LabelOnPod,
            "it is not"
        );
        anyhow::Ok(())
    })
    .unwrap();
    exchange(&mut live, "still here").unwrap();
    node.start("ztunnel-broker").unwrap();
    node.until_whole(&mesh.b.spec).unwrap();
    exchange(&mut live, "still here").unwrap();
}

#[test]
fn after_restarts_no_netns_of_a_pod_outside_the_mesh_is_held() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a")).unwrap();
    let inside = node.pod(Spec::new("b").ambient()).unwrap();
    for service in SERVICES {
        restart(&node, service);
        node.ready().unwrap();
    }
    node.until_whole(&inside.spec).unwrap();
    let paths: Vec<_> = node
        .api()
        .claims()
        .unwrap()
        .into_iter()
        .map(|claim| claim.path)
        .collect();
    assert_eq!(paths, [inside.path().display().to_string()]);
    assert!(pod.traces().unwrap().is_empty());
}

#[test]
fn a_checkpoint_that_is_no_text_keeps_no_pod_from_its_service() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    node.stop("pod-events", Signal::SIGTERM).unwrap();
    fs::write(node.run_dir().join("pod-events/pods/x.json"), [0xff, 0xfe]).unwrap();
    node.start("pod-events").unwrap();
    node.ready().unwrap();
    node.until_whole(&pod.spec).unwrap();
}
