//! Membership by labels and annotations of real objects, initially and at run time.

use integration::App;
use serde_json::{Value, json};

use super::*;

fn until_annotated_as(cluster: &Cluster, name: &str, wanted: Option<&str>) {
    eventually("the pod is annotated so", TIMEOUT, || {
        let object = cluster.server.get(&cluster.path(name))?;
        let found = object.pointer("/metadata/annotations/ambient.istio.io~1redirection");
        ensure!(
            found.and_then(Value::as_str) == wanted,
            "it bears {found:?}"
        );
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn a_pod_that_is_labelled_like_its_namespace_stays_in_the_mesh_with_either_label_alone() {
    let cluster = Cluster::shared();
    label_namespace(&cluster, &cluster.namespace, &ambient());
    let pod = cluster.pod("web", Some("ambient"));
    let outsider = outsider(&cluster);
    let _app = App::start(&pod.netns, PORT).unwrap();
    until_in(&cluster, &pod, Reason::LabelOnPod);
    let rules = pod.traces().unwrap();
    label(&cluster, "web", &Value::Null);
    until_in(&cluster, &pod, Reason::LabelOnNamespace);
    assert_eq!(taken(&cluster, &outsider, &pod), CAPTURED);
    label(&cluster, "web", &json!("ambient"));
    until_in(&cluster, &pod, Reason::LabelOnPod);
    let none = json!({"istio.io/dataplane-mode": null});
    label_namespace(&cluster, &cluster.namespace, &none);
    // A later pod proves that this change arrived.
    let later = cluster.pod("later", None);
    until_out(&cluster, &later, Reason::NotSelected);
    let known = until_in(&cluster, &pod, Reason::LabelOnPod);
    assert_eq!(taken(&cluster, &outsider, &pod), CAPTURED);
    assert_eq!(pod.traces().unwrap(), rules);
    let mut events = known.timeline.iter().map(|entry| &entry.event);
    assert!(
        !events.any(|event| event.contains("drain") || event.contains("leav")),
        "{:?}",
        known.timeline
    );
}

#[test]
fn a_pod_that_nobody_labelled_stays_out_and_is_remembered() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", None);
    let outsider = outsider(&cluster);
    let _app = App::start(&pod.netns, PORT).unwrap();
    until_out(&cluster, &pod, Reason::NotSelected);
    assert_eq!(taken(&cluster, &outsider, &pod), [0; 0]);
    let known = cluster.node.explain(&pod.spec).unwrap();
    assert_eq!(known.sandbox.unwrap().container_id, pod.container_id);
    assert_eq!(served(&cluster), [""; 0]);
}

#[test]
fn a_pod_that_opts_out_stays_out_of_its_ambient_namespace_until_it_takes_that_back() {
    let cluster = Cluster::shared();
    label_namespace(&cluster, &cluster.namespace, &ambient());
    let pod = cluster.pod("web", Some("none"));
    let outsider = outsider(&cluster);
    let _app = App::start(&pod.netns, PORT).unwrap();
    until_out(&cluster, &pod, Reason::OptedOut);
    assert_eq!(taken(&cluster, &outsider, &pod), [0; 0]);
    label(&cluster, "web", &Value::Null);
    until_in(&cluster, &pod, Reason::LabelOnNamespace);
    assert_eq!(taken(&cluster, &outsider, &pod), CAPTURED);
}

#[test]
fn a_pod_with_a_sidecar_stays_out_whichever_label_asks_for_it() {
    let cluster = Cluster::shared();
    let with_sidecar = |name: &str, mode| {
        let mut object = cluster.object(name, mode);
        object["metadata"]["annotations"] = json!({"sidecar.istio.io/status": "{}"});
        let pod = cluster.sandbox(name, &cluster.create(&object));
        cluster.node.add(&pod).unwrap();
        pod
    };
    until_out(
        &cluster,
        &with_sidecar("labelled", Some("ambient")),
        Reason::HasSidecar,
    );
    label_namespace(&cluster, &cluster.namespace, &ambient());
    let late = with_sidecar("late", None);
    until_out(&cluster, &late, Reason::HasSidecar);
    assert_eq!(served(&cluster), [""; 0]);
}

/// Returns the notes of pod-events' Events about a pod with the reason for sandboxed runtimes.
fn sandbox_events(cluster: &Cluster, name: &str) -> Vec<String> {
    let namespace = &cluster.namespace;
    let path = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events");
    let all = cluster.server.get(&path).unwrap();
    let all = all.pointer("/items").and_then(Value::as_array).unwrap();
    let of_pod = all.iter().filter(|event| {
        event["reason"] == "SandboxedRuntime" && event["regarding"]["name"] == *name
    });
    let notes = of_pod.map(|event| event["note"].as_str().unwrap().to_owned());
    notes.collect()
}

// scenario: 69
#[test]
fn a_selected_pod_of_a_sandboxed_runtime_has_an_event() {
    let cluster = Cluster::shared();
    for class in ["kata-qemu", "plain-runc"] {
        let object = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass",
            "metadata": {"name": class}, "handler": "any"});
        let classes = "/apis/node.k8s.io/v1/runtimeclasses";
        cluster.server.create(classes, &object).unwrap();
    }
    let of_class = |name: &str, mode, class: &str| {
        let mut object = cluster.object(name, mode);
        object["spec"]["runtimeClassName"] = class.into();
        let pod = cluster.sandbox(name, &cluster.create(&object));
        cluster.node.add(&pod).unwrap();
        pod
    };
    let unselected = of_class("unselected", None, "kata-qemu");
    let usual = of_class("usual", Some("ambient"), "plain-runc");
    let sandboxed = of_class("sandboxed", Some("ambient"), "kata-qemu");
    until_out(&cluster, &sandboxed, Reason::SandboxedRuntime);
    until_out(&cluster, &unselected, Reason::NotSelected);
    until_in(&cluster, &usual, Reason::LabelOnPod);
    let notes = eventually("the Event arrives", TIMEOUT, || {
        let notes = sandbox_events(&cluster, "sandboxed");
        ensure!(!notes.is_empty(), "no Event");
        anyhow::Ok(notes)
    })
    .unwrap();
    let has_class_and_remedy = |note: &String| {
        note.contains("kata-qemu") && note.contains("Run the pod with another runtime class")
    };
    assert!(
        notes.len() == 1 && notes.iter().all(has_class_and_remedy),
        "{notes:?}"
    );
    for name in ["unselected", "usual"] {
        assert_eq!(sandbox_events(&cluster, name), [""; 0], "{name}");
    }
}

