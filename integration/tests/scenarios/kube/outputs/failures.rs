//! Reports of failures, and failures of reports.

use crate::common::cluster::Cluster;
use anyhow::{Context as _, ensure};
use integration::{Act, Call, Spec, TIMEOUT, Verb, eventually, run};
use serde_json::json;

use crate::kube::outputs::{
    ANNOTATION, NOTHING, annotation, counted, events, events_in, refusing_ztunnel, set_status,
    until_annotated_as, until_condition, until_event,
};

#[test]
fn an_add_while_the_api_server_is_away_succeeds_and_its_late_annotation_is_told_of() {
    let (cluster, proxy) = Cluster::behind_proxy();
    let uid = cluster.create(&cluster.object("web", Some("ambient")));
    let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
    set_status(&cluster, "web", &ready);
    cluster.start();
    cluster.until_shown("web");
    let pod = cluster.sandbox("web", &uid);
    proxy.go_away();
    cluster.node.add(&pod).unwrap();
    cluster.node.until_whole(&pod.spec).unwrap();
    let words = until_condition(&cluster, "annotations", false);
    assert!(words.contains("does not answer"), "{words}");
    assert_eq!(counted(&cluster, "inpod_pod_events_annotations_unmet"), 1);
    eventually("it is late", TIMEOUT, || {
        let log = cluster.node.tail("pod-events", usize::MAX);
        ensure!(log.contains("ANNOTATION_FAILED"), "nothing has failed");
        ensure!(log.contains("ANNOTATION_LATE"), "nothing is late");
        anyhow::Ok(())
    })
    .unwrap();
    proxy.come_back();
    until_annotated_as(&cluster, "web", Some("enabled"));
    until_condition(&cluster, "annotations", true);
    let event = until_event(&cluster, "web", "AnnotationLate");
    assert_eq!(event["type"], "Warning");
    let count = events(&cluster, "web", "AnnotationLate").len();
    assert_eq!((count, event.get("series")), (1, None));
}

#[test]
fn a_repair_of_the_nodes_own_network_is_an_event_of_the_node() {
    let cluster = Cluster::shared();
    cluster.pod("web", Some("ambient"));
    let in_set = || {
        nft(
            &cluster,
            &["list", "set", "inet", "inpod-host", "probes-v4"],
        )
    };
    let before = in_set().unwrap();
    assert!(before.contains("elements"), "{before}");
    nft(&cluster, &["flush", "ruleset"]).unwrap();
    let event = eventually("the Event is there", TIMEOUT, || {
        let found = events_in("default", &cluster, cluster.node.name(), "NodeRepaired");
        found.into_iter().next().context("no Event")
    })
    .unwrap();
    assert_eq!(in_set().unwrap(), before);
    assert_eq!(event["regarding"]["kind"], "Node");
    let note = event["note"].as_str().unwrap();
    assert!(note.contains(": the whole set is missing. "), "{note}");
}

#[test]
fn refused_adds_are_reported_with_their_reason_and_not_too_often() {
    let cluster = Cluster::shared();
    let uid = cluster.create(&cluster.object("web", Some("ambient")));
    cluster.until_shown("web");
    let pod = cluster.sandbox("web", &uid);
    refusing_ztunnel(&cluster);
    let dropped = "inpod_pod_events_events_total{result=\"dropped\"}";
    for _ in 0..6 {
        let outcome = cluster.node.call(Call::add, &pod).run().unwrap();
        assert_ne!(outcome.code, 0, "{outcome:?}");
    }
    let reported = eventually("three are reported and the rest dropped", TIMEOUT, || {
        let reported = events(&cluster, "web", "ZtunnelRefused");
        let count = reported
            .first()
            .and_then(|event| event.pointer("/series/count")?.as_u64());
        ensure!(count == Some(3), "{reported:?}");
        ensure!(counted(&cluster, dropped) >= 1, "none was dropped");
        anyhow::Ok(reported)
    })
    .unwrap();
    assert_eq!(reported.len(), 1, "one Event with its series");
    let note = reported[0]["note"].as_str().unwrap();
    assert!(note.contains("ztunnel"), "{note}");
    assert_eq!(annotation(&cluster, "web"), None);
}

#[test]
fn an_event_that_a_server_refuses_until_it_knows_who_may_what_is_made_and_others_wait_no_longer_than_that()
 {
    let (cluster, proxy) = Cluster::behind_proxy();
    cluster.start();
    let refused = |name: &str| {
        let uid = cluster.create(&cluster.object(name, Some("ambient")));
        cluster.until_shown(name);
        let pod = cluster.sandbox(name, &uid);
        let outcome = cluster.node.call(Call::add, &pod).run().unwrap();
        assert_ne!(outcome.code, 0, "{outcome:?}");
    };
    refusing_ztunnel(&cluster);
    proxy.fault(Verb::Create, "events", 2, Act::Refuse(403, None));
    refused("web");
    until_event(&cluster, "web", "ZtunnelRefused");
    assert_eq!(proxy.asked(Verb::Create, "events").len(), 3);
    proxy.fault(Verb::Create, "events", usize::MAX, Act::Refuse(403, None));
    refused("other");
    let failed = "inpod_pod_events_events_total{result=\"failed\"}";
    eventually("it is given up", TIMEOUT, || {
        ensure!(counted(&cluster, failed) == 1, "not yet");
        anyhow::Ok(())
    })
    .unwrap();
    proxy.heal();
    refused("third");
    until_event(&cluster, "third", "ZtunnelRefused");
    assert!(events(&cluster, "other", "ZtunnelRefused").is_empty());
}

