//! A runtime's calls, its timeouts, and the answers.

use std::{path::PathBuf, thread, time::Duration};

use anyhow::{Context as _, ensure};
use inpod_proto::podevents::v1::{ExplainPodResponse, PodState};
use inpod_types::Reason;
use integration::{Pod, Spec, TIMEOUT, eventually};
use nix::sys::signal::Signal;
use serde_json::json;

use crate::runtime::{
    chain::{spooled, within},
    containerd::Runtime,
    failures::until_plugin_runs,
    recorder::{record, recorded},
    sandboxes::in_the_mesh,
};

/// RunPodSandbox usually takes less than this.
const WAITS: Duration = Duration::from_secs(3);

fn position(known: &ExplainPodResponse, event: &str) -> usize {
    let mut events = known.timeline.iter();
    let place = events.position(|entry| entry.event.starts_with(event));
    place
        .ok_or_else(|| format!("no {event:?} in {:?}", known.timeline))
        .unwrap()
}

fn listening(pod: &Pod) -> Vec<u16> {
    let sockets = pod.exec(&["ss", "-Hltn"]).unwrap();
    let ports = [15001, 15006, 15008];
    let is_open = |port: &u16| sockets.contains(&format!(":{port} "));
    ports.into_iter().filter(is_open).collect()
}

#[test]
fn a_sandbox_waits_until_ztunnel_has_acknowledged_it_and_then_its_listeners_are_up() {
    let runtime = Runtime::running().unwrap();
    let spec = Spec::new("web").ambient();
    runtime.node.write_manifest(&spec).unwrap();
    runtime.node.until_known(&spec).unwrap();
    runtime.node.signal("ztunnel", Signal::SIGSTOP).unwrap();
    let (client, config) = (runtime.client().unwrap(), runtime.config(&spec));
    let caller = thread::spawn(move || client.run(config));
    let claim = eventually("the pod is claimed", TIMEOUT, || {
        let claims = runtime.node.api().claims()?;
        claims.into_iter().next().context("nothing is claimed")
    });
    thread::sleep(WAITS);
    assert!(!caller.is_finished());
    let known = runtime.node.explain(&spec).unwrap();
    assert_ne!(known.state(), PodState::Enrolled);
    // Rules follow only after listeners exist.
    let netns = PathBuf::from(claim.unwrap().path);
    assert_eq!(within(&netns, &["nft", "list", "tables"]).unwrap(), "");
    runtime.node.signal("ztunnel", Signal::SIGCONT).unwrap();
    let id = caller.join().unwrap().unwrap();
    let pod = runtime.sandbox(spec, &id).unwrap();
    assert_eq!(listening(&pod), [15001, 15006, 15008]);
    in_the_mesh(&runtime, &pod);
    let known = runtime.node.explain(&pod.spec).unwrap();
    let order = ["claimed ", "acknowledged ", "applied "].map(|event| position(&known, event));
    assert!(order.is_sorted(), "{:?}", known.timeline);
    runtime.end(&id).unwrap();
    runtime.until_empty().unwrap();
}

#[test]
fn a_sandbox_that_ztunnel_refuses_is_told_ztunnels_words_and_a_remedy_and_its_del_is_answered() {
    let runtime = Runtime::running().unwrap();
    record(&runtime.chain).unwrap();
    runtime.node.stop("ztunnel", Signal::SIGKILL).unwrap();
    runtime
        .node
        .start_ztunnel(&["--fault", "nack-adds"])
        .unwrap();
    runtime.node.ready().unwrap();
    let spec = Spec::new("web").ambient();
    runtime.node.write_manifest(&spec).unwrap();
    let refused = runtime.cri.run(runtime.config(&spec)).unwrap_err();
    runtime.until_empty().unwrap();
    let calls = recorded(&runtime.chain).unwrap();
    let short: Vec<_> = calls.iter().map(|call| call.summary()).collect();
    // The runtime deletes at once, without a result.
    assert_eq!(short, [("ADD", true, true, 1), ("DEL", true, false, 0)]);
    let add = calls.first().unwrap();
    for key in ["msg", "details"] {
        let text = add.answer.get(key).and_then(|text| text.as_str()).unwrap();
        assert!(refused.message().contains(text), "{refused:?}: {text:?}");
    }
    let remedy = Reason::ZtunnelRefused.remedy();
    for part in ["plugin type=\"inpod-cni\" failed (add): inpod: ", remedy] {
        assert!(refused.message().contains(part), "{part:?} {refused:?}");
    }
}

#[test]
fn both_dels_of_a_sandbox_are_seen_and_answered_and_nothing_else_is_asked() {
    let runtime = Runtime::running().unwrap();
    record(&runtime.chain).unwrap();
    let pod = runtime.pod(Spec::new("web").ambient()).unwrap();
    in_the_mesh(&runtime, &pod);
    runtime.end(&pod.container_id).unwrap();
    runtime.until_empty().unwrap();
    let calls = recorded(&runtime.chain).unwrap();
    let short: Vec<_> = calls.iter().map(|call| call.summary()).collect();
    // No CHECK: containerd never calls it.
    assert_eq!(
        short,
        [
            ("ADD", true, true, 0),
            ("DEL", true, true, 0),
            ("DEL", false, false, 0),
        ]
    );
    let ids = calls.iter().map(|call| &call.container_id);
    assert!(ids.into_iter().all(|id| *id == pod.container_id));
    let versions = calls.iter().map(|call| call.asked.get("cniVersion"));
    assert!(versions.into_iter().all(|it| it == Some(&json!("1.0.0"))));
    let add = calls.first().unwrap();
    assert_eq!(add.asked.get("prevResult"), Some(&add.answer));
}

#[test]
fn a_hanging_add_is_killed_at_the_runtimes_deadline_and_its_del_leaves_nothing_while_the_agent_hangs_on()
 {
    // The plugin has more time than its caller.
    let runtime = Runtime::with(&[("timeoutSeconds", json!(12))]).unwrap();
    let spec = Spec::new("web").ambient();
    runtime.node.write_manifest(&spec).unwrap();
    runtime.node.until_known(&spec).unwrap();
    runtime.node.signal("pod-events", Signal::SIGSTOP).unwrap();
    let client = runtime.client().unwrap();
    let (client, config) = (
        client.patient_for(Duration::from_secs(6)),
        runtime.config(&spec),
    );
    let caller = thread::spawn(move || client.run(config));
    until_plugin_runs(&runtime, true);
    let refused = caller.join().unwrap().unwrap_err();
    assert!(!refused.message().contains("inpod"), "{refused:?}");
    // The chain is undone from its end: host-local follows our successful DEL.
    eventually("the chain is taken down", 2 * TIMEOUT, || {
        let addresses = runtime.chain.addresses()?;
        ensure!(addresses.is_empty(), "{addresses:?}");
        anyhow::Ok(())
    })
    .unwrap();
    assert_eq!(spooled(&runtime.node), 1);
    runtime.node.signal("pod-events", Signal::SIGCONT).unwrap();
    runtime.until_empty().unwrap();
    eventually("the spool is read", TIMEOUT, || {
        ensure!(spooled(&runtime.node) == 0, "it is not");
        anyhow::Ok(())
    })
    .unwrap();
    runtime.node.until(&spec, PodState::Out, TIMEOUT).unwrap();
}
