//! Pods that demand the mesh (`inpod.io/require`) never start outside, whatever fails.

use integration::{Act, App, Call, Cut, Verb};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::*;
use crate::common::cluster::refused;

const CONDITIONS: &str = "/status/conditions";

fn demand(value: &str) -> Value {
    json!({"inpod.io/require": value})
}

fn demand_of_pod(cluster: &Cluster, name: &str, value: &str) {
    let change = json!({"metadata": {"labels": demand(value)}});
    cluster.server.patch(&cluster.path(name), &change).unwrap();
}

/// Waits until a pod has the condition, and returns its message.
pub(crate) fn until_condition(cluster: &Cluster, name: &str, status: &str, reason: &str) -> String {
    eventually("the pod has the condition", TIMEOUT, || {
        let object = cluster.server.get(&cluster.path(name))?;
        let all = object.pointer(CONDITIONS).and_then(Value::as_array);
        let mut all = all.into_iter().flatten();
        let found = all.find(|it| it["type"] == "inpod.io/InMesh");
        let found = found.cloned().unwrap_or_default();
        ensure!(
            found["status"] == status && found["reason"] == reason,
            "{found}"
        );
        ensure!(found["lastTransitionTime"].is_string(), "{found}");
        anyhow::Ok(found["message"].as_str().unwrap_or_default().to_owned())
    })
    .unwrap()
}

#[test]
fn demanding_pods_join_without_other_labels_and_stay() {
    let cluster = Cluster::shared();
    label_namespace(&cluster, &cluster.namespace, &demand("mesh"));
    cluster.until_namespace_is_listed(&cluster.namespace);
    let pod = cluster.pod("web", Some("none"));
    let outsider = outsider(&cluster);
    let _app = App::start(&pod.netns, PORT).unwrap();
    until_in(&cluster, &pod, Reason::MeshRequired);
    assert_eq!(taken(&cluster, &outsider, &pod), CAPTURED);
    until_condition(&cluster, "web", "True", "MeshRequired");
    let sidecar = json!({"sidecar.istio.io/status": "{}"});
    annotate(&cluster, "web", &sidecar);
    let known = eventually("the annotation is known", TIMEOUT, || {
        let known = cluster.node.explain(&pod.spec)?;
        ensure!(known.reason() == Reason::HasSidecar, "{known:?}");
        anyhow::Ok(known)
    })
    .unwrap();
    assert_eq!(known.state(), PodState::Enrolled);
    assert_eq!(taken(&cluster, &outsider, &pod), CAPTURED);
    let free = json!({"inpod.io/require": null});
    label_namespace(&cluster, &cluster.namespace, &free);
    until_out(&cluster, &pod, Reason::HasSidecar);
}

#[test]
fn demanding_pod_that_cannot_join_is_refused_with_the_reason() {
    let cluster = Cluster::shared();
    let create = |name: &str| {
        let mut object = cluster.object(name, Some("ambient"));
        object["metadata"]["annotations"] = json!({"sidecar.istio.io/status": "{}"});
        let uid = cluster.create(&object);
        cluster.sandbox(name, &uid)
    };
    let undemanding = create("undemanding");
    cluster.node.add(&undemanding).unwrap();
    until_out(&cluster, &undemanding, Reason::HasSidecar);
    label_namespace(&cluster, &cluster.namespace, &demand("mesh"));
    cluster.until_namespace_is_listed(&cluster.namespace);
    let pod = create("demanding");
    let outcome = cluster.add_within(&pod, 20);
    refused(&outcome, 100, &["HAS_SIDECAR", "inpod.io/require"]);
    assert_eq!(pod.traces().unwrap(), NOTHING);
    let message = until_condition(&cluster, "demanding", "False", "HasSidecar");
    assert!(message.contains("recreate it"), "{message}");
    let known = cluster.node.explain(&pod.spec).unwrap();
    assert_eq!(known.last_failure.unwrap().reason(), Reason::HasSidecar);
}

#[test]
fn demand_of_a_namespace_holds_without_api_server_and_agent() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let open = json!({"inpod.io/on-unknown": "open"});
    let others = format!("{}-others", cluster.namespace);
    cluster.make_namespace(&others, &open);
    let annotations = json!({"metadata": {"annotations": open, "labels": demand("mesh")}});
    let path = format!("/api/v1/namespaces/{}", cluster.namespace);
    cluster.server.patch(&path, &annotations).unwrap();
    cluster.until_namespace_is_listed(&cluster.namespace);
    proxy.fault(Verb::Any, "*", usize::MAX, Act::Refuse(500, None));
    proxy.cut(Cut::Broken);
    cluster.until_pods(false);
    let uid = cluster.create(&cluster.object("web", None));
    let pod = cluster.sandbox("web", &uid);
    let other = beside(&cluster, &others, "web", None);
    let words = ["SOURCE_UNAVAILABLE", "pods of its namespace wait"];
    refused(&cluster.add_within(&pod, 9), 11, &words);
    assert_eq!(cluster.add_within(&other, 9).code, 0);
    cluster.node.stop("pod-events", Signal::SIGKILL).unwrap();
    let call = |pod| cluster.node.call(Call::add, pod).run().unwrap();
    refused(&call(&pod), 11, &["AGENT_UNAVAILABLE"]);
    let later = beside(&cluster, &others, "later", None);
    assert_eq!(call(&later).code, 0);
}

#[test]
fn running_pod_with_mesh_or_stop_is_refused_until_ztunnel_serves() {
    let cluster = Cluster::shared();
    let outsider = outsider(&cluster);
    let pods = ["stopping", "bypassing"].map(|name| cluster.pod(name, None));
    let _apps = pods
        .each_ref()
        .map(|pod| App::start(&pod.netns, PORT).unwrap());
    let [stopping, bypassing] = &pods;
    cluster.node.stop("ztunnel", Signal::SIGKILL).unwrap();
    demand_of_pod(&cluster, "stopping", "mesh-or-stop");
    demand_of_pod(&cluster, "bypassing", "mesh");
    let reaches = |from: &Pod, to: &Pod| {
        let mut all = to.addresses().into_iter();
        all.any(|address| ask(&from.netns, SocketAddr::new(address, PORT)).is_ok())
    };
    eventually("its connections are refused", TIMEOUT, || {
        ensure!(!reaches(&outsider, stopping), "inbound");
        anyhow::Ok(())
    })
    .unwrap();
    assert!(!reaches(stopping, bypassing), "outbound");
    until(
        &cluster,
        stopping,
        Reason::MeshRequired,
        PodState::Enrolling,
    );
    let failed = eventually("the attempt has failed", TIMEOUT, || {
        let known = cluster.node.explain(&bypassing.spec)?;
        ensure!(known.last_failure.is_some(), "{known:?}");
        anyhow::Ok(known)
    })
    .unwrap();
    assert_eq!(failed.reason(), Reason::MeshRequired);
    assert!(reaches(&outsider, bypassing));
    until_condition(&cluster, "stopping", "False", "ZtunnelLost");
    assert!(!reaches(&outsider, stopping), "after a failed attempt");
    cluster.node.start_ztunnel(&[]).unwrap();
    for pod in &pods {
        until_in(&cluster, pod, Reason::MeshRequired);
        assert_eq!(taken(&cluster, &outsider, pod), CAPTURED);
    }
    until_condition(&cluster, "stopping", "True", "MeshRequired");
}
