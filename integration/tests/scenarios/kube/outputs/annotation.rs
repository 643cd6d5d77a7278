//! The annotation that shows whether a pod is redirected.

use crate::common::cluster::Cluster;
use anyhow::ensure;
use inpod_proto::podevents::v1::PodState;
use integration::{Act, TIMEOUT, Verb, eventually};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::kube::outputs::{
    NOTHING, all_patches, annotation, counted, label, many, patches, refusing_ztunnel, set_status,
    until_annotated_as, until_asked, until_condition, until_event, working_ztunnel,
};

#[test]
fn a_pod_is_annotated_once_after_its_add_and_its_lag_is_counted() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", Some("ambient"));
    until_annotated_as(&cluster, "web", Some("enabled"));
    cluster.node.until_whole(&pod.spec).unwrap();
    until_asked(&cluster, "web", &[json!("enabled")]);
    assert_eq!(
        counted(&cluster, "inpod_pod_events_annotation_lag_seconds_count"),
        1
    );
    let result = "inpod_pod_events_annotation_patches_total{result=\"accepted\"}";
    assert_eq!(counted(&cluster, result), 1);
    assert_eq!(counted(&cluster, "inpod_pod_events_annotations_unmet"), 0);
    let managers = cluster.server.get(&cluster.path("web")).unwrap();
    let managers = managers.pointer("/metadata/managedFields").unwrap();
    assert!(
        managers.to_string().contains("inpod.io/pod-events"),
        "{managers}"
    );
}

#[test]
fn a_running_pod_is_annotated_when_it_is_enrolled_and_loses_that_when_it_opts_out() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", None);
    assert_eq!(annotation(&cluster, "web"), None);
    cluster.label_namespace("ambient");
    until_annotated_as(&cluster, "web", Some("enabled"));
    label(&cluster, "web", "none");
    until_annotated_as(&cluster, "web", None);
    cluster
        .node
        .until(&pod.spec, PodState::Out, TIMEOUT)
        .unwrap();
    assert_eq!(pod.traces().unwrap(), NOTHING);
    until_asked(&cluster, "web", &[json!("enabled"), Value::Null]);
}

// scenario: 57
#[test]
fn a_running_pod_that_ztunnel_refuses_is_pending_through_all_attempts_and_enabled_when_it_is_taken()
{
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", None);
    refusing_ztunnel(&cluster);
    label(&cluster, "web", "ambient");
    until_annotated_as(&cluster, "web", Some("pending"));
    let event = until_event(&cluster, "web", "ZtunnelRefused");
    assert_eq!(event["type"], "Warning");
    assert_eq!(event["reportingController"], "inpod.io/pod-events");
    assert_eq!(event["reportingInstance"], cluster.node.name());
    assert_eq!(event["regarding"]["uid"], pod.spec.uid.as_str());
    // Some more attempts.
    let attempts = || cluster.node.explain(&pod.spec).unwrap().timeline.len();
    let before = attempts();
    eventually("it was tried again", TIMEOUT, || {
        ensure!(attempts() > before + 2, "not yet");
        anyhow::Ok(())
    })
    .unwrap();
    working_ztunnel(&cluster);
    until_annotated_as(&cluster, "web", Some("enabled"));
    until_asked(&cluster, "web", &[json!("pending"), json!("enabled")]);
    let mended = until_event(&cluster, "web", "LabelOnPod");
    assert_eq!(mended["type"], "Normal");
}

#[test]
fn a_running_pod_without_any_ztunnel_is_pending_until_one_comes() {
    let cluster = Cluster::shared();
    cluster.pod("web", None);
    cluster.node.stop("ztunnel", Signal::SIGKILL).unwrap();
    label(&cluster, "web", "ambient");
    until_annotated_as(&cluster, "web", Some("pending"));
    cluster.node.start_ztunnel(&[]).unwrap();
    until_annotated_as(&cluster, "web", Some("enabled"));
}

#[test]
fn a_job_that_ends_loses_its_annotation() {
    let cluster = Cluster::shared();
    cluster.pod("job", Some("ambient"));
    until_annotated_as(&cluster, "job", Some("enabled"));
    set_status(&cluster, "job", &json!({"phase": "Succeeded"}));
    until_annotated_as(&cluster, "job", None);
}

