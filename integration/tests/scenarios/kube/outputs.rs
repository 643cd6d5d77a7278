//! Kubernetes' status of pods, at a real API server with the deployed RBAC: Events, and the annotation
//! `ambient.istio.io/redirection`, in order and only when it changes.

mod annotation;
mod failures;

use crate::common::cluster::Cluster;
use anyhow::{Context as _, ensure};
use integration::{Pod, Spec, TIMEOUT, eventually, run};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const NOTHING: Vec<String> = Vec::new();

const ANNOTATION: &str = "/metadata/annotations/ambient.istio.io~1redirection";

fn annotation(cluster: &Cluster, name: &str) -> Option<String> {
    let pod = cluster.server.get(&cluster.path(name)).unwrap();
    let value = pod.pointer(ANNOTATION).and_then(Value::as_str);
    value.map(str::to_owned)
}

/// A background attempt to enroll takes nearly as long as `TIMEOUT`.
fn until_annotated_as(cluster: &Cluster, name: &str, wanted: Option<&str>) {
    eventually("the pod is annotated so", 3 * TIMEOUT, || {
        let found = annotation(cluster, name);
        ensure!(found.as_deref() == wanted, "it bears {found:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

/// Returns requested patches of the annotation in order; `null` removes.
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

/// Waits for exactly these requests about a pod.
fn until_asked(cluster: &Cluster, name: &str, wanted: &[Value]) {
    eventually("this was asked for", TIMEOUT, || {
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

fn events(cluster: &Cluster, name: &str, reason: &str) -> Vec<Value> {
    events_in(&cluster.namespace, cluster, name, reason)
}

fn events_in(namespace: &str, cluster: &Cluster, name: &str, reason: &str) -> Vec<Value> {
    let path = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events");
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
    eventually("the Event is there", TIMEOUT, || {
        let found = events(cluster, name, reason).into_iter().next();
        found.with_context(|| format!("no {reason} of {name}"))
    })
    .unwrap()
}

fn counted(cluster: &Cluster, series: &str) -> u64 {
    let socket = inpod_service::socket(&cluster.node.run_dir(), "pod-events");
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
    eventually("the condition is so", TIMEOUT, || {
        let status = cluster.node.api().status()?;
        let mut all = status.conditions.into_iter();
        let found = all.find(|found| found.name == name).context("none")?;
        ensure!(found.ok == ok, "{found:?}");
        anyhow::Ok(found.message)
    })
    .unwrap()
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
