//! A release on a node: install, handover, uninstall, install again.

use std::fs;

use anyhow::ensure;
use integration::{
    eventually,
    kubernetes::{LONG, NODE, get, is, text},
};
use serde_json::json;

use crate::cluster::{
    agent::{AGENT, ExclusiveCluster, SYSTEM, on_the_node, uid},
    apps::{address, container, create, deploy},
    mesh::{assert_unbroken, serves_through_ztunnel, taken, traffic},
    trace,
};

/// Expects only what the primary wrote.
pub(crate) fn chain_is_the_primarys(cluster: &ExclusiveCluster<'_>) {
    let primary = cluster
        .machine()
        .etc("cni/net.d/10-podnet.conflist")
        .unwrap();
    assert_eq!(
        fs::read_to_string(&primary).unwrap(),
        cluster.machine().primary()
    );
    let names = cluster
        .machine()
        .exec(&["ls", "-A", "/etc/cni/net.d"])
        .unwrap();
    assert_eq!(names.trim(), "10-podnet.conflist");
}

#[test]
fn a_handover_leaves_rules_listeners_and_annotations_and_gives_the_chain_back() {
    on_the_node(|cluster| {
        cluster
            .make_namespace("given", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let pod = deploy(cluster, "given", "web", &container(&json!({})));
        cluster.until_enrolled(&pod);
        let (rules, traffic) = (trace::of(cluster, &pod), traffic(cluster, &pod));
        let handover = ["handover", "--timeout", "120s"];
        let said = cluster.person(&[&handover[..], &["--namespace", SYSTEM]].concat());
        let said = said.unwrap();
        assert!(said.contains("1 of 1 nodes done"), "{said}");
        assert_eq!(trace::of(cluster, &pod), rules);
        let shown = "/metadata/annotations/ambient.istio.io~1redirection";
        let now = cluster.pod("given", text(&pod, "/metadata/name")).unwrap();
        assert_eq!(text(&now, shown), "enabled");
        serves_through_ztunnel(cluster, &pod);
        // On a node that never had another agent.
        chain_is_the_primarys(cluster);
        assert!(!cluster.machine().file("opt/cni/bin/inpod-cni").exists());
        let between = deploy(cluster, "given", "between", &container(&json!({})));
        let tables = cluster.in_netns(&between, &["nft", "list", "tables"]);
        assert_eq!(tables, "");
        // The successor is running.
        cluster.delete_release(&["--no-hooks"]);
        assert_eq!(trace::of(cluster, &pod), rules);
        serves_through_ztunnel(cluster, &pod);
        cluster.install();
        cluster.until_whole();
        // One pod is in this boot's checkpoint; the agent never learnt of the other.
        cluster.until_enrolled(&pod);
        cluster.until_found(&between);
        serves_through_ztunnel(cluster, &pod);
        serves_through_ztunnel(cluster, &between);
        assert_unbroken(traffic);
        let next = deploy(cluster, "given", "next", &container(&json!({})));
        cluster.until_enrolled(&next);
        cluster.remove("given");
    });
}

#[test]
fn the_chart_s_job_leaves_a_node_as_it_was_and_a_new_install_takes_its_pods_in_again() {
    on_the_node(|cluster| {
        cluster
            .make_namespace("gone", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        cluster.make_namespace("never", &json!({})).unwrap();
        let pod = deploy(cluster, "gone", "web", &container(&json!({})));
        let never = deploy(cluster, "never", "web", &container(&json!({})));
        cluster.until_enrolled(&pod);
        let traffic = traffic(cluster, &pod);
        cluster.uninstall();
        chain_is_the_primarys(cluster);
        assert_eq!(trace::of_the_node(cluster), *cluster.clean());
        assert_eq!(trace::of(cluster, &pod), trace::of(cluster, &never));
        assert_eq!(trace::annotated(cluster), []);
        let before = taken(cluster, &pod, 15006);
        assert_eq!(get(&cluster.outside, address(&pod)).unwrap().trim(), "here");
        assert_eq!(taken(cluster, &pod, 15006), before);
        // No agent acts on the label now.
        let between = deploy(cluster, "gone", "between", &container(&json!({})));
        assert_eq!(cluster.in_netns(&between, &["nft", "list", "tables"]), "");
        cluster.install();
        cluster.until_whole();
        // Neither is in the checkpoint.
        cluster.until_found(&pod);
        cluster.until_found(&between);
        serves_through_ztunnel(cluster, &pod);
        assert_unbroken(traffic);
        let next = deploy(cluster, "gone", "next", &container(&json!({})));
        cluster.until_enrolled(&next);
        serves_through_ztunnel(cluster, &next);
        for namespace in ["gone", "never"] {
            cluster.remove(namespace);
        }
    });
}

#[test]
fn an_agent_that_is_there_before_the_primary_waits_for_it_and_so_do_pods_and_the_node() {
    on_the_node(|cluster| {
        cluster.uninstall();
        cluster.machine().remove_primary().unwrap();
        eventually("the node has no network", LONG, || {
            let node = cluster.server.get(&format!("/api/v1/nodes/{NODE}"))?;
            ensure!(!is(&node, "Ready"), "it is ready");
            anyhow::Ok(())
        })
        .unwrap();
        cluster.install();
        cluster
            .make_namespace("early", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        create(
            cluster,
            "early",
            "web",
            &json!({"nodeName": NODE}),
            &container(&json!({})),
        );
        eventually("the agent runs, and its installer waits", LONG, || {
            let agents = cluster.pods(SYSTEM, AGENT)?;
            let statuses = agents
                .first()
                .and_then(|it| it.pointer("/status/containerStatuses"));
            let statuses = statuses.and_then(serde_json::Value::as_array);
            let mut ready = statuses.into_iter().flatten().map(|it| {
                (
                    text(it, "/name").to_owned(),
                    it.get("ready") == Some(&json!(true)),
                )
            });
            let expected = [
                ("installer", false),
                ("netconfig", true),
                ("pod-events", true),
                ("ztunnel-broker", true),
            ];
            let ready: Vec<_> = ready.by_ref().collect();
            ensure!(
                ready == expected.map(|(name, is)| (name.to_owned(), is)),
                "{ready:?}"
            );
            let said = cluster.machine().log_of(uid(agents.first().unwrap()))?;
            ensure!(said.contains("waiting for the primary CNI"), "{said}");
            anyhow::Ok(())
        })
        .unwrap();
        let pod = cluster.pod("early", "web").unwrap();
        assert!(text(&pod, "/status/podIP").is_empty(), "{pod}");
        cluster.machine().write_primary().unwrap();
        cluster.until_whole();
        let pods = cluster.until_ready("early", "app=web", 1).unwrap();
        let pod = pods.first().unwrap();
        cluster.until_enrolled(pod);
        serves_through_ztunnel(cluster, pod);
        cluster.remove("early");
    });
}
