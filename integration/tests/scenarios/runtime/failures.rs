//! Refusals, timeouts and a missing agent with a real containerd.

use std::{fs, thread, time::Duration};

use anyhow::ensure;
use inpod_proto::podevents::v1::PodState;
use integration::{Spec, TIMEOUT, eventually};
use nix::sys::signal::Signal;
use serde_json::json;
use tonic::Status;

use crate::runtime::{chain::spooled, containerd::Runtime, sandboxes::in_the_mesh};

fn refusal(runtime: &Runtime, spec: &Spec) -> String {
    let refused: Status = runtime.cri.run(runtime.config(spec)).unwrap_err();
    refused.message().to_owned()
}

pub(crate) fn assert_error(message: &str, parts: &[&str]) {
    let missing: Vec<_> = parts
        .iter()
        .filter(|part| !message.contains(**part))
        .collect();
    assert!(missing.is_empty(), "{missing:?} is not in {message:?}");
}

/// Waits until `shop` is in the plugin's list of enrolled namespaces.
pub(crate) fn enrol_shop(runtime: &Runtime) {
    let path = runtime.node.manifests().join("namespaces.yaml");
    let text = "kind: Namespace\nmetadata: {name: shop, labels: {istio.io/dataplane-mode: ambient}}\n\
                ---\nkind: Namespace\nmetadata: {name: bank}\n";
    fs::write(path.with_extension("tmp"), text).unwrap();
    fs::rename(path.with_extension("tmp"), path).unwrap();
    let list = runtime.node.state_dir().join("enrolled-namespaces");
    eventually("the list names shop", TIMEOUT, || {
        let found = fs::read_to_string(&list)?;
        ensure!(found == "shop\n", "it is {found:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

pub(crate) fn stop_agent(runtime: &Runtime) {
    runtime.node.stop("pod-events", Signal::SIGKILL).unwrap();
}

pub(crate) fn start_agent(runtime: &Runtime) {
    runtime.node.start("pod-events").unwrap();
    runtime.node.ready().unwrap();
}

#[test]
fn a_refused_sandbox_is_told_why_and_leaves_nothing() {
    let runtime = Runtime::running().unwrap();
    let spec = Spec::new("nobody").ambient();
    let message = refusal(&runtime, &spec);
    assert_error(
        &message,
        &[
            "plugin type=\"inpod-cni\" failed (add): inpod: ",
            "shop/nobody",
            "[POD_UNKNOWN]",
        ],
    );
    runtime.until_empty().unwrap();
    // The next attempt succeeds once the pod is known.
    let pod = runtime.pod(spec).unwrap();
    in_the_mesh(&runtime, &pod);
    runtime.end(&pod.container_id).unwrap();
    runtime.until_empty().unwrap();
}

#[test]
fn an_agent_that_hangs_costs_the_plugins_own_time_and_not_the_callers() {
    let runtime = Runtime::with(&[("timeoutSeconds", json!(3))]).unwrap();
    let spec = Spec::new("web").ambient();
    runtime.node.write_manifest(&spec).unwrap();
    runtime.node.signal("pod-events", Signal::SIGSTOP).unwrap();
    let message = refusal(&runtime, &spec);
    runtime.node.signal("pod-events", Signal::SIGCONT).unwrap();
    assert_error(
        &message,
        &[
            "inpod-cni",
            "pod-events did not answer within 2.9 s",
            "[DEADLINE_EXCEEDED]",
        ],
    );
    runtime.until_empty().unwrap();
    runtime.node.until(&spec, PodState::Out, TIMEOUT).unwrap();
}

#[test]
fn while_the_agent_is_away_enrolled_namespaces_wait_and_others_are_admitted_and_join_later() {
    let runtime = Runtime::running().unwrap();
    enrol_shop(&runtime);
    stop_agent(&runtime);
    assert!(runtime.cri.condition("NetworkReady").unwrap());
    let waiting = Spec::new("waiting");
    runtime.node.write_manifest(&waiting).unwrap();
    let message = refusal(&runtime, &waiting);
    assert_error(
        &message,
        &[
            "inpod-cni",
            "cannot connect to pod-events at",
            "the pod waits",
            "[AGENT_UNAVAILABLE]",
        ],
    );
    let in_bank = |name| Spec {
        namespace: "bank".to_owned(),
        ..Spec::new(name)
    };
    let asked = runtime.pod(in_bank("asked").ambient()).unwrap();
    let plain = runtime.pod(in_bank("plain")).unwrap();
    for pod in [&asked, &plain] {
        assert!(pod.traces().unwrap().is_empty());
    }
    start_agent(&runtime);
    runtime.node.until_whole(&asked.spec).unwrap();
    in_the_mesh(&runtime, &asked);
    assert!(plain.traces().unwrap().is_empty());
    let waiting = runtime.pod(waiting).unwrap();
    in_the_mesh(&runtime, &waiting);
    for pod in [asked, plain, waiting] {
        runtime.end(&pod.container_id).unwrap();
    }
    runtime.until_empty().unwrap();
}

#[test]
fn a_sandbox_stops_while_the_agent_is_away_and_is_forgotten_when_it_is_back() {
    let runtime = Runtime::running().unwrap();
    let pod = runtime.pod(Spec::new("web").ambient()).unwrap();
    stop_agent(&runtime);
    runtime.cri.stop(&pod.container_id).unwrap();
    runtime.cri.remove(&pod.container_id).unwrap();
    assert!(!runtime.node.has_veth(&pod));
    assert!(runtime.chain.addresses().unwrap().is_empty());
    // netconfig ends the claim of a missing netns on its own.
    eventually("the claim ends", TIMEOUT, || {
        ensure!(runtime.node.api().claims()?.is_empty(), "it is held");
        anyhow::Ok(())
    })
    .unwrap();
    assert_eq!(spooled(&runtime.node), 2);
    start_agent(&runtime);
    assert_eq!(spooled(&runtime.node), 0);
    runtime.until_empty().unwrap();
    let known = runtime.node.explain(&pod.spec).unwrap();
    assert_eq!(known.sandbox, None);
}

#[test]
fn a_plugin_that_is_not_installed_is_named_and_its_return_heals() {
    let runtime = Runtime::running().unwrap();
    let spec = Spec::new("web").ambient();
    runtime.node.write_manifest(&spec).unwrap();
    runtime.chain.remove_ours().unwrap();
    let message = refusal(&runtime, &spec);
    assert_error(&message, &["failed to find plugin \"inpod-cni\""]);
    runtime.chain.install_ours().unwrap();
    for left in runtime.cri.sandboxes().unwrap() {
        runtime.end(&left.id).unwrap();
    }
    let pod = runtime.pod(spec).unwrap();
    in_the_mesh(&runtime, &pod);
    runtime.end(&pod.container_id).unwrap();
    runtime.until_empty().unwrap();
}

fn plugin_runs(runtime: &Runtime) -> anyhow::Result<bool> {
    let ours = format!("CNI_PATH={}", runtime.chain.plugins().display());
    for entry in fs::read_dir("/proc")? {
        // The process may end meanwhile.
        let process = entry?.path();
        let comm = fs::read_to_string(process.join("comm")).unwrap_or_default();
        let environment = fs::read(process.join("environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0);
        if comm.trim() == "inpod-cni" && variables.any(|variable| variable == ours.as_bytes()) {
            return Ok(true);
        }
    }
    Ok(false)
}

pub(crate) fn until_plugin_runs(runtime: &Runtime, expected: bool) {
    let what = format!("the plugin runs: {expected}");
    eventually(&what, TIMEOUT, || {
        ensure!(plugin_runs(runtime)? == expected, "it is not so");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn a_plugin_that_its_caller_kills_leaves_nothing() {
    let runtime = Runtime::with(&[("timeoutSeconds", json!(20))]).unwrap();
    let spec = Spec::new("web").ambient();
    runtime.node.write_manifest(&spec).unwrap();
    runtime.node.signal("pod-events", Signal::SIGSTOP).unwrap();
    let client = runtime.client().unwrap();
    let client = client.patient_for(Duration::from_secs(2));
    let refused = client.run(runtime.config(&spec)).unwrap_err();
    // Killed before its own deadline: its DEL meets an agent that is back.
    runtime.node.signal("pod-events", Signal::SIGCONT).unwrap();
    assert!(!refused.message().contains("inpod"), "{refused:?}");
    runtime.until_empty().unwrap();
    // A kubelet would also repeat while containerd reserves the name.
    let pod = eventually("the next attempt succeeds", TIMEOUT, || {
        runtime.pod(spec.clone())
    });
    let pod = pod.unwrap();
    in_the_mesh(&runtime, &pod);
    runtime.end(&pod.container_id).unwrap();
    runtime.until_empty().unwrap();
}

#[test]
fn a_containerd_that_is_killed_in_the_middle_of_an_add_leaves_nothing_when_it_has_stopped_the_sandbox()
 {
    let runtime = Runtime::with(&[("timeoutSeconds", json!(5))]).unwrap();
    let spec = Spec::new("web").ambient();
    runtime.node.write_manifest(&spec).unwrap();
    runtime.node.signal("pod-events", Signal::SIGSTOP).unwrap();
    let (client, config) = (runtime.client().unwrap(), runtime.config(&spec));
    let caller = thread::spawn(move || client.run(config));
    until_plugin_runs(&runtime, true);
    runtime.kill_containerd().unwrap();
    assert!(caller.join().unwrap().is_err());
    runtime.until_ready().unwrap();
    // The agent finishes an ADD without its caller.
    runtime.node.signal("pod-events", Signal::SIGCONT).unwrap();
    until_plugin_runs(&runtime, false);
    for left in runtime.cri.sandboxes().unwrap() {
        runtime.end(&left.id).unwrap();
    }
    runtime.until_empty().unwrap();
    let pod = runtime.pod(spec).unwrap();
    in_the_mesh(&runtime, &pod);
    runtime.end(&pod.container_id).unwrap();
    runtime.until_empty().unwrap();
}
