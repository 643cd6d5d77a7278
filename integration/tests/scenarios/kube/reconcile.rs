//! Every way into the mesh and out of it for a real API server's pods, in the kernel and with traffic.

mod admitted_unenrolled;
pub(crate) mod demanded;
mod ends;
mod found;
mod labels;
mod peers;
mod served;
mod settings;
mod status;
mod traffic;

use std::net::SocketAddr;

use crate::common::cluster::Cluster;
use anyhow::ensure;
use inpod_proto::{
    podevents::v1::{ExplainPodResponse, PodState},
    types::v1::Reason,
};
use integration::{Pod, Spec, TIMEOUT, ask, eventually};
use serde_json::{Value, json};

const PORT: u16 = 8080;

const NOTHING: Vec<String> = Vec::new();

fn label(cluster: &Cluster, name: &str, mode: &Value) {
    let change = json!({"metadata": {"labels": {"istio.io/dataplane-mode": mode}}});
    cluster.server.patch(&cluster.path(name), &change).unwrap();
}

/// Merges annotations into a pod's.
fn annotate(cluster: &Cluster, name: &str, annotations: &Value) {
    let change = json!({"metadata": {"annotations": annotations}});
    cluster.server.patch(&cluster.path(name), &change).unwrap();
}

/// Merges into the status, as a kubelet does.
fn set_status(cluster: &Cluster, name: &str, status: &Value) {
    let path = format!("{}/status", cluster.path(name));
    let change = json!({"status": status});
    cluster.server.patch(&path, &change).unwrap();
}

fn runs_in(pod: &Pod) -> Value {
    let all = pod.addresses().map(|address| json!({"ip": address}));
    json!({"phase": "Running", "podIP": pod.v4, "podIPs": all})
}

/// Merges labels into a namespace's.
fn label_namespace(cluster: &Cluster, namespace: &str, labels: &Value) {
    let path = format!("/api/v1/namespaces/{namespace}");
    let change = json!({"metadata": {"labels": labels}});
    cluster.server.patch(&path, &change).unwrap();
}

fn ambient() -> Value {
    json!({"istio.io/dataplane-mode": "ambient"})
}

/// Creates one with a sandbox, in another namespace of this test.
fn beside(cluster: &Cluster, namespace: &str, name: &str, mode: Option<&str>) -> Pod {
    let mut object = cluster.object(name, mode);
    object["metadata"]["namespace"] = namespace.into();
    let spec = Spec {
        namespace: namespace.to_owned(),
        uid: cluster.create(&object),
        ..Spec::new(name)
    };
    cluster.node.sandbox(spec).unwrap()
}

fn until(cluster: &Cluster, pod: &Pod, reason: Reason, state: PodState) -> ExplainPodResponse {
    let what = format!("{} is {}", pod.spec.name, reason.as_str_name());
    eventually(&what, TIMEOUT, || {
        let known = cluster.node.explain(&pod.spec)?;
        ensure!(
            known.reason() == reason && known.state() == state,
            "{known:?}"
        );
        anyhow::Ok(known)
    })
    .unwrap()
}

/// Waits until a pod is outside for a reason, its netns without a trace of inpod.
fn until_out(cluster: &Cluster, pod: &Pod, reason: Reason) {
    until(cluster, pod, reason, PodState::Out);
    assert_eq!(pod.traces().unwrap(), NOTHING);
}

/// Waits until a pod is completely inside for a reason.
fn until_in(cluster: &Cluster, pod: &Pod, reason: Reason) -> ExplainPodResponse {
    until(cluster, pod, reason, PodState::Enrolled);
    cluster.node.until_whole(&pod.spec).unwrap()
}

fn outsider(cluster: &Cluster) -> Pod {
    cluster.node.sandbox(Spec::new("outsider")).unwrap()
}

/// Returns listeners that accepted one pod's connection to another, over both families.
fn taken(cluster: &Cluster, from: &Pod, to: &Pod) -> Vec<u64> {
    let before = cluster.node.accesses().unwrap().len();
    for address in to.addresses() {
        ask(&from.netns, SocketAddr::new(address, PORT)).unwrap();
    }
    let new = cluster.node.accesses().unwrap().into_iter().skip(before);
    let accepted = new.filter(|access| access.event == "accepted" && access.uid == to.spec.uid);
    accepted.map(|access| access.listener).collect()
}

/// `taken` of a pod in the mesh.
const CAPTURED: [u64; 2] = [15006, 15006];

fn served(cluster: &Cluster) -> Vec<String> {
    let workloads = cluster.node.api().workloads().unwrap().workloads;
    let uids = workloads.into_iter().filter_map(|status| status.workload);
    uids.map(|workload| workload.uid).collect()
}

/// Waits until a deleted pod is unknown everywhere and nothing is held for it.
fn until_forgotten(cluster: &Cluster, pod: &Pod) {
    eventually("everything is released", TIMEOUT, || {
        let claims = cluster.node.api().claims()?;
        let is_of = |id: &str| id == pod.container_id;
        let held = claims.iter().filter_map(|claim| claim.sandbox.as_ref());
        ensure!(
            !held.into_iter().any(|it| is_of(&it.container_id)),
            "{claims:?}"
        );
        let served = served(cluster);
        ensure!(!served.contains(&pod.spec.uid), "{served:?}");
        let elements = probed(cluster)?;
        let addresses = pod.addresses().map(|address| address.to_string());
        ensure!(
            !addresses.iter().any(|it| elements.contains(it)),
            "{elements:?}"
        );
        anyhow::Ok(())
    })
    .unwrap();
}

fn probed(cluster: &Cluster) -> anyhow::Result<Vec<String>> {
    let listed = cluster.node.netns().within(|| {
        std::process::Command::new("nft")
            .args(["-j", "list", "sets"])
            .output()
    })??;
    let listed: Value = serde_json::from_slice(&listed.stdout)?;
    let all = listed.pointer("/nftables").and_then(Value::as_array);
    let sets = all.into_iter().flatten();
    let elements = sets.filter_map(|set| set.pointer("/set/elem")?.as_array());
    let value = |element: &Value| {
        let value = element.pointer("/elem/val").unwrap_or(element);
        value.as_str().map(str::to_owned)
    };
    Ok(elements.flatten().filter_map(value).collect())
}
