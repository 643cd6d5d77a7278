//! Pods that end: Jobs, deletions, successors by name, namespaces deleted first.

use integration::{Act, App, Cut, Inhabitant, Verb};
use nix::sys::signal::Signal;
use serde_json::json;

use super::*;

#[test]
fn a_job_whose_status_loses_its_addresses_as_it_ends_leaves_the_mesh() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("job", Some("ambient"));
    set_status(&cluster, "job", &runs_in(&pod));
    until_in(&cluster, &pod, Reason::LabelOnPod);
    assert_eq!(probed(&cluster).unwrap().len(), 2);
    let ended = json!({"phase": "Failed", "podIP": null, "podIPs": null});
    set_status(&cluster, "job", &ended);
    until_out(&cluster, &pod, Reason::PodTerminal);
    assert_eq!(served(&cluster), [""; 0]);
    assert_eq!(probed(&cluster).unwrap(), [""; 0]);
    cluster.node.del(&pod).unwrap();
}

#[test]
fn a_job_that_ends_while_netconfig_is_away_leaves_when_it_is_back() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("job", Some("ambient"));
    until_in(&cluster, &pod, Reason::LabelOnPod);
    cluster.node.stop("netconfig", Signal::SIGKILL).unwrap();
    set_status(&cluster, "job", &json!({"phase": "Succeeded"}));
    eventually("its end is heard of", TIMEOUT, || {
        let known = cluster.node.explain(&pod.spec)?;
        ensure!(known.reason() == Reason::PodTerminal, "{known:?}");
        anyhow::Ok(())
    })
    .unwrap();
    cluster.node.start("netconfig").unwrap();
    until_out(&cluster, &pod, Reason::PodTerminal);
    assert_eq!(served(&cluster), [""; 0]);
}

#[test]
fn after_a_restart_ztunnel_is_given_the_pods_that_run_and_no_job_that_has_ended() {
    let cluster = Cluster::shared();
    let web = cluster.pod("web", Some("ambient"));
    let job = cluster.pod("job", Some("ambient"));
    until_in(&cluster, &job, Reason::LabelOnPod);
    for service in ["pod-events", "ztunnel-broker"] {
        cluster.node.stop(service, Signal::SIGKILL).unwrap();
    }
    set_status(&cluster, "job", &json!({"phase": "Succeeded"}));
    for service in ["ztunnel-broker", "pod-events"] {
        cluster.node.start(service).unwrap();
    }
    cluster.until_served();
    until_in(&cluster, &web, Reason::LabelOnPod);
    until_out(&cluster, &job, Reason::PodTerminal);
    assert_eq!(served(&cluster), [web.spec.uid]);
}

/// Makes the watches lose their resource version and lists again; `happens` runs in between.
fn between_lists(cluster: &Cluster, proxy: &integration::ApiProxy, happens: impl FnOnce()) {
    proxy.fault(Verb::Watch, "pods", usize::MAX, Act::Refuse(503, None));
    proxy.cut(Cut::Broken);
    cluster.until_pods(false);
    happens();
    proxy.heal();
    proxy.fault(Verb::Watch, "pods", 1, Act::ErrorEvent(410));
    cluster.until_pods(true);
}

#[test]
fn a_deletion_and_a_creation_of_the_same_name_that_one_list_tells_are_two_pods() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let first = cluster.pod("web", Some("ambient"));
    until_in(&cluster, &first, Reason::LabelOnPod);
    let mut uid = String::new();
    between_lists(&cluster, &proxy, || {
        cluster.server.delete(&cluster.path("web")).unwrap();
        uid = cluster.create(&cluster.object("web", Some("ambient")));
    });
    cluster.until_shown_as("web", &uid);
    until_forgotten(&cluster, &first);
    let second = cluster.sandbox("web", &uid);
    cluster.node.add(&second).unwrap();
    let known = until_in(&cluster, &second, Reason::LabelOnPod);
    assert_eq!(known.pod.unwrap().uid, uid);
    assert_eq!(served(&cluster), [uid]);
    assert_eq!(cluster.node.api().claims().unwrap().len(), 1);
}

#[test]
fn a_pod_that_serves_on_is_served_beside_the_successor_that_the_same_list_tells() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let outsider = outsider(&cluster);
    let first = cluster.pod("web", Some("ambient"));
    let _first = App::start(&first.netns, PORT).unwrap();
    let process = Inhabitant::of(&first).unwrap();
    let mut uid = String::new();
    between_lists(&cluster, &proxy, || {
        cluster.server.delete(&cluster.path("web")).unwrap();
        uid = cluster.create(&cluster.object("web", Some("ambient")));
    });
    let second = cluster.sandbox("web", &uid);
    cluster.node.add(&second).unwrap();
    let _second = App::start(&second.netns, PORT).unwrap();
    until_in(&cluster, &second, Reason::LabelOnPod);
    for pod in [&first, &second] {
        assert_eq!(taken(&cluster, &outsider, pod), CAPTURED);
    }
    drop(process);
    until_forgotten(&cluster, &first);
    assert_eq!(taken(&cluster, &outsider, &second), CAPTURED);
}

