//! Every part of inpod restarts, alone and together, while traffic continues.

use anyhow::{Context as _, ensure};
use integration::{
    eventually,
    kubernetes::{LONG, text},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::cluster::{
    agent::{AGENT, ExclusiveCluster, SERVICES, SYSTEM, named, on_the_node, status_of, uid},
    apps::{container, deploy},
    mesh::{assert_unbroken, serves_through_ztunnel, traffic},
};

pub(crate) fn restarts(pod: &Value, container: &str) -> u64 {
    let found = status_of(pod, container).unwrap();
    found.get("restartCount").and_then(Value::as_u64).unwrap()
}

/// Returns the names of the containers that are not ready.
fn unready(pod: &Value) -> Vec<&str> {
    let all = pod
        .pointer("/status/containerStatuses")
        .and_then(Value::as_array);
    let is_unready = |found: &&Value| found.get("ready") != Some(&json!(true));
    let unready = all.into_iter().flatten().filter(is_unready);
    unready.map(|found| text(found, "/name")).collect()
}

/// Changes the node's directory behind the installer's CNI configuration directory.
fn mount_cni_conf(cluster: &ExclusiveCluster<'_>, path: &str) {
    let volume = json!({"name": "cni-conf", "hostPath": {"path": path}});
    let change = json!({"spec": {"template": {"spec": {"volumes": [volume]}}}});
    let patch = ["patch", "daemonset", "inpod", "--namespace", SYSTEM, "-p"];
    // kubectl's strategic merge patch keeps the other volumes; the merge patch of `server` would remove them.
    cluster
        .kubectl(&[&patch[..], &[&change.to_string()]].concat())
        .unwrap();
}

/// Returns the sums of the node's CNI configuration and of the record with which an uninstall reverts it.
fn cni_files(cluster: &ExclusiveCluster<'_>) -> String {
    let list = "sha256sum /etc/cni/net.d/* /var/lib/inpod/installer/record.json";
    cluster.machine().exec(&["sh", "-c", list]).unwrap()
}

#[test]
fn the_daemonset_is_rolled_out_anew_without_a_failed_new_connection() {
    on_the_node(|cluster| {
        cluster
            .make_namespace("roll", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let pod = deploy(cluster, "roll", "web", &container(&json!({})));
        cluster.until_enrolled(&pod);
        let (before, traffic) = (cluster.agent(), traffic(cluster, &pod));
        let again =
            json!({"spec": {"template": {"metadata": {"annotations": {"restarted": "once"}}}}});
        let path = "/apis/apps/v1/namespaces/inpod-system/daemonsets/inpod";
        cluster.server.patch(path, &again).unwrap();
        cluster.until_replaced(&before);
        cluster.until_whole();
        cluster.until_enrolled(&pod);
        serves_through_ztunnel(cluster, &pod);
        assert_unbroken(traffic);
        // A pod that comes later joins as usual.
        let next = deploy(cluster, "roll", "next", &container(&json!({})));
        cluster.until_enrolled(&next);
        cluster.remove("roll");
    });
}

#[test]
fn each_container_is_killed_without_a_failed_new_connection() {
    on_the_node(|cluster| {
        cluster
            .make_namespace("kill", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let pod = deploy(cluster, "kill", "web", &container(&json!({})));
        cluster.until_enrolled(&pod);
        let traffic = traffic(cluster, &pod);
        for service in SERVICES {
            let before = cluster.agent();
            let program = format!("/{service}");
            cluster
                .machine()
                .kill(uid(&before), &program, Signal::SIGKILL)
                .unwrap();
            eventually("the kubelet has started it again", LONG, || {
                let (namespace, name) = named(&before);
                let now = cluster.pod(namespace, name)?;
                ensure!(
                    restarts(&now, service) == restarts(&before, service) + 1,
                    "not yet"
                );
                anyhow::Ok(())
            })
            .unwrap();
            cluster.until_whole();
            cluster.until_enrolled(&pod);
            serves_through_ztunnel(cluster, &pod);
        }
        assert_unbroken(traffic);
        cluster.remove("kill");
    });
}

#[test]
fn after_a_power_cut_the_node_comes_back_with_its_pods_in_the_mesh() {
    on_the_node(|cluster| {
        cluster
            .make_namespace("power", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let pod = deploy(cluster, "power", "web", &container(&json!({})));
        cluster.until_enrolled(&pod);
        let netns = cluster.machine().netns_of(uid(&pod)).unwrap().id();
        cluster.machine().reboot().unwrap();
        cluster.until_whole();
        let now = eventually("the pod is back", LONG, || {
            let pods = cluster.until_ready("power", "app=web", 1)?;
            let pod = pods.first().cloned().unwrap();
            ensure!(restarts(&pod, "app") >= 1, "{pod}");
            anyhow::Ok(pod)
        })
        .unwrap();
        assert_eq!(uid(&now), uid(&pod));
        assert_ne!(cluster.machine().netns_of(uid(&now)).unwrap().id(), netns);
        cluster.until_enrolled(&now);
        serves_through_ztunnel(cluster, &now);
        cluster.remove("power");
    });
}

/// Istio's test `TestCNIMisconfigHealsOnRestart` accepts any agent that needs a second to start; see
/// `integration/upstream/README.md`. This test waits until the agent reports the misconfiguration.
#[test]
fn agent_with_wrong_cni_directory_is_unready_until_corrected() {
    on_the_node(|cluster| {
        cluster
            .make_namespace("astray", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let (before, files) = (cluster.agent(), cni_files(cluster));
        mount_cni_conf(cluster, "/etc/cni/nope.d");
        let broken = eventually("the installer alone is not ready", LONG, || {
            let agents = cluster.pods(SYSTEM, AGENT)?;
            let agent = agents.first().context("no agent")?;
            ensure!(uid(agent) != uid(&before), "the earlier agent");
            ensure!(unready(agent) == ["installer"], "{agent}");
            let log = cluster.machine().log_of(uid(agent))?;
            ensure!(log.contains("waiting for the primary CNI"), "{log}");
            anyhow::Ok(agent.clone())
        })
        .unwrap();
        // The node keeps its chain, so a new pod still joins.
        assert_eq!(cni_files(cluster), files);
        let pod = deploy(cluster, "astray", "web", &container(&json!({})));
        cluster.until_enrolled(&pod);
        let (namespace, name) = named(&broken);
        let still = cluster.pod(namespace, name).unwrap();
        assert_eq!(unready(&still), ["installer"], "{still}");
        mount_cni_conf(cluster, "/etc/cni/net.d");
        cluster.until_replaced(&broken);
        cluster.until_whole();
        assert_eq!(cni_files(cluster), files);
        serves_through_ztunnel(cluster, &pod);
        // The kubelet has created the directory.
        cluster
            .machine()
            .exec(&["rmdir", "/etc/cni/nope.d"])
            .unwrap();
        cluster.remove("astray");
    });
}
