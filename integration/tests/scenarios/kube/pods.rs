//! Pods from a real API server: the watch, requests beyond it, and an API server that does not answer.

use crate::common::cluster::Cluster;
use crate::common::cluster::refused;
use anyhow::ensure;
use inpod_proto::{podevents::v1::PodState, types::v1::Reason};
use integration::{Act, Call, TIMEOUT, Verb, eventually};
use serde_json::json;

const NOTHING: Vec<String> = Vec::new();

#[test]
fn an_add_of_a_labelled_pod_that_the_watch_shows_enrolls_it() {
    let cluster = Cluster::shared();
    let uid = cluster.create(&cluster.object("web", Some("ambient")));
    cluster.until_shown("web");
    let pod = cluster.sandbox("web", &uid);
    cluster.node.add(&pod).unwrap();
    let known = cluster.node.until_whole(&pod.spec).unwrap();
    assert_eq!(known.pod.unwrap().uid, uid);
    let workload = &cluster.node.api().workloads().unwrap().workloads[0];
    let info = workload.workload.as_ref().unwrap().info.as_ref().unwrap();
    assert_eq!(info.service_account, "sa-web");
    cluster.node.del(&pod).unwrap();
}

#[test]
fn pods_created_a_moment_before_their_add_are_found() {
    let cluster = Cluster::shared();
    for number in 0..5 {
        let name = format!("web-{number}");
        let pod = cluster.sandbox(&name, "");
        let uid = cluster.create(&cluster.object(&name, Some("ambient")));
        let call = cluster.add_as(&pod, &format!(";K8S_POD_UID={uid}"));
        assert_eq!(call.run().unwrap().code, 0, "{name}");
        cluster.node.until_whole(&pod.spec).unwrap();
    }
}

#[test]
fn a_pod_that_the_watch_does_not_show_is_found_by_a_question_and_stays() {
    // Only the first start of a boot waits for the list.
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let stopped = cluster
        .node
        .stop("pod-events", nix::sys::signal::Signal::SIGTERM);
    stopped.unwrap();
    for verb in [Verb::List, Verb::Watch] {
        proxy.fault(verb, "*", usize::MAX, Act::Refuse(403, None));
    }
    cluster.label_namespace("ambient");
    cluster.node.start("pod-events").unwrap();
    cluster.until_served();
    let uid = cluster.create(&cluster.object("web", None));
    let pod = cluster.sandbox("web", &uid);
    cluster.node.add(&pod).unwrap();
    let known = cluster.node.until_whole(&pod.spec).unwrap();
    assert_eq!(known.reason(), Reason::LabelOnNamespace);
    cluster.until_message(&["cannot watch pods", "403"]);
    proxy.heal();
    cluster.until_pods(true);
    cluster.node.until_whole(&pod.spec).unwrap();
}

#[test]
fn a_label_on_the_namespace_enrolls_its_running_pod_and_its_removal_withdraws_it() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", None);
    assert_eq!(pod.traces().unwrap(), NOTHING);
    cluster.label_namespace("ambient");
    cluster.node.until_whole(&pod.spec).unwrap();
    cluster.label_namespace("none");
    cluster
        .node
        .until(&pod.spec, PodState::Out, TIMEOUT)
        .unwrap();
    assert_eq!(pod.traces().unwrap(), NOTHING);
    assert!(cluster.node.api().claims().unwrap().is_empty());
}

#[test]
fn a_label_on_a_running_pod_enrolls_it_and_one_that_opts_out_withdraws_it() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", None);
    let label = |mode: &str| json!({"metadata": {"labels": {"istio.io/dataplane-mode": mode}}});
    let path = cluster.path("web");
    cluster.server.patch(&path, &label("ambient")).unwrap();
    cluster.node.until_whole(&pod.spec).unwrap();
    cluster.server.patch(&path, &label("none")).unwrap();
    cluster
        .node
        .until(&pod.spec, PodState::Out, TIMEOUT)
        .unwrap();
    assert_eq!(pod.traces().unwrap(), NOTHING);
}

#[test]
fn an_add_with_the_uid_of_another_pod_is_refused() {
    let cluster = Cluster::shared();
    let uid = cluster.create(&cluster.object("web", Some("ambient")));
    let pod = cluster.sandbox("web", "00000000-1111-2222-3333-444444444444");
    let outcome = cluster.node.call(Call::add, &pod).run().unwrap();
    refused(&outcome, 100, &["POD_UID_MISMATCH", &uid]);
    assert_eq!(pod.traces().unwrap(), NOTHING);
}

#[test]
fn a_pod_that_was_made_anew_is_taken_for_its_predecessor_by_nobody() {
    let cluster = Cluster::shared();
    let first = cluster.pod("web", Some("ambient"));
    cluster.node.until_whole(&first.spec).unwrap();
    cluster.server.delete(&cluster.path("web")).unwrap();
    let uid = cluster.create(&cluster.object("web", None));
    let second = cluster.sandbox("web", &uid);
    cluster.node.add(&second).unwrap();
    assert_eq!(second.traces().unwrap(), NOTHING);
    let outcome = cluster.node.call(Call::add, &first).run().unwrap();
    refused(&outcome, 100, &["POD_UID_MISMATCH", &uid]);
}

