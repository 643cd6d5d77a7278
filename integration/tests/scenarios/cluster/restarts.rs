//! Every part of inpod restarts, alone and together, while traffic continues.

use anyhow::ensure;
use integration::{
    eventually,
    kubernetes::{LONG, text},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::cluster::{
    agent::{SERVICES, named, on_the_node, uid},
    apps::{container, deploy},
    mesh::{assert_unbroken, serves_through_ztunnel, traffic},
};

fn restarts(pod: &Value, container: &str) -> u64 {
    let all = pod
        .pointer("/status/containerStatuses")
        .and_then(Value::as_array);
    let mut all = all.into_iter().flatten();
    let found = all.find(|found| text(found, "/name") == container).unwrap();
    found.get("restartCount").and_then(Value::as_u64).unwrap()
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
