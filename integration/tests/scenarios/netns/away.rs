//! pod-events is away: the plugin's behaviour, its spool, and the replay.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::ensure;
use inpod_proto::podevents::v1::PodState;
use integration::{Call, Node, Outcome, Pod, Spec, TIMEOUT, bin, eventually, run};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

fn node() -> Node {
    let node = Node::running().unwrap();
    label_namespaces(&node, &[("shop", false), ("bank", false)]);
    node
}

fn label_namespaces(node: &Node, namespaces: &[(&str, bool)]) {
    let manifest = |(name, ambient): &(&str, bool)| {
        let mode = if *ambient { "ambient" } else { "none" };
        format!(
            "kind: Namespace\nmetadata: {{name: {name}, labels: {{istio.io/dataplane-mode: {mode}}}}}\n"
        )
    };
    let text: Vec<_> = namespaces.iter().map(manifest).collect();
    let path = node.manifests().join("namespaces.yaml");
    fs::write(path.with_extension("tmp"), text.join("---\n")).unwrap();
    fs::rename(path.with_extension("tmp"), path).unwrap();
}

fn in_bank(name: &str) -> Spec {
    Spec {
        namespace: "bank".to_owned(),
        ..Spec::new(name)
    }
}

fn stop_pod_events(node: &Node) {
    node.stop("pod-events", Signal::SIGKILL).unwrap();
}

/// Starts pod-events; when it serves, it has read the spool.
fn start_pod_events(node: &Node) {
    node.start("pod-events").unwrap();
    eventually("pod-events serves", TIMEOUT, || node.api().status()).unwrap();
}

fn call(node: &Node, verb: fn(&Pod, &Path, &Path) -> Call, pod: &Pod) -> Outcome {
    node.call(verb, pod).run().unwrap()
}

fn spool(node: &Node) -> PathBuf {
    node.state_dir().join("spool")
}

