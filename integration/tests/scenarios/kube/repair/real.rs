//! repair beside the real pod-events on a complete node.

use std::path::{Path, PathBuf};

use anyhow::ensure;
use integration::{Pod, TIMEOUT, eventually};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::common::cluster::Cluster;
use crate::kube::repair::fixture::{Action, deployed};

/// Shows, like a kubelet, a running pod with a failed init container.
fn fail(cluster: &Cluster, pod: &Pod) {
    let failed = json!({"exitCode": 126, "reason": "Error", "startedAt": "2026-01-01T00:00:00Z"});
    let status = json!({"name": "istio-validation", "image": "i", "imageID": "", "ready": false, "restartCount": 1,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": failed}});
    let addresses: Vec<_> = pod
        .addresses()
        .iter()
        .map(|ip| json!({"ip": ip.to_string()}))
        .collect();
    let first = pod.v4.to_string();
    let change = json!({"status": {"phase": "Running", "podIP": first, "podIPs": addresses, "initContainerStatuses": [status]}});
    cluster
        .server
        .patch(&format!("{}/status", cluster.path("web")), &change)
        .unwrap();
}

/// Writes repair's identity on the node to a kubeconfig.
pub(crate) fn kubeconfig(cluster: &Cluster, action: Action) -> PathBuf {
    let account = deployed(&cluster.server, action);
    let (server, node) = (&cluster.server, &cluster.node);
    let kubeconfig = server.kubeconfig_for(account, node.name()).unwrap();
    let path = node.kubeconfig().with_file_name("kubeconfig-of-repair");
    std::fs::write(&path, kubeconfig).unwrap();
    path
}

pub(crate) fn start(cluster: &Cluster, kubeconfig: &Path, more: &[&str]) {
    let path = kubeconfig.display().to_string();
    let node = cluster.node.name();
    let usual = ["--peer", "uid", "--node-name", node, "--kubeconfig", &path];
    let settings = [&usual[..], more].concat();
    cluster.node.start_with("repair", &settings).unwrap();
}

#[test]
fn a_pod_that_the_real_pod_events_redirects_while_it_runs_is_reported_as_repaired() {
    let cluster = Cluster::shared();
    let kubeconfig = kubeconfig(&cluster, Action::Repair);
    // An ambient pod, independent of how a sidecar is recognised; its init container looks the same.
    start(&cluster, &kubeconfig, &["--sidecar-annotation", ""]);
    cluster.node.stop("netconfig", Signal::SIGTERM).unwrap();
    let uid = cluster.create(&cluster.object("web", None));
    let pod = cluster.sandbox("web", &uid);
    cluster.node.add(&pod).unwrap();
    fail(&cluster, &pod);
    let label = json!({"metadata": {"labels": {"istio.io/dataplane-mode": "ambient"}}});
    cluster.server.patch(&cluster.path("web"), &label).unwrap();
    cluster.node.start("netconfig").unwrap();
    cluster.node.until_whole(&pod.spec).unwrap();
    eventually("it is reported", TIMEOUT, || {
        let path = format!(
            "/apis/events.k8s.io/v1/namespaces/{}/events",
            cluster.namespace
        );
        let all = cluster.server.get(&path)?;
        let is_it =
            |event: &Value| event["reason"] == "RepairBrokenPod" && event["type"] == "Normal";
        ensure!(
            all["items"]
                .as_array()
                .is_some_and(|all| all.iter().any(is_it)),
            "{all}"
        );
        anyhow::Ok(())
    })
    .unwrap();
}
