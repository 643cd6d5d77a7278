//! A running pod joins and leaves by its label, with the chart's times.

use std::time::{Duration, Instant};

use crate::common::flows::Flow;
use inpod_types::keys;
use integration::App;
use serde_json::{Value, json};

use super::*;

/// `propagation_wait_seconds`.
const PROPAGATION: Duration = Duration::from_secs(5);

fn label(deployed: &DeployedNode, pod: &Pod, mode: &Value) {
    let change = json!({"metadata": {"labels": {"istio.io/dataplane-mode": mode}}});
    let path = deployed.pod_path(&pod.spec.name);
    deployed.server.patch(&path, &change).unwrap();
}

fn until_out(deployed: &DeployedNode, pod: &Pod) {
    let out = deployed.node.until(&pod.spec, PodState::Out, TIMEOUT);
    out.unwrap();
    assert_eq!(pod.traces().unwrap(), NOTHING);
}

/// Opens a connection in each direction.
fn flows(pod: &Pod, outsider: &Pod) -> [Flow; 2] {
    [(pod, outsider), (outsider, pod)].map(|(from, to)| {
        let to = SocketAddr::new(to.v4.into(), PORT);
        Flow::open(from, to).unwrap()
    })
}

fn go_on(flows: &[Flow; 2]) {
    for flow in flows {
        flow.goes_on().unwrap();
    }
}

#[test]
fn a_running_pod_joins_and_leaves_again_and_no_open_connection_ends() {
    let deployed = running();
    let [web, outsider] = start(&deployed, [Mesh::Outside; 2]);
    let _apps = [&web, &outsider].map(|it| App::start(&it.pod.netns, PORT).unwrap());
    let (pod, outsider) = (&web.pod, &outsider.pod);
    let allowed = json!({"metadata": {"annotations": {keys::ALLOW: keys::ALLOW_KEEP_EXISTING}}});
    deployed
        .server
        .patch(&deployed.namespace_path(), &allowed)
        .unwrap();
    let kept = json!({"metadata": {"annotations": {keys::KEEP_EXISTING_CONNECTIONS: "true"}}});
    let path = deployed.pod_path(&pod.spec.name);
    deployed.server.patch(&path, &kept).unwrap();
    let from_before = flows(pod, outsider);

    label(&deployed, pod, &json!("ambient"));
    deployed.node.until_whole(&pod.spec).unwrap();
    assert_path(&deployed, pod, outsider, &[(pod, 15001)]);
    assert_path(&deployed, outsider, pod, &[(pod, 15006)]);
    go_on(&from_before);
    let captured = flows(pod, outsider);

    let unlabelled = Instant::now();
    label(&deployed, pod, &Value::Null);
    deployed
        .node
        .until(&pod.spec, PodState::Withdrawing, TIMEOUT)
        .unwrap();
    let to = SocketAddr::new(pod.v4.into(), PORT);
    let (path, _) = follow(&deployed, &outsider.netns, to);
    let is_captured = path == [(pod.spec.uid.clone(), 15006)];
    assert!(
        is_captured || unlabelled.elapsed() >= PROPAGATION,
        "{path:?}"
    );
    eventually("new connections go direct", TIMEOUT, || {
        let (path, _) = follow(&deployed, &outsider.netns, to);
        ensure!(path.is_empty(), "{path:?}");
        anyhow::Ok(())
    })
    .unwrap();
    assert!(
        unlabelled.elapsed() >= PROPAGATION,
        "{:?}",
        unlabelled.elapsed()
    );
    assert_path(&deployed, pod, outsider, &[]);
    go_on(&captured);
    go_on(&from_before);
    drop(captured);
    until_out(&deployed, pod);
    go_on(&from_before);
}

#[test]
fn a_connection_from_before_is_cut_before_a_running_pod_counts_as_enrolled() {
    let deployed = running();
    let [web, outsider] = start(&deployed, [Mesh::Outside; 2]);
    let _apps = [&web, &outsider].map(|it| App::start(&it.pod.netns, PORT).unwrap());
    let (pod, outsider) = (&web.pod, &outsider.pod);
    let from_before = flows(pod, outsider);
    go_on(&from_before);
    label(&deployed, pod, &json!("ambient"));
    let enrolled = deployed.node.until(&pod.spec, PodState::Enrolled, TIMEOUT);
    enrolled.unwrap();
    for flow in &from_before {
        flow.goes_on().unwrap_err();
    }
    assert_path(&deployed, pod, outsider, &[(pod, 15001)]);
    assert_path(&deployed, outsider, pod, &[(pod, 15006)]);
    label(&deployed, pod, &Value::Null);
    until_out(&deployed, pod);
    assert_path(&deployed, outsider, pod, &[]);
}
