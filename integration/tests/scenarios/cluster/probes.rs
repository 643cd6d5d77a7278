//! Probes bypass ztunnel, and would not without the rule that exempts them.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, ensure};
use integration::{
    TIMEOUT, eventually,
    kubernetes::{LONG, is, text},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::cluster::{
    agent::{ExclusiveCluster, named, on_the_node, uid},
    apps::{PORT, container, deploy},
    mesh::taken,
};

/// Source of probes (setting `probe_source_v4`).
pub(crate) const PROBE: &str = "169.254.7.127";

/// Returns the clients that the application has seen.
pub(crate) fn seen(cluster: &ExclusiveCluster<'_>, pod: &Value) -> anyhow::Result<Vec<String>> {
    let pids = cluster.machine_of(pod).pids(uid(pod))?;
    let files = pids
        .iter()
        .map(|pid| PathBuf::from(format!("/proc/{pid}/root/tmp/seen")));
    let text = files
        .filter_map(|path| fs::read_to_string(path).ok())
        .next();
    Ok(text
        .context("nobody asked")?
        .lines()
        .map(str::to_owned)
        .collect())
}

fn until_ready_is(cluster: &ExclusiveCluster<'_>, pod: &Value, ready: bool) {
    let (namespace, name) = named(pod);
    eventually("the probe's verdict", LONG, || {
        let now = cluster.pod(namespace, name)?;
        ensure!(is(&now, "Ready") == ready, "{now}");
        anyhow::Ok(())
    })
    .unwrap();
}

/// Deletes a pod from the exempted probes.
fn take_out_of_the_set(cluster: &ExclusiveCluster<'_>, pod: &Value) {
    let element = format!("{{ {} }}", text(pod, "/status/podIP"));
    let set = ["inet", "inpod-host", "probes-v4", &element];
    let delete = [&["nft", "delete", "element"][..], &set].concat();
    cluster.machine().exec(&delete).unwrap();
}

fn until_repair_is_reported(cluster: &ExclusiveCluster<'_>, node: &str) {
    let events = "/apis/events.k8s.io/v1/namespaces/default/events";
    eventually("an Event of the node", TIMEOUT, || {
        let all = cluster.server.get(events)?.to_string();
        let of_node = all.contains("NodeRepaired") && all.contains(node);
        let difference = "1 addresses are missing or have the wrong owner";
        ensure!(of_node && all.contains(difference), "{all}");
        anyhow::Ok(())
    })
    .unwrap();
}

fn probed() -> Value {
    container(&json!({
        "startupProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1, "failureThreshold": 60},
        "readinessProbe": {"httpGet": {"path": "/cgi-bin/who", "port": PORT}, "periodSeconds": 1, "timeoutSeconds": 2},
        "livenessProbe": {"exec": {"command": ["/bin/true"]}, "periodSeconds": 1},
    }))
}

#[test]
fn probes_of_each_kind_succeed_past_ztunnel_and_fail_without_the_element_that_lets_them() {
    on_the_node(|cluster| {
        cluster
            .make_namespace("probes", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let pod = deploy(cluster, "probes", "web", &probed());
        cluster.until_enrolled(&pod);
        eventually("five more probes", TIMEOUT, || {
            let all = seen(cluster, &pod)?;
            ensure!(all.len() > 5, "{all:?}");
            assert!(all.iter().all(|source| source.contains(PROBE)), "{all:?}");
            anyhow::Ok(())
        })
        .unwrap();
        assert_eq!(
            taken(cluster, &pod, 15006),
            0,
            "probes went through ztunnel"
        );
        // Negative control: without the element, and with netconfig stopped so that it stays
        // away, ztunnel answers first.
        let agent = cluster.agent();
        let netconfig = |signal| {
            cluster
                .machine()
                .kill(uid(&agent), "/netconfig", signal)
                .unwrap();
        };
        let ztunnels = cluster
            .until_ready("istio-system", "app=ztunnel", 1)
            .unwrap();
        let ztunnel = ztunnels.first().unwrap();
        let program = "/reference-ztunnel";
        let ztunnel = |signal| {
            cluster
                .machine()
                .kill(uid(ztunnel), program, signal)
                .unwrap();
        };
        netconfig(Signal::SIGSTOP);
        take_out_of_the_set(cluster, &pod);
        eventually("ztunnel takes probes", TIMEOUT, || {
            ensure!(taken(cluster, &pod, 15006) > 0, "none");
            anyhow::Ok(())
        })
        .unwrap();
        ztunnel(Signal::SIGSTOP);
        until_ready_is(cluster, &pod, false);
        // With the element, ztunnel is not needed.
        netconfig(Signal::SIGCONT);
        until_ready_is(cluster, &pod, true);
        ztunnel(Signal::SIGCONT);
        cluster.until_whole();
        until_repair_is_reported(cluster, text(&pod, "/spec/nodeName"));
        let (namespace, name) = named(&pod);
        let now = cluster.pod(namespace, name).unwrap();
        assert_eq!(
            now.pointer("/status/containerStatuses/0/restartCount"),
            Some(&json!(0))
        );
        cluster.remove("probes");
    });
}