#[test]
fn an_add_of_a_pod_of_another_node_is_refused_and_both_nodes_are_named() {
    let cluster = Cluster::shared();
    let mut object = cluster.object("web", Some("ambient"));
    object["spec"]["nodeName"] = "another-node".into();
    let uid = cluster.create(&object);
    let pod = cluster.sandbox("web", &uid);
    let outcome = cluster.node.call(Call::add, &pod).run().unwrap();
    let words = ["POD_OTHER_NODE", "another-node", cluster.node.name()];
    refused(&outcome, 100, &words);
    assert_eq!(pod.traces().unwrap(), NOTHING);
}

#[test]
fn an_add_of_a_pod_that_nobody_made_is_refused() {
    let cluster = Cluster::shared();
    let pod = cluster.sandbox("web", "00000000-1111-2222-3333-444444444444");
    let outcome = cluster.node.call(Call::add, &pod).run().unwrap();
    refused(&outcome, 100, &["POD_UNKNOWN", "web", cluster.node.name()]);
}

#[test]
fn a_static_pod_is_called_by_its_hash_and_keeps_its_sandbox_when_its_mirror_is_made_anew() {
    let cluster = Cluster::shared();
    let hash = "0123456789abcdef0123456789abcdef";
    let mut object = cluster.object("static", Some("ambient"));
    object["metadata"]["annotations"] = json!({
        "kubernetes.io/config.hash": hash,
        "kubernetes.io/config.mirror": hash,
        "kubernetes.io/config.source": "file",
    });
    // A mirror pod names no service account.
    object["spec"]["serviceAccountName"] = serde_json::Value::Null;
    let uid = cluster.create(&object);
    let pod = cluster.sandbox("static", hash);
    cluster.node.add(&pod).unwrap();
    let known = cluster.node.until_whole(&pod.spec).unwrap();
    // ztunnel gets the name that istiod uses.
    assert_eq!(known.pod.unwrap().uid, uid);

    cluster.server.delete(&cluster.path("static")).unwrap();
    let successor = cluster.create(&object);
    assert_ne!(uid, successor);
    cluster.until_shown_as("static", &successor);
    let change = json!({"metadata": {"labels": {"istio.io/dataplane-mode": "none"}}});
    cluster
        .server
        .patch(&cluster.path("static"), &change)
        .unwrap();
    let known = cluster
        .node
        .until(&pod.spec, PodState::Out, TIMEOUT)
        .unwrap();
    // A missing pod would be forgotten with its sandbox.
    assert_eq!(known.sandbox.unwrap().container_id, pod.container_id);
    assert_eq!(pod.traces().unwrap(), NOTHING);
}

#[test]
fn a_pod_with_the_nodes_network_and_one_that_has_ended_stay_out() {
    let cluster = Cluster::shared();
    let mut object = cluster.object("host", Some("ambient"));
    object["spec"]["hostNetwork"] = true.into();
    let host = cluster.sandbox("host", &cluster.create(&object));
    cluster.node.add(&host).unwrap();
    let known = cluster.node.explain(&host.spec).unwrap();
    assert_eq!(known.reason(), Reason::HostNetwork);
    assert_eq!(host.traces().unwrap(), NOTHING);

    let job = cluster.pod("job", Some("ambient"));
    cluster.node.until_whole(&job.spec).unwrap();
    let ended = json!({"status": {"phase": "Succeeded"}});
    let status = format!("{}/status", cluster.path("job"));
    cluster.server.patch(&status, &ended).unwrap();
    let known = cluster
        .node
        .until(&job.spec, PodState::Out, TIMEOUT)
        .unwrap();
    assert_eq!(known.reason(), Reason::PodTerminal);
    assert_eq!(job.traces().unwrap(), NOTHING);
}

#[test]
fn a_runtime_that_names_no_uid_means_the_live_pod_of_that_name() {
    let cluster = Cluster::shared();
    let uid = cluster.create(&cluster.object("web", Some("ambient")));
    let pod = cluster.sandbox("web", &uid);
    assert_eq!(cluster.add_as(&pod, "").run().unwrap().code, 0);
    let known = cluster.node.until_whole(&pod.spec).unwrap();
    assert_eq!(known.pod.unwrap().uid, uid);

    let job = cluster.sandbox("job", "");
    cluster.create(&cluster.object("job", Some("ambient")));
    let ended = json!({"status": {"phase": "Failed"}});
    let status = format!("{}/status", cluster.path("job"));
    cluster.server.patch(&status, &ended).unwrap();
    let outcome = cluster.add_as(&job, "").run().unwrap();
    refused(&outcome, 100, &["POD_UNKNOWN", "has ended"]);
}

#[test]
fn a_deleted_pod_is_forgotten_without_its_del() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", Some("ambient"));
    cluster.node.until_whole(&pod.spec).unwrap();
    cluster.server.delete(&cluster.path("web")).unwrap();
    eventually("the sandbox is forgotten", TIMEOUT, || {
        let claims = cluster.node.api().claims()?;
        ensure!(claims.is_empty(), "{claims:?}");
        let unknown = cluster.node.explain(&pod.spec);
        ensure!(unknown.is_err(), "{unknown:?}");
        anyhow::Ok(())
    })
    .unwrap();
}
