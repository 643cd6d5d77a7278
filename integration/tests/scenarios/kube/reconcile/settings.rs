//! Membership by the node's settings, with real namespaces.

use integration::App;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::*;

fn start_with(cluster: &Cluster, setting: &[&str]) {
    cluster.node.start("netconfig").unwrap();
    cluster.node.start("ztunnel-broker").unwrap();
    restart_with(cluster, setting);
    cluster.node.start_ztunnel(&[]).unwrap();
    cluster.until_served();
}

fn restart_with(cluster: &Cluster, setting: &[&str]) {
    let settings = [&["--peer", "uid"], setting].concat();
    cluster.node.start_with("pod-events", &settings).unwrap();
}

#[test]
fn the_pods_of_a_namespace_that_is_excluded_after_a_restart_leave_and_new_ones_stay_out() {
    let cluster = Cluster::shared();
    let bank = format!("{}-bank", cluster.namespace);
    cluster.make_namespace(&bank, &json!({}));
    label_namespace(&cluster, &cluster.namespace, &ambient());
    let by_namespace = cluster.pod("by-namespace", None);
    let by_label = cluster.pod("by-label", Some("ambient"));
    let other = beside(&cluster, &bank, "other", Some("ambient"));
    cluster.node.add(&other).unwrap();
    let outsider = outsider(&cluster);
    let _apps = [&by_label, &other].map(|pod| App::start(&pod.netns, PORT).unwrap());
    for pod in [&by_namespace, &by_label, &other] {
        cluster.node.until_whole(&pod.spec).unwrap();
    }
    cluster.node.stop("pod-events", Signal::SIGTERM).unwrap();
    restart_with(&cluster, &["--exclude-namespaces", &cluster.namespace]);
    cluster.until_served();
    for pod in [&by_namespace, &by_label] {
        until_out(&cluster, pod, Reason::NamespaceExcluded);
    }
    assert_eq!(taken(&cluster, &outsider, &by_label), [0; 0]);
    assert_eq!(taken(&cluster, &outsider, &other), CAPTURED);
    let late = cluster.pod("late", Some("ambient"));
    until_out(&cluster, &late, Reason::NamespaceExcluded);
    // Deletions are followed as in any namespace.
    cluster.server.delete(&cluster.path("by-label")).unwrap();
    eventually("it is forgotten", TIMEOUT, || {
        let known = cluster.node.explain(&by_label.spec);
        ensure!(known.is_err(), "{known:?}");
        anyhow::Ok(())
    })
    .unwrap();
    assert_eq!(served(&cluster), [other.spec.uid]);
}

#[test]
fn a_namespace_that_is_excluded_no_more_has_its_pods_back_in_the_mesh() {
    let cluster = Cluster::waiting();
    start_with(&cluster, &["--exclude-namespaces", &cluster.namespace]);
    let pod = cluster.pod("web", Some("ambient"));
    until_out(&cluster, &pod, Reason::NamespaceExcluded);
    cluster.node.stop("pod-events", Signal::SIGTERM).unwrap();
    cluster.node.start("pod-events").unwrap();
    cluster.until_served();
    // Neither ADD nor discovery: the checkpoint had the sandbox.
    until_in(&cluster, &pod, Reason::LabelOnPod);
}

/// Returns a team's namespaces except pods that opt out, and pods that opt in.
fn selectors(team: &str) -> String {
    let by_namespace = json!({
        "podSelector": {"matchExpressions": [{"key": "mesh", "operator": "NotIn", "values": ["no"]}]},
        "namespaceSelector": {"matchLabels": {"team": team}},
    });
    let by_edge = json!({"namespaceSelector": {"matchLabels": {"edge": team}}});
    let by_pod = json!({"podSelector": {"matchLabels": {"mesh": "yes"}}});
    json!([by_namespace, by_edge, by_pod]).to_string()
}

#[test]
fn selectors_of_the_settings_decide_over_real_namespaces_and_pods_and_istios_label_does_not() {
    let cluster = Cluster::waiting();
    let team = cluster.namespace.clone();
    start_with(&cluster, &["--enablement-selectors", &selectors(&team)]);
    let mesh = |name: &str, value: &Value| {
        let change = json!({"metadata": {"labels": {"mesh": value}}});
        cluster.server.patch(&cluster.path(name), &change).unwrap();
    };
    let web = cluster.pod("web", None);
    let labelled = cluster.pod("labelled", Some("ambient"));
    let unwilling = cluster.pod("unwilling", None);
    mesh("unwilling", &json!("no"));
    for pod in [&web, &labelled, &unwilling] {
        until_out(&cluster, pod, Reason::NotSelected);
    }
    label_namespace(&cluster, &cluster.namespace, &json!({"team": team}));
    for pod in [&web, &labelled] {
        until_in(&cluster, pod, Reason::LabelOnNamespace);
    }
    until_out(&cluster, &unwilling, Reason::NotSelected);
    mesh("unwilling", &json!("yes"));
    until_in(&cluster, &unwilling, Reason::LabelOnNamespace);
    label_namespace(&cluster, &cluster.namespace, &json!({"team": null}));
    for pod in [&web, &labelled] {
        until_out(&cluster, pod, Reason::NotSelected);
    }
    until_in(&cluster, &unwilling, Reason::LabelOnPod);
}

#[test]
fn a_namespace_that_moves_from_one_selector_to_another_takes_in_whom_the_second_one_means() {
    let cluster = Cluster::waiting();
    let team = cluster.namespace.clone();
    start_with(&cluster, &["--enablement-selectors", &selectors(&team)]);
    label_namespace(&cluster, &cluster.namespace, &json!({"team": team}));
    let web = cluster.pod("web", None);
    let mut object = cluster.object("unwilling", None);
    object["metadata"]["labels"] = json!({"mesh": "no"});
    let unwilling = cluster.sandbox("unwilling", &cluster.create(&object));
    cluster.node.add(&unwilling).unwrap();
    let outsider = outsider(&cluster);
    let _app = App::start(&web.netns, PORT).unwrap();
    until_in(&cluster, &web, Reason::LabelOnNamespace);
    until_out(&cluster, &unwilling, Reason::NotSelected);
    let before = web.ruleset().unwrap();
    // Selected before and after: an opted-out pod is not, and then is.
    let moved = json!({"team": null, "edge": team});
    label_namespace(&cluster, &cluster.namespace, &moved);
    until_in(&cluster, &unwilling, Reason::LabelOnNamespace);
    let known = until_in(&cluster, &web, Reason::LabelOnNamespace);
    assert_eq!(web.ruleset().unwrap(), before, "{:?}", known.timeline);
    assert_eq!(taken(&cluster, &outsider, &web), CAPTURED);
}