#[test]
fn a_pod_whose_deletion_was_asked_for_keeps_its_annotation_while_it_serves() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", Some("ambient"));
    until_annotated_as(&cluster, "web", Some("enabled"));
    let gracefully = json!({"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 60});
    let how = ("DELETE", "application/json");
    cluster
        .server
        .ask_as("admin", how, &cluster.path("web"), &gracefully)
        .unwrap();
    // The watch shows later pods afterwards.
    let uid = cluster.create(&cluster.object("other", Some("ambient")));
    cluster.until_shown("other");
    cluster.node.del(&pod).unwrap();
    // A later report about another pod shows that none was made about this one.
    let other = cluster.sandbox("other", &uid);
    cluster.node.add(&other).unwrap();
    until_annotated_as(&cluster, "other", Some("enabled"));
    until_asked(&cluster, "other", &[json!("enabled")]);
    until_asked(&cluster, "web", &[json!("enabled")]);
}

// scenario: 1
// scenario: 2
#[test]
fn an_annotation_that_a_template_brings_is_removed_and_not_trusted() {
    let cluster = Cluster::shared();
    let mut object = cluster.object("web", None);
    object["metadata"]["annotations"] = json!({"ambient.istio.io/redirection": "enabled"});
    let uid = cluster.create(&object);
    until_annotated_as(&cluster, "web", None);
    let pod = cluster.sandbox("web", &uid);
    cluster.node.add(&pod).unwrap();
    assert_eq!(pod.traces().unwrap(), NOTHING);
    until_asked(&cluster, "web", &[Value::Null]);
}

// scenario: 2
#[test]
fn an_annotation_that_somebody_removes_from_an_enrolled_pod_is_put_back() {
    let cluster = Cluster::shared();
    cluster.pod("web", Some("ambient"));
    until_annotated_as(&cluster, "web", Some("enabled"));
    let change = json!({"metadata": {"annotations": {"ambient.istio.io/redirection": null}}});
    cluster.server.patch(&cluster.path("web"), &change).unwrap();
    eventually("it is put back", TIMEOUT, || {
        let reported = patches(&cluster, "web");
        ensure!(reported.len() == 2, "{reported:?}");
        anyhow::Ok(())
    })
    .unwrap();
    until_annotated_as(&cluster, "web", Some("enabled"));
}

#[test]
fn a_new_sandbox_of_an_annotated_pod_changes_nothing_that_is_right() {
    let cluster = Cluster::shared();
    let first = cluster.pod("web", Some("ambient"));
    until_annotated_as(&cluster, "web", Some("enabled"));
    let second = cluster.sandbox("web", &first.spec.uid);
    cluster.node.add(&second).unwrap();
    cluster.node.until_whole(&second.spec).unwrap();
    cluster.node.del(&first).unwrap();
    assert_eq!(annotation(&cluster, "web").as_deref(), Some("enabled"));
    until_asked(&cluster, "web", &[json!("enabled")]);
}

#[test]
fn a_patch_for_a_predecessor_does_not_mark_its_successor() {
    let cluster = Cluster::shared();
    let token = cluster
        .server
        .token(&format!("{}-more", cluster.node.name()))
        .unwrap();
    let node = format!("{}-more", cluster.node.name());
    let mut object = cluster.object("web", None);
    object["spec"]["nodeName"] = node.into();
    cluster.create(&object);
    let change = |uid: &str| json!({"metadata": {"uid": uid, "annotations": {"ambient.istio.io/redirection": "enabled"}}});
    let path = format!("{}/status", cluster.path("web"));
    let how = ("PATCH", "application/merge-patch+json");
    let other = change("00000000-1111-2222-3333-444444444444");
    let refused = cluster
        .server
        .ask_as(&token, how, &path, &other)
        .unwrap_err();
    let refused = refused.to_string();
    for words in ["\"code\": 422", "metadata.uid", "immutable"] {
        assert!(refused.contains(words), "{words} is not in {refused}");
    }
    assert_eq!(annotation(&cluster, "web"), None);
}

#[test]
fn a_successor_outside_the_mesh_is_not_marked_with_what_was_told_of_its_predecessor() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    proxy.fault(Verb::Patch, "pods", usize::MAX, Act::Refuse(403, None));
    cluster.pod("web", Some("ambient"));
    until_condition(&cluster, "annotations", false);
    cluster.server.delete(&cluster.path("web")).unwrap();
    let uid = cluster.create(&cluster.object("web", None));
    cluster.until_shown_as("web", &uid);
    proxy.heal();
    until_condition(&cluster, "annotations", true);
    let second = cluster.sandbox("web", &uid);
    cluster.node.add(&second).unwrap();
    assert_eq!(annotation(&cluster, "web"), None);
}

#[test]
fn restarts_of_a_ztunnel_and_of_every_service_with_a_hundred_pods_make_no_patch() {
    let cluster = Cluster::shared();
    let pods = many(&cluster, 100);
    eventually("all are annotated", TIMEOUT, || {
        let made = all_patches(&cluster);
        ensure!(made == pods.len(), "{made}");
        anyhow::Ok(())
    })
    .unwrap();
    let last = pods.last().unwrap();
    until_annotated_as(&cluster, &last.spec.name, Some("enabled"));
    working_ztunnel(&cluster);
    pods.iter()
        .for_each(|pod| drop(cluster.node.until_whole(&pod.spec).unwrap()));
    for service in ["pod-events", "netconfig", "ztunnel-broker"] {
        cluster.node.stop(service, Signal::SIGKILL).unwrap();
        cluster.node.start(service).unwrap();
        cluster.until_served();
    }
    cluster.node.until_whole(&last.spec).unwrap();
    // A later report about another pod shows that these are complete.
    cluster.pod("other", Some("ambient"));
    until_annotated_as(&cluster, "other", Some("enabled"));
    until_asked(&cluster, "other", &[json!("enabled")]);
    assert_eq!(all_patches(&cluster), pods.len() + 1);
}