#[test]
fn a_sidecar_that_appears_on_a_pod_in_the_mesh_withdraws_it_and_its_going_brings_it_back() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", Some("ambient"));
    let outsider = outsider(&cluster);
    let _app = App::start(&pod.netns, PORT).unwrap();
    until_annotated_as(&cluster, "web", Some("enabled"));
    annotate(&cluster, "web", &json!({"sidecar.istio.io/status": "{}"}));
    until_out(&cluster, &pod, Reason::HasSidecar);
    assert_eq!(taken(&cluster, &outsider, &pod), [0; 0]);
    assert_eq!(served(&cluster), [""; 0]);
    until_annotated_as(&cluster, "web", None);
    annotate(&cluster, "web", &json!({"sidecar.istio.io/status": null}));
    until_in(&cluster, &pod, Reason::LabelOnPod);
    assert_eq!(taken(&cluster, &outsider, &pod), CAPTURED);
    until_annotated_as(&cluster, "web", Some("enabled"));
}

#[test]
fn a_pod_in_the_nodes_network_stays_out_whichever_label_asks_for_it_and_is_not_searched_for() {
    let cluster = Cluster::shared();
    let on_the_node = |name: &str, mode| {
        let mut object = cluster.object(name, mode);
        object["spec"]["hostNetwork"] = true.into();
        cluster.create(&object);
        cluster.until_shown(name);
    };
    on_the_node("by-namespace", None);
    on_the_node("by-label", None);
    label(&cluster, "by-label", &json!("ambient"));
    label_namespace(&cluster, &cluster.namespace, &ambient());
    // A later pod proves that those changes arrived.
    let later = cluster.pod("later", None);
    until_in(&cluster, &later, Reason::LabelOnNamespace);
    for name in ["by-namespace", "by-label"] {
        let known = cluster
            .node
            .api()
            .explain(&cluster.namespace, name)
            .unwrap();
        assert_eq!(known.reason(), Reason::HostNetwork);
        assert!(
            known.last_failure.is_none() && known.sandbox.is_none(),
            "{known:?}"
        );
    }
    assert_eq!(served(&cluster), [later.spec.uid]);
}

// scenario: 6
#[test]
fn a_pod_that_left_the_mesh_and_joins_again_is_captured_each_time() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", Some("ambient"));
    let outsider = outsider(&cluster);
    let _app = App::start(&pod.netns, PORT).unwrap();
    for _ in 0..3 {
        until_in(&cluster, &pod, Reason::LabelOnPod);
        assert_eq!(taken(&cluster, &outsider, &pod), CAPTURED);
        label(&cluster, "web", &Value::Null);
        until_out(&cluster, &pod, Reason::NotSelected);
        assert_eq!(taken(&cluster, &outsider, &pod), [0; 0]);
        label(&cluster, "web", &json!("ambient"));
    }
    until_in(&cluster, &pod, Reason::LabelOnPod);
    assert_eq!(taken(&cluster, &outsider, &pod), CAPTURED);
}

#[test]
fn a_namespaces_label_concerns_its_own_pods_and_no_others() {
    let cluster = Cluster::shared();
    let bank = format!("{}-bank", cluster.namespace);
    cluster.make_namespace(&bank, &json!({}));
    let pods = ["a", "b", "c"].map(|name| cluster.pod(name, None));
    let other = beside(&cluster, &bank, "a", None);
    cluster.node.add(&other).unwrap();
    label_namespace(&cluster, &cluster.namespace, &ambient());
    for pod in &pods {
        until_in(&cluster, pod, Reason::LabelOnNamespace);
    }
    until_out(&cluster, &other, Reason::NotSelected);
    label_namespace(&cluster, &bank, &ambient());
    until_in(&cluster, &other, Reason::LabelOnNamespace);
    assert_eq!(served(&cluster).len(), 4);
}

#[test]
fn the_capture_of_name_resolution_is_switched_on_and_off_for_a_pod_that_runs() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", Some("ambient"));
    until_in(&cluster, &pod, Reason::LabelOnPod);
    let captures = |wanted: bool| {
        eventually("the rules follow", TIMEOUT, || {
            let rules = pod.ruleset()?;
            ensure!(rules.contains("15053") == wanted, "{rules}");
            anyhow::Ok(())
        })
        .unwrap();
        until_in(&cluster, &pod, Reason::LabelOnPod);
    };
    captures(false);
    for (value, captured) in [(json!("true"), true), (json!("false"), false)] {
        let annotation = json!({"ambient.istio.io/dns-capture": value});
        annotate(&cluster, "web", &annotation);
        captures(captured);
    }
    // Peers saw no change: it stayed in the mesh.
    let changes = cluster.server.changes_in(&cluster.namespace).unwrap();
    let of_pods = changes
        .iter()
        .filter(|it| it.pointer("/objectRef/resource") == Some(&json!("pods")));
    assert_eq!(of_pods.count(), 1, "{changes:?}");
}
