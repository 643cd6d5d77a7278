//! The condition `inpod.io/InMesh` while the real pod-events is away.

use std::time::Duration;

use anyhow::ensure;
use integration::{ApiProxy, TIMEOUT, Verb, eventually};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{
    fixture::Action,
    real::{kubeconfig, start},
    stays,
};
use crate::{common::cluster::Cluster, kube::reconcile::demanded::until_condition};

/// Creates a pod that demands the mesh and is refused, so that its condition is False.
fn create_outside(cluster: &Cluster, name: &str) {
    let mut object = cluster.object(name, Some("ambient"));
    object["metadata"]["labels"]["inpod.io/require"] = json!("mesh");
    object["metadata"]["annotations"] = json!({"sidecar.istio.io/status": "{}"});
    let uid = cluster.create(&object);
    cluster.add_within(&cluster.sandbox(name, &uid), 20);
    until_condition(cluster, name, "False", "HasSidecar");
}

fn patches(proxy: &ApiProxy) -> usize {
    proxy.asked(Verb::Patch, "pods").len()
}

#[test]
fn condition_is_unknown_during_an_absence_and_true_again() {
    let (cluster, agent) = Cluster::running_behind_proxy();
    let kubeconfig = kubeconfig(&cluster, Action::Unknown);
    let repair = ApiProxy::start(cluster.node.netns(), &kubeconfig).unwrap();
    let _pod = cluster.pod("web", Some("ambient"));
    until_condition(&cluster, "web", "True", "LabelOnPod");
    create_outside(&cluster, "outside");
    let show = |name: &str| -> Value { cluster.server.get(&cluster.path(name)).unwrap() };
    let before = ["web", "outside"].map(show);

    start(&cluster, &kubeconfig, &[]);
    eventually("repair watches the pods", TIMEOUT, || {
        ensure!(repair.open_watches() == 1, "{}", repair.open_watches());
        anyhow::Ok(())
    })
    .unwrap();
    cluster.node.stop("pod-events", Signal::SIGKILL).unwrap();
    stays(Duration::from_secs(4), "without the setting", || {
        ["web", "outside"].map(show) == before
    });
    assert_eq!(patches(&repair), 0);

    cluster.node.stop("repair", Signal::SIGTERM).unwrap();
    let written = patches(&agent);
    start(&cluster, &kubeconfig, &["--unknown-after-seconds", "2"]);
    let message = until_condition(&cluster, "web", "Unknown", "AgentAway");
    assert!(message.contains(cluster.node.name()), "{message}");
    stays(Duration::from_secs(4), "one patch", || {
        patches(&repair) == 1
    });
    assert_eq!(show("outside"), before[1]);

    cluster.node.start("pod-events").unwrap();
    until_condition(&cluster, "web", "True", "LabelOnPod");
    stays(Duration::from_secs(4), "one patch of each service", || {
        [patches(&repair), patches(&agent) - written] == [1, 1]
    });
    until_condition(&cluster, "web", "True", "LabelOnPod");
    assert_eq!(show("outside"), before[1]);
}
