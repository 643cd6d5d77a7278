//! Things that go wrong at the wrong moment: services that are away, hang or are restarted in the middle of something,
//! manifests that break, verbs that lie. Afterwards a pod is wholly in or wholly out.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

mod common;

use std::{
    fs,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use common::{Mesh, PORT};
use inpod_proto::{podevents::v1::PodState, types::v1::Reason};
use integration::{
    App, Call, Inhabitant, Node, PATIENCE, Pod, SERVICES, Spec, ask, connect, eventually, exchange,
    source_seen,
};
use nix::sys::signal::Signal;

const AMBIENT_NAMESPACE: &str =
    "kind: Namespace\nmetadata: {name: shop, labels: {istio.io/dataplane-mode: ambient}}\n";

/// A node whose services run and which has no ztunnel.
fn without_ztunnel() -> Node {
    let node = Node::new().unwrap();
    SERVICES
        .iter()
        .try_for_each(|service| node.start(service))
        .unwrap();
    eventually("the agent is ready", PATIENCE, || {
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

/// Waits until the pod's timeline tells of something.
fn told(node: &Node, pod: &Pod, event: &str) {
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
    eventually("nothing of the pod is left", PATIENCE, || {
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
    eventually("the agent knows that netconfig is away", PATIENCE, || {
        ensure!(!node.api().status()?.ready, "it does not");
        anyhow::Ok(())
    })
    .unwrap();
    node.start("netconfig").unwrap();
    let late = node.call(Call::add, &other).run().unwrap();
    assert!(
        late.code == 0 && late.took < Duration::from_secs(10),
        "{late:?}"
    );
    let early = early.join().unwrap().unwrap();
    assert!(
        early.code == 0 && early.took < Duration::from_secs(10),
        "{early:?}"
    );
}

#[test]
fn pod_events_is_soon_ready_although_a_pod_waits_to_be_enrolled() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a")).unwrap();
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    let began = Instant::now();
    node.start("pod-events").unwrap();
    node.ready().unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );
    node.until_whole(&pod.spec).unwrap();
}

#[test]
fn the_release_of_an_attempt_that_failed_is_not_taken_for_the_end_of_the_sandbox() {
    let node = without_ztunnel();
    let pod = node.pod(Spec::new("a")).unwrap();
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    told(&node, &pod, "claimed");
    // A later event interrupts the attempt: it is undone and made again.
    fs::write(node.manifests().join("namespaces.yaml"), AMBIENT_NAMESPACE).unwrap();
    told(&node, &pod, "undone");
    node.start_ztunnel(&[]).unwrap();
    let known = eventually("it joins", Duration::from_secs(40), || {
        node.until_whole(&pod.spec)
    })
    .unwrap();
    assert_eq!(known.sandbox.unwrap().container_id, pod.container_id);
    assert_eq!(node.api().claims().unwrap().len(), 1);
}

#[test]
fn an_enrolment_that_a_crash_cut_short_is_taken_back_when_it_is_no_longer_wanted_and_may_be_made_later()
 {
    let node = without_ztunnel();
    let pod = node.pod(Spec::new("a")).unwrap();
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    told(&node, &pod, "claimed");
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
    eventually("pod-events serves", PATIENCE, || node.api().status()).unwrap();
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

#[test]
fn deletions_of_an_old_sandbox_that_the_broker_did_not_hear_leave_the_new_one_served() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    let newer = node.pod(mesh.b.spec.clone()).unwrap();
    let _app = App::start(&newer.netns, PORT).unwrap();
    node.until_whole(&mesh.b.spec).unwrap();
    node.signal("ztunnel-broker", Signal::SIGSTOP).unwrap();
    node.del(&mesh.b).unwrap();
    restart(node, "ztunnel-broker");
    node.ready().unwrap();
    let known = node.until_whole(&mesh.b.spec).unwrap();
    assert_eq!(known.sandbox.unwrap().container_id, newer.container_id);
    ask(&mesh.outsider.netns, SocketAddr::new(newer.v4.into(), PORT)).unwrap();
}

#[test]
fn a_manifest_that_is_away_for_a_moment_changes_nothing() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    let manifest = node.manifests().join("shop-b.yaml");
    // As editors do: aside, then a new file of the name.
    fs::rename(&manifest, manifest.with_extension("yaml~")).unwrap();
    gone(node, &mesh.b);
    fs::copy(manifest.with_extension("yaml~"), &manifest).unwrap();
    node.until_whole(&mesh.b.spec).unwrap();
    let known = node.explain(&mesh.b.spec).unwrap();
    assert!(
        !known
            .timeline
            .iter()
            .any(|entry| entry.event.contains("left")),
        "{:?}",
        known.timeline
    );
    mesh.reached_from_outside().unwrap();
}

/// Waits until the source shows a pod no more.
fn gone(node: &Node, pod: &Pod) {
    eventually("the source shows it no more", PATIENCE, || {
        let reason = node.explain(&pod.spec)?.reason();
        ensure!(reason == Reason::PodUnknown, "{reason:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn a_claim_that_fails_once_after_a_restart_is_made_later_and_the_rules_are_mended() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    let _app = Inhabitant::of(&mesh.b).unwrap();
    node.stop("netconfig", Signal::SIGKILL).unwrap();
    mesh.b.exec(&["nft", "flush", "ruleset"]).unwrap();
    mesh.b
        .exec(&["ip", "addr", "flush", "dev", "eth0"])
        .unwrap();
    node.start("netconfig").unwrap();
    eventually("the claim was refused", PATIENCE, || {
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
fn a_del_does_not_wait_behind_an_enrolment_that_waits_for_a_ztunnel() {
    let node = without_ztunnel();
    let pod = node.pod(Spec::new("a")).unwrap();
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    told(&node, &pod, "claimed");
    let del = node.call(Call::del, &pod).run().unwrap();
    assert!(
        del.code == 0 && del.took < Duration::from_secs(2),
        "{del:?}"
    );
    is_out(&node, &pod);
    assert!(node.explain(&pod.spec).unwrap().sandbox.is_none());
}

#[test]
fn a_del_while_the_runtimes_add_waits_for_a_ztunnel_ends_the_add() {
    let node = without_ztunnel();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let call = node.call(Call::add, &pod).timeout_seconds(20);
    let add = thread::spawn(move || call.run());
    told(&node, &pod, "claimed");
    let del = node.call(Call::del, &pod).run().unwrap();
    assert!(
        del.code == 0 && del.took < Duration::from_secs(2),
        "{del:?}"
    );
    // A runtime has killed its ADD before it sends DEL; one that has not is told within its time.
    assert_eq!(add.join().unwrap().unwrap().code, 1);
    is_out(&node, &pod);
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
    eventually("it is told apart from the end of the pod", PATIENCE, || {
        let failure = node
            .explain(&mesh.b.spec)?
            .last_failure
            .context("no failure")?;
        ensure!(failure.reason() == Reason::NetnsUnreachable, "{failure:?}");
        anyhow::Ok(())
    })
    .unwrap();
    restart(node, "netconfig");
    node.until_whole(&mesh.b.spec).unwrap();
    mesh.reached_from_outside().unwrap();
}

#[test]
fn manifests_that_cannot_be_read_at_start_leave_every_pod_as_it_is() {
    let node = Node::running().unwrap();
    let namespaces = node.manifests().join("namespaces.yaml");
    fs::write(&namespaces, AMBIENT_NAMESPACE).unwrap();
    let pod = node.pod(Spec::new("a")).unwrap();
    node.until_whole(&pod.spec).unwrap();
    node.stop("pod-events", Signal::SIGTERM).unwrap();
    fs::write(&namespaces, AMBIENT_NAMESPACE.replace('}', "")).unwrap();
    fs::write(
        node.manifests().join("shop-a.yaml"),
        "kind: Pod\nmetadata: [",
    )
    .unwrap();
    node.start("pod-events").unwrap();
    node.ready().unwrap();
    let known = node.until_whole(&pod.spec).unwrap();
    assert_eq!(known.state(), PodState::Enrolled);
    // A new pod of that namespace is told why it must wait.
    let other = node.sandbox(Spec::new("b")).unwrap();
    let error = node
        .call(Call::add, &other)
        .run()
        .unwrap()
        .error()
        .unwrap()
        .to_string();
    assert!(error.contains("NAMESPACE_UNKNOWN"), "{error}");
    fs::write(&namespaces, AMBIENT_NAMESPACE).unwrap();
    node.write_manifest(&pod.spec).unwrap();
    eventually("it can be added", PATIENCE, || node.add(&other)).unwrap();
}

#[test]
fn a_manifest_that_is_cut_to_nothing_keeps_what_it_said() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    fs::write(node.manifests().join("shop-b.yaml"), "").unwrap();
    // Another file tells when the directory was read.
    node.write_manifest(&Spec::new("other")).unwrap();
    eventually("the directory was read", PATIENCE, || {
        node.explain(&Spec::new("other"))
    })
    .unwrap();
    assert_eq!(
        node.explain(&mesh.b.spec).unwrap().reason(),
        Reason::LabelOnPod
    );
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
fn the_del_of_a_pod_outside_the_mesh_needs_no_other_service() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a")).unwrap();
    node.stop("netconfig", Signal::SIGKILL).unwrap();
    node.stop("ztunnel-broker", Signal::SIGKILL).unwrap();
    assert_eq!(node.call(Call::del, &pod).run().unwrap().code, 0);
    assert!(node.explain(&pod.spec).unwrap().sandbox.is_none());
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
    told(node, &mesh.b, "draining 1");
    node.stop("ztunnel-broker", Signal::SIGKILL).unwrap();
    node.write_manifest(&mesh.b.spec).unwrap();
    eventually("the label is seen", PATIENCE, || {
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
fn a_pod_that_ends_slowly_is_served_beside_its_successor_of_the_same_name() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    let _app = Inhabitant::of(&mesh.b).unwrap();
    let successor = Spec {
        uid: "b2-0000-1111-2222-333333333333".into(),
        ..mesh.b.spec.clone()
    };
    let newer = node.pod(successor).unwrap();
    restart(node, "ztunnel-broker");
    node.ready().unwrap();
    node.until_whole(&newer.spec).unwrap();
    mesh.reached_from_outside().unwrap();
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

#[test]
fn a_directory_of_manifests_that_is_replaced_is_followed() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a")).unwrap();
    let (directory, aside) = (node.manifests(), node.manifests().with_extension("old"));
    fs::rename(&directory, &aside).unwrap();
    fs::create_dir(&directory).unwrap();
    fs::copy(
        aside.join("namespaces.yaml"),
        directory.join("namespaces.yaml"),
    )
    .unwrap();
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    node.until_whole(&pod.spec).unwrap();
}