#[test]
fn a_sidecars_annotation_that_refuses_adds_is_one_event_with_its_name_and_is_not_told_too_often() {
    const PORTS: &str = "traffic.sidecar.istio.io/excludeInboundPorts";
    let cluster = Cluster::shared();
    let mut object = cluster.object("web", None);
    object["metadata"]["annotations"] = json!({"sidecar.istio.io/status": "{}", PORTS: "http"});
    let proxy = json!({"name": "istio-proxy", "image": "proxyv2", "args": ["proxy", "sidecar"]});
    object["spec"]["containers"]
        .as_array_mut()
        .unwrap()
        .push(proxy);
    let uid = cluster.create(&object);
    cluster.until_shown("web");
    let pod = cluster.sandbox("web", &uid);
    for _ in 0..6 {
        let outcome = cluster.node.call(Call::add, &pod).run().unwrap();
        assert!(outcome.stdout.contains("INVALID_FIELD"), "{outcome:?}");
    }
    assert_eq!(pod.traces().unwrap(), NOTHING);
    let event = until_event(&cluster, "web", "InvalidField");
    assert_eq!(event["type"], "Warning");
    assert_eq!(event["reportingController"], "inpod.io/pod-events");
    let note = event["note"].as_str().unwrap();
    assert!(note.contains(PORTS) && note.contains("; give "), "{note}");
    // A later report about another pod shows that none followed about this one.
    cluster.pod("other", Some("ambient"));
    until_annotated_as(&cluster, "other", Some("enabled"));
    let reported = events(&cluster, "web", "InvalidField");
    assert_eq!(reported.len(), 1, "{reported:?}");
    let sent = counted(&cluster, "inpod_pod_events_events_total{result=\"sent\"}");
    assert!((1..=3).contains(&sent), "{sent} were told");
}

#[test]
fn a_server_that_forbids_the_patch_is_a_condition_in_its_words_and_the_pod_is_in_the_mesh_all_the_same()
 {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    proxy.fault(Verb::Patch, "pods", usize::MAX, Act::Refuse(403, None));
    let pod = cluster.pod("web", Some("ambient"));
    cluster.node.until_whole(&pod.spec).unwrap();
    let words = until_condition(&cluster, "annotations", false);
    for part in ["403", "the test answers 403"] {
        assert!(words.contains(part), "{part} is not in {words}");
    }
    assert!(cluster.node.api().status().unwrap().ready);
    let log = cluster.node.tail("pod-events", usize::MAX);
    assert_eq!(log.matches("ANNOTATION_FAILED").count(), 1);
    proxy.heal();
    until_condition(&cluster, "annotations", true);
    until_annotated_as(&cluster, "web", Some("enabled"));
}

#[test]
fn a_pod_and_its_namespace_that_go_while_their_patch_fails_are_not_asked_for_any_more() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    proxy.fault(Verb::Patch, "pods", usize::MAX, Act::Refuse(403, None));
    cluster.pod("web", Some("ambient"));
    until_condition(&cluster, "annotations", false);
    let namespace = format!("/api/v1/namespaces/{}", cluster.namespace);
    cluster.server.delete(&namespace).unwrap();
    cluster.server.delete(&cluster.path("web")).unwrap();
    let finished = json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": cluster.namespace},
        "spec": {"finalizers": []},
    });
    let how = ("PUT", "application/json");
    let path = format!("{namespace}/finalize");
    cluster
        .server
        .ask_as("admin", how, &path, &finished)
        .unwrap();
    until_condition(&cluster, "annotations", true);
    assert_eq!(counted(&cluster, "inpod_pod_events_annotations_unmet"), 0);
    proxy.heal();
    let later = format!("{}-later", cluster.namespace);
    cluster.make_namespace(&later, &json!({}));
    let mut object = cluster.object("later", Some("ambient"));
    object["metadata"]["namespace"] = later.as_str().into();
    let uid = cluster.create(&object);
    let spec = Spec {
        namespace: later.clone(),
        uid,
        ..Spec::new("later")
    };
    let pod = cluster.node.sandbox(spec).unwrap();
    cluster.node.add(&pod).unwrap();
    eventually("another is annotated", TIMEOUT, || {
        let pod = cluster
            .server
            .get(&format!("/api/v1/namespaces/{later}/pods/later"))?;
        ensure!(pod.pointer(ANNOTATION) == Some(&json!("enabled")), "{pod}");
        anyhow::Ok(())
    })
    .unwrap();
}

/// Runs nft in the node's netns.
fn nft(cluster: &Cluster, arguments: &[&str]) -> anyhow::Result<String> {
    let net = format!("--net={}", cluster.node.netns().path().display());
    run("nsenter", &[&[net.as_str(), "nft"], arguments].concat())
}