#[test]
fn a_successor_outside_the_mesh_is_no_reason_to_serve_its_predecessor_on() {
    let cluster = Cluster::shared();
    let first = cluster.pod("web", Some("ambient"));
    until_in(&cluster, &first, Reason::LabelOnPod);
    cluster.server.delete(&cluster.path("web")).unwrap();
    let uid = cluster.create(&cluster.object("web", None));
    let second = cluster.sandbox("web", &uid);
    cluster.node.add(&second).unwrap();
    until_forgotten(&cluster, &first);
    until_out(&cluster, &second, Reason::NotSelected);
    // The first pod's late DEL affects no other.
    cluster.node.del(&first).unwrap();
    let known = cluster.node.explain(&second.spec).unwrap();
    assert_eq!(known.sandbox.unwrap().container_id, second.container_id);
}

/// Deletes a non-empty namespace at once: no controller empties it here.
fn delete_namespace(cluster: &Cluster) {
    let path = format!("/api/v1/namespaces/{}", cluster.namespace);
    cluster.server.delete(&path).unwrap();
    let mut object = cluster.server.get(&path).unwrap();
    object["spec"]["finalizers"] = json!([]);
    let finalize = format!("{path}/finalize");
    let how = ("PUT", "application/json");
    let done = cluster.server.ask_as("admin", how, &finalize, &object);
    done.unwrap();
    eventually("the namespace is gone", TIMEOUT, || {
        ensure!(cluster.server.get(&path).is_err(), "it is there");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn a_pod_whose_namespace_is_gone_before_it_is_served_until_it_goes_too() {
    let cluster = Cluster::shared();
    label_namespace(&cluster, &cluster.namespace, &ambient());
    let pod = cluster.pod("web", None);
    let outsider = outsider(&cluster);
    let _app = App::start(&pod.netns, PORT).unwrap();
    until_in(&cluster, &pod, Reason::LabelOnNamespace);
    delete_namespace(&cluster);
    eventually("its namespace is heard to be gone", TIMEOUT, || {
        let known = cluster.node.explain(&pod.spec)?;
        ensure!(known.reason() == Reason::NamespaceUnknown, "{known:?}");
        anyhow::Ok(())
    })
    .unwrap();
    assert_eq!(taken(&cluster, &outsider, &pod), CAPTURED);
    cluster.server.delete(&cluster.path("web")).unwrap();
    until_forgotten(&cluster, &pod);
}

#[test]
fn a_deletion_that_was_asked_for_withdraws_nothing_and_changes_of_the_pod_are_followed_on() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", Some("ambient"));
    let outsider = outsider(&cluster);
    let _app = App::start(&pod.netns, PORT).unwrap();
    let gracefully =
        json!({"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 600});
    let how = ("DELETE", "application/json");
    let path = cluster.path("web");
    let asked = cluster.server.ask_as("admin", how, &path, &gracefully);
    assert!(
        asked
            .unwrap()
            .pointer("/metadata/deletionTimestamp")
            .is_some()
    );
    annotate(
        &cluster,
        "web",
        &json!({"ambient.istio.io/dns-capture": "true"}),
    );
    // The deletion came with this change or before.
    eventually("the change is applied", TIMEOUT, || {
        ensure!(pod.ruleset()?.contains("15053"), "not yet");
        anyhow::Ok(())
    })
    .unwrap();
    until_in(&cluster, &pod, Reason::LabelOnPod);
    assert_eq!(taken(&cluster, &outsider, &pod), CAPTURED);
}

#[test]
fn pods_that_are_gone_when_pod_events_comes_back_are_forgotten_and_others_stay() {
    let cluster = Cluster::shared();
    let gone = cluster.pod("gone", Some("ambient"));
    let stays = cluster.pod("stays", Some("ambient"));
    until_in(&cluster, &stays, Reason::LabelOnPod);
    cluster.node.stop("pod-events", Signal::SIGKILL).unwrap();
    cluster.server.delete(&cluster.path("gone")).unwrap();
    cluster.node.start("pod-events").unwrap();
    cluster.until_served();
    until_forgotten(&cluster, &gone);
    until_in(&cluster, &stays, Reason::LabelOnPod);
    assert_eq!(served(&cluster), [stays.spec.uid]);
}
