//! Every part of inpod starts anew, one after the other and together, while traffic goes on.

use anyhow::ensure;
use integration::{
    eventually,
    kubernetes::{LONG, text},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    agent::{SERVICES, named, on_the_node, uid},
    apps::{container, deploy},
    mesh::{serves_through_ztunnel, traffic, unbroken},
};

/// How often a container of a pod was restarted.
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
    on_the_node(|turn| {
        turn.make_namespace("roll", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let pod = deploy(turn, "roll", "web", &container(&json!({})));
        turn.until_enrolled(&pod);
        let (before, traffic) = (turn.agent(), traffic(turn, &pod));
        let again =
            json!({"spec": {"template": {"metadata": {"annotations": {"restarted": "once"}}}}});
        let path = "/apis/apps/v1/namespaces/inpod-system/daemonsets/inpod";
        turn.server.patch(path, &again).unwrap();
        turn.until_replaced(&before);
        turn.until_whole();
        turn.until_enrolled(&pod);
        serves_through_ztunnel(turn, &pod);
        unbroken(traffic);
        // A pod that comes after it joins as ever.
        let next = deploy(turn, "roll", "next", &container(&json!({})));
        turn.until_enrolled(&next);
        turn.remove("roll");
    });
}

#[test]
fn each_container_is_killed_without_a_failed_new_connection() {
    on_the_node(|turn| {
        turn.make_namespace("kill", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let pod = deploy(turn, "kill", "web", &container(&json!({})));
        turn.until_enrolled(&pod);
        let traffic = traffic(turn, &pod);
        for service in SERVICES {
            let before = turn.agent();
            let program = format!("/{service}");
            turn.machine
                .kill(uid(&before), &program, Signal::SIGKILL)
                .unwrap();
            eventually("the kubelet has started it again", LONG, || {
                let (namespace, name) = named(&before);
                let now = turn.pod(namespace, name)?;
                ensure!(
                    restarts(&now, service) == restarts(&before, service) + 1,
                    "not yet"
                );
                anyhow::Ok(())
            })
            .unwrap();
            turn.until_whole();
            turn.until_enrolled(&pod);
            serves_through_ztunnel(turn, &pod);
        }
        unbroken(traffic);
        turn.remove("kill");
    });
}

#[test]
fn after_a_power_cut_the_node_comes_back_with_its_pods_in_the_mesh() {
    on_the_node(|turn| {
        turn.make_namespace("power", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let pod = deploy(turn, "power", "web", &container(&json!({})));
        turn.until_enrolled(&pod);
        let netns = turn.machine.netns_of(uid(&pod)).unwrap().id();
        turn.machine.reboot().unwrap();
        turn.until_whole();
        let now = eventually("the pod is back", LONG, || {
            let pods = turn.until_ready("power", "app=web", 1)?;
            let pod = pods.first().cloned().unwrap();
            ensure!(restarts(&pod, "app") >= 1, "{pod}");
            anyhow::Ok(pod)
        })
        .unwrap();
        assert_eq!(uid(&now), uid(&pod));
        assert_ne!(turn.machine.netns_of(uid(&now)).unwrap().id(), netns);
        turn.until_enrolled(&now);
        serves_through_ztunnel(turn, &now);
        turn.remove("power");
    });
}