fn spooled(node: &Node) -> Vec<String> {
    let Ok(files) = fs::read_dir(spool(node)) else {
        return Vec::new();
    };
    let mut names: Vec<_> = files
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn until_enrolled_namespaces(node: &Node, expected: &str) {
    let path = node.state_dir().join("enrolled-namespaces");
    eventually("the list is right", TIMEOUT, || {
        let found = fs::read_to_string(&path)?;
        ensure!(found == expected, "it is {found:?}, not {expected:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

/// Sends both DELs of a runtime. Only they end the sandbox: the netns stays.
fn end(node: &Node, pod: &Pod) {
    for verb in [Call::del, Call::del_again] {
        let outcome = call(node, verb, pod);
        assert!(
            outcome.code == 0 && outcome.stdout.is_empty(),
            "{outcome:?}"
        );
    }
}

fn until_forgotten(node: &Node, pod: &Pod) {
    eventually("the sandbox is forgotten", TIMEOUT, || {
        let claims = node.api().claims()?;
        let workloads = node.api().workloads()?.workloads;
        let known = (claims, workloads, node.explain(&pod.spec)?.sandbox);
        ensure!(known == (vec![], vec![], None), "{known:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn a_sandbox_that_ended_while_the_agent_was_away_is_forgotten_when_it_is_back() {
    let node = node();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    stop_pod_events(&node);
    end(&node, &pod);
    assert_eq!(spooled(&node).len(), 2);
    start_pod_events(&node);
    assert_eq!(spooled(&node), [""; 0]);
    until_forgotten(&node, &pod);
}

#[test]
fn a_spooled_end_takes_effect_before_any_later_verb_and_without_the_other_services() {
    let node = node();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    for service in ["pod-events", "netconfig", "ztunnel-broker"] {
        node.stop(service, Signal::SIGKILL).unwrap();
    }
    end(&node, &pod);
    start_pod_events(&node);
    assert_eq!(spooled(&node), [""; 0]);
    // The checkpointed end survives the next crash.
    stop_pod_events(&node);
    for service in ["netconfig", "ztunnel-broker", "pod-events"] {
        node.start(service).unwrap();
    }
    node.ready().unwrap();
    until_forgotten(&node, &pod);
}

#[test]
fn a_pod_that_was_admitted_unenrolled_joins_when_its_label_asks_for_it() {
    let node = node();
    until_enrolled_namespaces(&node, "");
    stop_pod_events(&node);
    let asked = node.sandbox(in_bank("asked").ambient()).unwrap();
    let plain = node.sandbox(in_bank("plain")).unwrap();
    for pod in [&asked, &plain] {
        let outcome = call(&node, Call::add, pod);
        assert_eq!(outcome.code, 0, "{outcome:?}");
        assert!(pod.traces().unwrap().is_empty());
    }
    assert_eq!(spooled(&node).len(), 2);
    start_pod_events(&node);
    assert_eq!(spooled(&node), [""; 0]);
    for (pod, known) in [
        (&asked, node.until_whole(&asked.spec).unwrap()),
        (&plain, node.explain(&plain.spec).unwrap()),
    ] {
        assert_eq!(known.sandbox.unwrap().container_id, pod.container_id);
    }
    // The pod stays known for later labels.
    node.write_manifest(&plain.spec.clone().ambient()).unwrap();
    node.until_whole(&plain.spec).unwrap();
}

#[test]
fn a_pod_of_an_enrolled_namespace_waits_for_the_agent() {
    let node = node();
    label_namespaces(&node, &[("shop", true), ("bank", false)]);
    until_enrolled_namespaces(&node, "shop\n");
    stop_pod_events(&node);
    let pod = node.sandbox(Spec::new("a")).unwrap();
    let outcome = call(&node, Call::add, &pod);
    assert_eq!(outcome.error().unwrap().get("code"), Some(&json!(11)));
    assert_eq!(spooled(&node), [""; 0]);
    start_pod_events(&node);
    node.ready().unwrap();
    node.add(&pod).unwrap();
    node.until_whole(&pod.spec).unwrap();
}

#[test]
fn the_list_names_exactly_the_namespaces_that_have_pods_in_the_mesh_as_labels_come_and_go() {
    let node = node();
    until_enrolled_namespaces(&node, "");
    label_namespaces(&node, &[("shop", true), ("bank", false)]);
    until_enrolled_namespaces(&node, "shop\n");
    let pod = node.pod(in_bank("a")).unwrap();
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    until_enrolled_namespaces(&node, "bank\nshop\n");
    node.until_whole(&pod.spec).unwrap();
    label_namespaces(&node, &[("shop", false), ("bank", false)]);
    until_enrolled_namespaces(&node, "bank\n");
    node.write_manifest(&pod.spec).unwrap();
    until_enrolled_namespaces(&node, "");
    node.until(&pod.spec, PodState::Out, TIMEOUT).unwrap();
}

#[test]
fn the_list_is_not_emptied_because_a_manifest_cannot_be_read() {
    let node = node();
    label_namespaces(&node, &[("shop", true), ("bank", false)]);
    until_enrolled_namespaces(&node, "shop\n");
    stop_pod_events(&node);
    fs::write(node.manifests().join("namespaces.yaml"), "kind: [").unwrap();
    node.write_manifest(&in_bank("a").ambient()).unwrap();
    start_pod_events(&node);
    until_enrolled_namespaces(&node, "bank\nshop\n");
}

#[test]
fn an_entry_that_is_garbage_blocks_nothing_and_is_set_aside() {
    let node = node();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    stop_pod_events(&node);
    fs::create_dir_all(spool(&node)).unwrap();
    fs::write(spool(&node).join("0000-garbage"), b"\xff{").unwrap();
    end(&node, &pod);
    start_pod_events(&node);
    assert_eq!(spooled(&node), ["0000-garbage.unreadable"]);
    until_forgotten(&node, &pod);
}

#[test]
fn what_is_written_down_while_the_agent_runs_is_read_too() {
    let node = node();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    stop_pod_events(&node);
    end(&node, &pod);
    let aside = spool(&node).with_extension("aside");
    fs::rename(spool(&node), &aside).unwrap();
    start_pod_events(&node);
    node.until_whole(&pod.spec).unwrap();
    fs::rename(&aside, spool(&node)).unwrap();
    until_forgotten(&node, &pod);
    assert_eq!(spooled(&node), [""; 0]);
}

#[test]
fn a_pod_that_is_not_known_is_dropped_when_it_has_had_its_time_and_never_taken_for_another() {
    let node = node();
    stop_pod_events(&node);
    let pod = node.sandbox(in_bank("a").ambient()).unwrap();
    let outcome = call(&node, Call::add, &pod);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    // Another pod has its name since.
    let successor = Spec {
        uid: "another-0000-1111-2222-333333333333".to_owned(),
        ..pod.spec.clone()
    };
    node.write_manifest(&successor).unwrap();
    backdate_spool(&node);
    start_pod_events(&node);
    assert_eq!(spooled(&node), [""; 0]);
    assert_eq!(node.explain(&pod.spec).unwrap().sandbox, None);
}

/// Moves the only entry's time back.
fn backdate_spool(node: &Node) {
    let [name] = spooled(node).try_into().unwrap();
    let path = spool(node).join(name);
    let mut entry: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    *entry.get_mut("time_unix_ms").unwrap() = 1.into();
    fs::write(path, entry.to_string()).unwrap();
}

#[test]
fn pods_that_the_kill_switch_admitted_unenrolled_stay_outside_as_long_as_it_is_set() {
    let node = node();
    let switch = node.state_dir().join("disabled");
    fs::write(&switch, "").unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let outcome = call(&node, Call::add, &pod);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    stop_pod_events(&node);
    start_pod_events(&node);
    node.healthy("pod-events").unwrap();
    let run_dir = node.run_dir().display().to_string();
    let client = bin("inpod").unwrap().display().to_string();
    let pods = || run(&client, &["pods", "--run-dir", &run_dir]).unwrap();
    let printed = pods();
    let (listed, notice) = printed.split_once("\n\n").unwrap();
    assert!(listed.contains("shop"), "{listed}");
    assert!(
        notice.contains("kill switch") && notice.contains("installer enable"),
        "{notice}"
    );
    assert_eq!(spooled(&node).len(), 1);
    assert!(pod.traces().unwrap().is_empty());
    fs::remove_file(switch).unwrap();
    node.until_whole(&pod.spec).unwrap();
    node.ready().unwrap();
    assert!(!pods().contains("kill switch"));
    assert_eq!(spooled(&node), [""; 0]);
}

#[test]
fn a_state_directory_that_cannot_be_had_is_reported_and_stops_nothing() {
    let node = node();
    stop_pod_events(&node);
    fs::remove_dir_all(node.state_dir()).unwrap();
    fs::write(node.state_dir(), "a file").unwrap();
    start_pod_events(&node);
    let status = node.api().status().unwrap();
    let mut conditions = status.conditions.iter();
    let condition = conditions
        .find(|found| found.name == "plugin-state")
        .unwrap();
    assert!(
        !condition.ok && condition.message.contains("plugin"),
        "{condition:?}"
    );
    // It is created as soon as that is possible.
    fs::remove_file(node.state_dir()).unwrap();
    node.ready().unwrap();
    until_enrolled_namespaces(&node, "");
}
