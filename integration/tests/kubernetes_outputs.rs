//! What Kubernetes is told of pods, by a real API server with the rights as they are deployed: the annotation
//! `ambient.istio.io/redirection`, in its order and no more often than it changes; and Events.
#![cfg(feature = "apiserver")]
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

mod cluster;

use anyhow::{Context as _, ensure};
use cluster::Cluster;
use inpod_proto::podevents::v1::PodState;
use integration::{Call, PATIENCE, Pod, Spec, eventually, run};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const NOTHING: Vec<String> = Vec::new();
const ANNOTATION: &str = "/metadata/annotations/ambient.istio.io~1redirection";

/// What a pod bears.
fn borne(cluster: &Cluster, name: &str) -> Option<String> {
    let pod = cluster.server.get(&cluster.path(name)).unwrap();
    let value = pod.pointer(ANNOTATION).and_then(Value::as_str);
    value.map(str::to_owned)
}

/// An attempt to enrol that nobody waits for takes as long as `PATIENCE`, nearly.
fn until_borne(cluster: &Cluster, name: &str, wanted: Option<&str>) {
    eventually("the pod is annotated so", 3 * PATIENCE, || {
        let found = borne(cluster, name);
        ensure!(found.as_deref() == wanted, "it bears {found:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

/// What pod-events asked to be written to a pod's annotation, in its order; `null` removes.
fn patches(cluster: &Cluster, name: &str) -> Vec<Value> {
    let changes = cluster.server.changes_in(&cluster.namespace).unwrap();
    let of_pod = changes.iter().filter(|change| {
        let says =
            |at: &str, wanted: &str| change.pointer(at).and_then(Value::as_str) == Some(wanted);
        says("/objectRef/resource", "pods") && says("/objectRef/name", name)
    });
    let value = |change: &Value| {
        let asked = format!("/requestObject{ANNOTATION}");
        change.pointer(&asked).cloned().unwrap_or_default()
    };
    of_pod.map(value).collect()
}

/// Waits until the server has written down that exactly this was asked for a pod.
fn until_asked(cluster: &Cluster, name: &str, wanted: &[Value]) {
    eventually("this was asked for", PATIENCE, || {
        let found = patches(cluster, name);
        ensure!(found == wanted, "{found:?}, not {wanted:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

fn all_patches(cluster: &Cluster) -> usize {
    let changes = cluster.server.changes_in(&cluster.namespace).unwrap();
    let of_pods = changes.iter().filter(|change| {
        change
            .pointer("/objectRef/resource")
            .and_then(Value::as_str)
            == Some("pods")
    });
    of_pods.count()
}

/// The Events about a pod with a reason.
fn events(cluster: &Cluster, name: &str, reason: &str) -> Vec<Value> {
    let path = format!(
        "/apis/events.k8s.io/v1/namespaces/{}/events",
        cluster.namespace
    );
    let all = cluster.server.get(&path).unwrap();
    let says = |event: &Value, at: &str, wanted: &str| {
        event.pointer(at).and_then(Value::as_str) == Some(wanted)
    };
    let all = all
        .pointer("/items")
        .and_then(Value::as_array)
        .unwrap()
        .iter();
    all.filter(|event| says(event, "/regarding/name", name) && says(event, "/reason", reason))
        .cloned()
        .collect()
}

fn until_event(cluster: &Cluster, name: &str, reason: &str) -> Value {
    eventually("the Event is there", PATIENCE, || {
        let found = events(cluster, name, reason).into_iter().next();
        found.with_context(|| format!("no {reason} of {name}"))
    })
    .unwrap()
}

/// A number among the metrics of pod-events.
fn counted(cluster: &Cluster, series: &str) -> u64 {
    let socket = daemon::socket(&cluster.node.run_dir(), "pod-events");
    let socket = socket.to_str().unwrap();
    let text = run(
        "curl",
        &["-sSf", "--unix-socket", socket, "http://localhost/metrics"],
    )
    .unwrap();
    let value = |line: &str| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok();
    text.lines().find_map(value).unwrap_or_default()
}

fn label(cluster: &Cluster, name: &str, mode: &str) {
    let change = json!({"metadata": {"labels": {"istio.io/dataplane-mode": mode}}});
    cluster.server.patch(&cluster.path(name), &change).unwrap();
}

fn set_status(cluster: &Cluster, name: &str, status: &Value) {
    let path = format!("{}/status", cluster.path(name));
    cluster
        .server
        .patch(&path, &json!({"status": status}))
        .unwrap();
}

fn until_condition(cluster: &Cluster, name: &str, ok: bool) -> String {
    eventually("the condition is so", PATIENCE, || {
        let status = cluster.node.api().status()?;
        let mut all = status.conditions.into_iter();
        let found = all.find(|found| found.name == name).context("none")?;
        ensure!(found.ok == ok, "{found:?}");
        anyhow::Ok(found.message)
    })
    .unwrap()
}

/// What pod-events may do to pods' status, taken away or given back.
fn may_patch(cluster: &Cluster, may: bool) {
    let mut rules = vec![
        json!({"apiGroups": [""], "resources": ["pods", "namespaces"], "verbs": ["get", "list", "watch"]}),
        json!({"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]}),
    ];
    if may {
        rules.push(json!({"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}));
    }
    let role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/inpod-pod-events";
    cluster
        .server
        .patch(role, &json!({"rules": rules}))
        .unwrap();
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": "system:serviceaccount:inpod-system:pod-events",
            "resourceAttributes": {"verb": "patch", "resource": "pods", "subresource": "status"},
        },
    });
    let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    eventually("the server knows", PATIENCE, || {
        let answer = cluster.server.create(path, &review)?;
        ensure!(
            answer.pointer("/status/allowed") == Some(&may.into()),
            "{answer}"
        );
        anyhow::Ok(())
    })
    .unwrap();
}

fn refusing_ztunnel(cluster: &Cluster) {
    cluster.node.stop("ztunnel", Signal::SIGKILL).unwrap();
    cluster
        .node
        .start_ztunnel(&["--fault", "nack-adds"])
        .unwrap();
    until_condition(cluster, "ztunnel", true);
}

fn working_ztunnel(cluster: &Cluster) {
    cluster.node.stop("ztunnel", Signal::SIGKILL).unwrap();
    cluster.node.start_ztunnel(&[]).unwrap();
}

/// Pods of this node, created and added, in the mesh.
fn many(cluster: &Cluster, count: usize) -> Vec<Pod> {
    let specs = (0..count).map(|number| {
        let name = format!("web-{number}");
        let uid = cluster.create(&cluster.object(&name, Some("ambient")));
        Spec {
            namespace: cluster.namespace.clone(),
            uid,
            ..Spec::new(&name)
        }
    });
    cluster.node.pods(specs.collect()).unwrap()
}

#[test]
fn a_pod_is_annotated_once_after_its_add_and_its_lag_is_counted() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", Some("ambient"));
    until_borne(&cluster, "web", Some("enabled"));
    cluster.node.until_whole(&pod.spec).unwrap();
    until_asked(&cluster, "web", &[json!("enabled")]);
    assert_eq!(
        counted(&cluster, "inpod_pod_events_annotation_lag_seconds_count"),
        1
    );
    let result = "inpod_pod_events_annotation_patches_total{result=\"accepted\"}";
    assert_eq!(counted(&cluster, result), 1);
    assert_eq!(counted(&cluster, "inpod_pod_events_annotations_unmet"), 0);
    let managers = cluster.server.get(&cluster.path("web")).unwrap();
    let managers = managers.pointer("/metadata/managedFields").unwrap();
    assert!(
        managers.to_string().contains("inpod.io/pod-events"),
        "{managers}"
    );
}

#[test]
fn a_running_pod_is_annotated_when_it_is_enrolled_and_loses_that_when_it_opts_out() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", None);
    assert_eq!(borne(&cluster, "web"), None);
    cluster.label_namespace("ambient");
    until_borne(&cluster, "web", Some("enabled"));
    label(&cluster, "web", "none");
    until_borne(&cluster, "web", None);
    cluster
        .node
        .until(&pod.spec, PodState::Out, PATIENCE)
        .unwrap();
    assert_eq!(pod.traces().unwrap(), NOTHING);
    until_asked(&cluster, "web", &[json!("enabled"), Value::Null]);
}

#[test]
fn a_running_pod_that_ztunnel_refuses_is_pending_through_all_attempts_and_enabled_when_it_is_taken()
{
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", None);
    refusing_ztunnel(&cluster);
    label(&cluster, "web", "ambient");
    until_borne(&cluster, "web", Some("pending"));
    let event = until_event(&cluster, "web", "ZtunnelRefused");
    assert_eq!(event["type"], "Warning");
    assert_eq!(event["reportingController"], "inpod.io/pod-events");
    assert_eq!(event["reportingInstance"], cluster.node.name());
    assert_eq!(event["regarding"]["uid"], pod.spec.uid.as_str());
    // Some more attempts.
    let attempts = || cluster.node.explain(&pod.spec).unwrap().timeline.len();
    let before = attempts();
    eventually("it was tried again", PATIENCE, || {
        ensure!(attempts() > before + 2, "not yet");
        anyhow::Ok(())
    })
    .unwrap();
    working_ztunnel(&cluster);
    until_borne(&cluster, "web", Some("enabled"));
    until_asked(&cluster, "web", &[json!("pending"), json!("enabled")]);
    let mended = until_event(&cluster, "web", "LabelOnPod");
    assert_eq!(mended["type"], "Normal");
}

#[test]
fn a_running_pod_without_any_ztunnel_is_pending_until_one_comes() {
    let cluster = Cluster::shared();
    cluster.pod("web", None);
    cluster.node.stop("ztunnel", Signal::SIGKILL).unwrap();
    label(&cluster, "web", "ambient");
    until_borne(&cluster, "web", Some("pending"));
    cluster.node.start_ztunnel(&[]).unwrap();
    until_borne(&cluster, "web", Some("enabled"));
}

#[test]
fn a_job_that_ends_loses_its_annotation() {
    let cluster = Cluster::shared();
    cluster.pod("job", Some("ambient"));
    until_borne(&cluster, "job", Some("enabled"));
    set_status(&cluster, "job", &json!({"phase": "Succeeded"}));
    until_borne(&cluster, "job", None);
}

#[test]
fn a_pod_whose_deletion_was_asked_for_keeps_its_annotation_while_it_serves() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", Some("ambient"));
    until_borne(&cluster, "web", Some("enabled"));
    let gracefully = json!({"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 60});
    let how = ("DELETE", "application/json");
    cluster
        .server
        .ask_as("admin", how, &cluster.path("web"), &gracefully)
        .unwrap();
    // The watch shows what was made later after that.
    let uid = cluster.create(&cluster.object("other", Some("ambient")));
    cluster.until_shown("other");
    cluster.node.del(&pod).unwrap();
    // What is told of another pod afterwards shows that nothing was told of this one.
    let other = cluster.sandbox("other", &uid);
    cluster.node.add(&other).unwrap();
    until_borne(&cluster, "other", Some("enabled"));
    until_asked(&cluster, "other", &[json!("enabled")]);
    until_asked(&cluster, "web", &[json!("enabled")]);
}

#[test]
fn an_annotation_that_a_template_brings_is_removed_and_not_believed() {
    let cluster = Cluster::shared();
    let mut object = cluster.object("web", None);
    object["metadata"]["annotations"] = json!({"ambient.istio.io/redirection": "enabled"});
    let uid = cluster.create(&object);
    until_borne(&cluster, "web", None);
    let pod = cluster.sandbox("web", &uid);
    cluster.node.add(&pod).unwrap();
    assert_eq!(pod.traces().unwrap(), NOTHING);
    until_asked(&cluster, "web", &[Value::Null]);
}

#[test]
fn an_annotation_that_somebody_removes_from_an_enrolled_pod_is_put_back() {
    let cluster = Cluster::shared();
    cluster.pod("web", Some("ambient"));
    until_borne(&cluster, "web", Some("enabled"));
    let change = json!({"metadata": {"annotations": {"ambient.istio.io/redirection": null}}});
    cluster.server.patch(&cluster.path("web"), &change).unwrap();
    eventually("it is put back", PATIENCE, || {
        let told = patches(&cluster, "web");
        ensure!(told.len() == 2, "{told:?}");
        anyhow::Ok(())
    })
    .unwrap();
    until_borne(&cluster, "web", Some("enabled"));
}

#[test]
fn a_new_sandbox_of_an_annotated_pod_changes_nothing_that_is_right() {
    let cluster = Cluster::shared();
    let first = cluster.pod("web", Some("ambient"));
    until_borne(&cluster, "web", Some("enabled"));
    let second = cluster.sandbox("web", &first.spec.uid);
    cluster.node.add(&second).unwrap();
    cluster.node.until_whole(&second.spec).unwrap();
    cluster.node.del(&first).unwrap();
    assert_eq!(borne(&cluster, "web").as_deref(), Some("enabled"));
    until_asked(&cluster, "web", &[json!("enabled")]);
}

#[test]
fn a_patch_for_a_predecessor_does_not_mark_its_successor() {
    let cluster = Cluster::shared();
    let token = cluster
        .server
        .token(&format!("{}-more", cluster.node.name()))
        .unwrap();
    let node = format!("{}-more", cluster.node.name());
    let mut object = cluster.object("web", None);
    object["spec"]["nodeName"] = node.into();
    cluster.create(&object);
    let change = |uid: &str| json!({"metadata": {"uid": uid, "annotations": {"ambient.istio.io/redirection": "enabled"}}});
    let path = format!("{}/status", cluster.path("web"));
    let how = ("PATCH", "application/merge-patch+json");
    let other = change("00000000-1111-2222-3333-444444444444");
    let refused = cluster
        .server
        .ask_as(&token, how, &path, &other)
        .unwrap_err();
    let refused = refused.to_string();
    for words in ["\"code\": 422", "metadata.uid", "immutable"] {
        assert!(refused.contains(words), "{words} is not in {refused}");
    }
    assert_eq!(borne(&cluster, "web"), None);
}

#[test]
fn a_successor_outside_the_mesh_is_not_marked_with_what_was_told_of_its_predecessor() {
    let cluster = Cluster::own();
    may_patch(&cluster, false);
    cluster.pod("web", Some("ambient"));
    until_condition(&cluster, "annotations", false);
    cluster.server.delete(&cluster.path("web")).unwrap();
    let uid = cluster.create(&cluster.object("web", None));
    cluster.until_shown_as("web", &uid);
    may_patch(&cluster, true);
    until_condition(&cluster, "annotations", true);
    let second = cluster.sandbox("web", &uid);
    cluster.node.add(&second).unwrap();
    assert_eq!(borne(&cluster, "web"), None);
}

#[test]
fn restarts_of_a_ztunnel_and_of_every_service_with_a_hundred_pods_make_no_patch() {
    let cluster = Cluster::shared();
    let pods = many(&cluster, 100);
    eventually("all are annotated", PATIENCE, || {
        let made = all_patches(&cluster);
        ensure!(made == pods.len(), "{made}");
        anyhow::Ok(())
    })
    .unwrap();
    let last = pods.last().unwrap();
    until_borne(&cluster, &last.spec.name, Some("enabled"));
    working_ztunnel(&cluster);
    pods.iter()
        .for_each(|pod| drop(cluster.node.until_whole(&pod.spec).unwrap()));
    for service in ["pod-events", "netconfig", "ztunnel-broker"] {
        cluster.node.stop(service, Signal::SIGKILL).unwrap();
        cluster.node.start(service).unwrap();
        cluster.until_served();
    }
    cluster.node.until_whole(&last.spec).unwrap();
    // What is told of another pod afterwards shows that nothing more is to come of these.
    cluster.pod("other", Some("ambient"));
    until_borne(&cluster, "other", Some("enabled"));
    until_asked(&cluster, "other", &[json!("enabled")]);
    assert_eq!(all_patches(&cluster), pods.len() + 1);
}

#[test]
fn an_add_while_the_api_server_is_away_succeeds_and_its_late_annotation_is_told_of() {
    let cluster = Cluster::stopped();
    let uid = cluster.create(&cluster.object("web", Some("ambient")));
    let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
    set_status(&cluster, "web", &ready);
    cluster.start();
    cluster.until_shown("web");
    let pod = cluster.sandbox("web", &uid);
    cluster.server.kill().unwrap();
    cluster.node.add(&pod).unwrap();
    cluster.node.until_whole(&pod.spec).unwrap();
    let words = until_condition(&cluster, "annotations", false);
    assert!(words.contains("does not answer"), "{words}");
    assert_eq!(counted(&cluster, "inpod_pod_events_annotations_unmet"), 1);
    eventually("it is late", PATIENCE, || {
        let log = cluster.node.tail("pod-events", usize::MAX);
        ensure!(log.contains("ANNOTATION_FAILED"), "nothing has failed");
        ensure!(log.contains("ANNOTATION_LATE"), "nothing is late");
        anyhow::Ok(())
    })
    .unwrap();
    cluster.server.run().unwrap();
    until_borne(&cluster, "web", Some("enabled"));
    until_condition(&cluster, "annotations", true);
    let event = until_event(&cluster, "web", "AnnotationLate");
    assert_eq!(event["type"], "Warning");
    let count = events(&cluster, "web", "AnnotationLate").len();
    assert_eq!((count, event.get("series")), (1, None));
}

#[test]
fn refused_adds_are_told_with_their_reason_and_not_too_often() {
    let cluster = Cluster::shared();
    let uid = cluster.create(&cluster.object("web", Some("ambient")));
    cluster.until_shown("web");
    let pod = cluster.sandbox("web", &uid);
    refusing_ztunnel(&cluster);
    let dropped = "inpod_pod_events_events_total{result=\"dropped\"}";
    for _ in 0..6 {
        let outcome = cluster.node.call(Call::add, &pod).run().unwrap();
        assert_ne!(outcome.code, 0, "{outcome:?}");
    }
    let told = eventually("three are told and the rest dropped", PATIENCE, || {
        let told = events(&cluster, "web", "ZtunnelRefused");
        let count = told
            .first()
            .and_then(|event| event.pointer("/series/count")?.as_u64());
        ensure!(count == Some(3), "{told:?}");
        ensure!(counted(&cluster, dropped) >= 1, "none was dropped");
        anyhow::Ok(told)
    })
    .unwrap();
    assert_eq!(told.len(), 1, "one Event with its series");
    let note = told[0]["note"].as_str().unwrap();
    assert!(note.contains("ztunnel"), "{note}");
    assert_eq!(borne(&cluster, "web"), None);
}

#[test]
fn a_sidecars_annotation_that_refuses_adds_is_one_event_with_its_name_and_is_not_told_too_often() {
    const PORTS: &str = "traffic.sidecar.istio.io/excludeInboundPorts";
    let cluster = Cluster::shared();
    let mut object = cluster.object("web", None);
    object["metadata"]["annotations"] = json!({"sidecar.istio.io/status": "{}", PORTS: "http"});
    let proxy = json!({"name": "istio-proxy", "image": "proxyv2", "args": ["proxy", "sidecar"]});
    object["spec"]["containers"]
        .as_array_mut()
        .unwrap()
        .push(proxy);
    let uid = cluster.create(&object);
    cluster.until_shown("web");
    let pod = cluster.sandbox("web", &uid);
    for _ in 0..6 {
        let outcome = cluster.node.call(Call::add, &pod).run().unwrap();
        assert!(outcome.stdout.contains("INVALID_FIELD"), "{outcome:?}");
    }
    assert_eq!(pod.traces().unwrap(), NOTHING);
    let event = until_event(&cluster, "web", "InvalidField");
    assert_eq!(event["type"], "Warning");
    assert_eq!(event["reportingController"], "inpod.io/pod-events");
    let note = event["note"].as_str().unwrap();
    assert!(note.contains(PORTS) && note.contains("; give "), "{note}");
    // What is told of another pod afterwards shows that no more was told of this one.
    cluster.pod("other", Some("ambient"));
    until_borne(&cluster, "other", Some("enabled"));
    let told = events(&cluster, "web", "InvalidField");
    assert_eq!(told.len(), 1, "{told:?}");
    let sent = counted(&cluster, "inpod_pod_events_events_total{result=\"sent\"}");
    assert!((1..=3).contains(&sent), "{sent} were told");
}

#[test]
fn a_server_that_forbids_the_patch_is_a_condition_in_its_words_and_the_pod_is_in_the_mesh_all_the_same()
 {
    let cluster = Cluster::own();
    may_patch(&cluster, false);
    let pod = cluster.pod("web", Some("ambient"));
    cluster.node.until_whole(&pod.spec).unwrap();
    let words = until_condition(&cluster, "annotations", false);
    for part in ["403", "pods/status"] {
        assert!(words.contains(part), "{part} is not in {words}");
    }
    assert!(cluster.node.api().status().unwrap().ready);
    let log = cluster.node.tail("pod-events", usize::MAX);
    assert_eq!(log.matches("ANNOTATION_FAILED").count(), 1);
    may_patch(&cluster, true);
    until_condition(&cluster, "annotations", true);
    until_borne(&cluster, "web", Some("enabled"));
}

#[test]
fn a_pod_and_its_namespace_that_go_while_their_patch_fails_are_not_asked_for_any_more() {
    let cluster = Cluster::own();
    may_patch(&cluster, false);
    cluster.pod("web", Some("ambient"));
    until_condition(&cluster, "annotations", false);
    let namespace = format!("/api/v1/namespaces/{}", cluster.namespace);
    cluster.server.delete(&namespace).unwrap();
    cluster.server.delete(&cluster.path("web")).unwrap();
    let finished = json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": cluster.namespace},
        "spec": {"finalizers": []},
    });
    let how = ("PUT", "application/json");
    let path = format!("{namespace}/finalize");
    cluster
        .server
        .ask_as("admin", how, &path, &finished)
        .unwrap();
    until_condition(&cluster, "annotations", true);
    assert_eq!(counted(&cluster, "inpod_pod_events_annotations_unmet"), 0);
    may_patch(&cluster, true);
    cluster.make_namespace("later", &json!({}));
    let mut object = cluster.object("later", Some("ambient"));
    object["metadata"]["namespace"] = "later".into();
    let uid = cluster.create(&object);
    let spec = Spec {
        namespace: "later".to_owned(),
        uid,
        ..Spec::new("later")
    };
    let pod = cluster.node.sandbox(spec).unwrap();
    cluster.node.add(&pod).unwrap();
    eventually("another is annotated", PATIENCE, || {
        let pod = cluster.server.get("/api/v1/namespaces/later/pods/later")?;
        ensure!(pod.pointer(ANNOTATION) == Some(&json!("enabled")), "{pod}");
        anyhow::Ok(())
    })
    .unwrap();
}
