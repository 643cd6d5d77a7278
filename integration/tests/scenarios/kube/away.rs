//! The API server hangs, is gone, refuses, or never existed: what continues, what waits, and what is caught up.

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use crate::common::cluster::{Cluster, refused};
use anyhow::ensure;
use inpod_proto::{
    podevents::v1::PodState,
    types::v1::{Enrollment, Reason},
};
use integration::{Act, Call, Pod, Spec, TIMEOUT, Verb, bin, eventually};
use nix::sys::signal::Signal;
use serde_json::json;

const NOTHING: Vec<String> = Vec::new();

/// The server's own message.
const REFUSAL: &str = "the test answers 403";

const SOME_UID: &str = "00000000-1111-2222-3333-444444444444";

/// Waits until the agent knows that the namespace has pods in the mesh.
fn with_an_enrolled_namespace(cluster: &Cluster) -> Pod {
    cluster.make_namespace(&bank(cluster), &json!({}));
    let pod = cluster.pod("known", Some("ambient"));
    cluster.node.until_whole(&pod.spec).unwrap();
    cluster.until_namespace_is_listed(&cluster.namespace);
    pod
}

/// The name of a namespace that has no pod in the mesh.
fn bank(cluster: &Cluster) -> String {
    format!("{}-bank", cluster.namespace)
}

fn in_bank(cluster: &Cluster, name: &str, uid: &str) -> Pod {
    let spec = Spec {
        namespace: bank(cluster),
        uid: uid.to_owned(),
        ..Spec::new(name)
    };
    cluster.node.sandbox(spec).unwrap()
}

/// Without the server, unknown pods are admitted or refused by their namespaces.
fn unknown_pods_follow_their_namespaces(cluster: &Cluster, seconds: u64) -> Pod {
    let waits = cluster.sandbox("waits", SOME_UID);
    let outcome = cluster.add_within(&waits, seconds);
    refused(&outcome, 11, &["SOURCE_UNAVAILABLE", "API server"]);
    assert_eq!(waits.traces().unwrap(), NOTHING);

    let passes = in_bank(cluster, "passes", SOME_UID);
    let outcome = cluster.add_within(&passes, seconds);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let known = cluster.node.explain(&passes.spec).unwrap();
    assert_eq!(known.desired(), Enrollment::Unknown);
    assert_eq!(known.reason(), Reason::SourceUnavailable);
    assert_eq!(known.sandbox.unwrap().container_id, passes.container_id);
    let mut reported = known.timeline.iter().map(|entry| &entry.event);
    assert!(
        reported.any(|event| event.contains("admitted unenrolled") && event.contains("API server")),
        "{:?}",
        known.timeline
    );
    let sandbox = inpod_proto::types::v1::SandboxRef {
        network_name: "podnet".to_owned(),
        container_id: passes.container_id.clone(),
        ifname: "eth0".to_owned(),
    };
    let checked = cluster.node.api().check(sandbox).unwrap();
    assert_eq!(checked.enrollment(), Enrollment::None);
    passes
}

/// Pods from the watch need no request, which nobody would answer.
fn known_pods_are_served(cluster: &Cluster, known: &Pod, late: &Pod) {
    cluster.node.until_whole(&known.spec).unwrap();
    cluster.node.add(late).unwrap();
    cluster.node.until_whole(&late.spec).unwrap();
    cluster.node.del(late).unwrap();
}

/// Waits until the watch shows the pod, without adding it.
fn shown(cluster: &Cluster, name: &str) -> Pod {
    let uid = cluster.create(&cluster.object(name, Some("ambient")));
    cluster.until_shown(name);
    cluster.sandbox(name, &uid)
}

// scenario: 3
#[test]
fn while_the_api_server_hangs_known_pods_are_served_and_others_follow_their_namespace() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let known = with_an_enrolled_namespace(&cluster);
    let late = shown(&cluster, "late");
    proxy.hang();
    known_pods_are_served(&cluster, &known, &late);
    let passes = unknown_pods_follow_their_namespaces(&cluster, 9);
    cluster.node.del(&passes).unwrap();
    assert!(cluster.node.explain(&passes.spec).is_err());
    proxy.heal();
    cluster.until_pods(true);
    cluster.node.until_whole(&known.spec).unwrap();
}

// scenario: 3
#[test]
fn while_the_api_server_is_gone_known_pods_are_served_and_others_follow_their_namespace() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let known = with_an_enrolled_namespace(&cluster);
    let late = shown(&cluster, "late");
    proxy.go_away();
    let why = cluster.until_pods(false);
    assert!(why.contains("cannot watch"), "{why}");
    known_pods_are_served(&cluster, &known, &late);
    unknown_pods_follow_their_namespaces(&cluster, 30);
    proxy.come_back();
    cluster.until_pods(true);
    cluster.node.until_whole(&known.spec).unwrap();
    cluster.pod("after", Some("ambient"));
}

// scenario: 3
#[test]
fn a_pod_that_was_admitted_unenrolled_is_enrolled_when_the_api_server_says_that_it_is_wanted() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    with_an_enrolled_namespace(&cluster);
    // Created while no changes arrive.
    cluster.node.stop("pod-events", Signal::SIGKILL).unwrap();
    let mut object = cluster.object("web", Some("ambient"));
    *object.pointer_mut("/metadata/namespace").unwrap() = bank(&cluster).into();
    let uid = cluster.create(&object);
    proxy.go_away();
    cluster.node.start("pod-events").unwrap();
    cluster.until_served();
    let pod = in_bank(&cluster, "web", &uid);
    assert_eq!(cluster.add_within(&pod, 30).code, 0);
    // It survives a restart as well.
    cluster.node.stop("pod-events", Signal::SIGKILL).unwrap();
    cluster.node.start("pod-events").unwrap();
    cluster.until_served();
    let known = cluster.node.explain(&pod.spec).unwrap();
    assert_eq!(known.reason(), Reason::SourceUnavailable);
    assert_eq!(pod.traces().unwrap(), NOTHING);
    proxy.come_back();
    let known = cluster.node.until_whole(&pod.spec).unwrap();
    assert_eq!(served_as(&cluster, "web"), [(uid, "sa-web".to_owned())]);
    assert_eq!(known.last_failure, None);
}

/// Returns UID and service account under which ztunnel serves pods with a name.
fn served_as(cluster: &Cluster, name: &str) -> Vec<(String, String)> {
    let workloads = cluster.node.api().workloads().unwrap().workloads;
    let served = workloads.into_iter().filter_map(|status| {
        let workload = status.workload?;
        let info = workload.info.filter(|info| info.name == name)?;
        Some((workload.uid, info.service_account))
    });
    served.collect()
}

// scenario: 3
#[test]
fn a_namespace_says_itself_what_becomes_of_its_pods_while_nobody_answers() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let shut = format!("{}-shut", cluster.namespace);
    cluster.make_namespace(&shut, &json!({"inpod.io/on-unknown": "closed"}));
    let pod = cluster.pod("known", Some("ambient"));
    let path = format!("/api/v1/namespaces/{}", cluster.namespace);
    cluster.until_namespace_is_listed(&cluster.namespace);
    cluster.until_namespace_is_listed(&shut);
    let open = json!({"metadata": {"annotations": {"inpod.io/on-unknown": "open"}}});
    cluster.server.patch(&path, &open).unwrap();
    eventually("the list follows", TIMEOUT, || {
        let list = fs::read_to_string(cluster.node.state_dir().join("enrolled-namespaces"))?;
        let listed = |name: &str| list.lines().any(|line| line == name);
        ensure!(listed(&shut) && !listed(&cluster.namespace), "{list}");
        anyhow::Ok(())
    })
    .unwrap();
    proxy.go_away();
    let passes = cluster.sandbox("passes", SOME_UID);
    assert_eq!(cluster.add_within(&passes, 30).code, 0);
    let spec = Spec {
        namespace: shut,
        ..Spec::new("waits")
    };
    let waits = cluster.node.sandbox(spec).unwrap();
    refused(&cluster.add_within(&waits, 30), 11, &["SOURCE_UNAVAILABLE"]);
    cluster.node.until_whole(&pod.spec).unwrap();
}

#[test]
fn pod_events_starts_without_an_api_server_and_all_is_well_when_it_comes() {
    let (cluster, proxy) = Cluster::behind_proxy();
    let uid = cluster.create(&cluster.object("web", Some("ambient")));
    proxy.go_away();
    cluster.node.start_all().unwrap();
    assert!(cluster.until_pods(false).contains("does not answer"));
    // Another agent's pods may run: ztunnel must get no snapshot that would cut them.
    assert!(!cluster.node.api().workloads().unwrap().seeded);
    // The enrolled namespaces were never known.
    let pod = cluster.sandbox("web", &uid);
    refused(&cluster.add_within(&pod, 30), 11, &["SOURCE_UNAVAILABLE"]);
    let del = cluster.node.call(Call::del, &pod).run().unwrap();
    assert_eq!((del.code, del.stdout.as_str()), (0, ""), "{del:?}");
    proxy.come_back();
    cluster.until_pods(true);
    cluster.node.add(&pod).unwrap();
    cluster.node.until_whole(&pod.spec).unwrap();
}

// scenario: 50
#[test]
fn a_restart_while_the_api_server_is_away_withdraws_nothing() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let known = with_an_enrolled_namespace(&cluster);
    let ends = cluster.pod("ends", Some("ambient"));
    proxy.go_away();
    cluster.node.stop("pod-events", Signal::SIGKILL).unwrap();
    let del = cluster.node.call(Call::del, &ends).run().unwrap();
    assert_eq!(del.code, 0, "{del:?}");
    ends.unmount().unwrap();
    let rules = known.ruleset().unwrap();
    cluster.node.start("pod-events").unwrap();
    cluster.until_served();
    cluster.until_pods(false);
    let undecided = cluster.node.explain(&known.spec).unwrap();
    assert_eq!(undecided.reason(), Reason::SourceUnavailable);
    // Only the spooled end takes effect.
    eventually("the sandbox that ended is forgotten", TIMEOUT, || {
        let claims = cluster.node.api().claims()?;
        ensure!(claims.len() == 1, "{claims:?}");
        anyhow::Ok(())
    })
    .unwrap();
    let began = Instant::now();
    eventually("the time of a pod that is gone is over", TIMEOUT, || {
        cluster.node.until_whole(&known.spec)?;
        ensure!(began.elapsed() > Duration::from_secs(3), "too early");
        anyhow::Ok(())
    })
    .unwrap();
    assert_eq!(known.ruleset().unwrap(), rules);
    cluster.until_namespace_is_listed(&cluster.namespace);
    proxy.come_back();
    cluster.until_pods(true);
    cluster.node.until_whole(&known.spec).unwrap();
}

#[test]
fn a_refusal_of_the_api_server_is_reported_with_verb_and_resource_and_passes_with_its_cause() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let known = with_an_enrolled_namespace(&cluster);
    proxy.fault(Verb::Any, "*", usize::MAX, Act::Refuse(403, None));
    cluster.node.stop("pod-events", Signal::SIGKILL).unwrap();
    cluster.node.start("pod-events").unwrap();
    cluster.until_served();
    cluster.until_message(&["cannot watch pods", "403", REFUSAL]);
    let waits = cluster.sandbox("waits", SOME_UID);
    let outcome = cluster.add_within(&waits, 30);
    refused(&outcome, 11, &["SOURCE_UNAVAILABLE", "403", REFUSAL]);
    proxy.heal();
    cluster.until_pods(true);
    cluster.node.until_whole(&known.spec).unwrap();
    let outcome = cluster.add_within(&waits, 30);
    refused(&outcome, 100, &["POD_UNKNOWN"]);
}

#[test]
fn a_pod_admitted_unenrolled_that_names_no_uid_is_enrolled_as_the_pod_that_shows() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    with_an_enrolled_namespace(&cluster);
    proxy.hang();
    let pod = in_bank(&cluster, "web", SOME_UID);
    let call = cluster.add_as(&pod, "").timeout_seconds(9);
    assert_eq!(call.run().unwrap().code, 0);
    proxy.heal();
    let mut object = cluster.object("web", Some("ambient"));
    *object.pointer_mut("/metadata/namespace").unwrap() = bank(&cluster).into();
    let uid = cluster.create(&object);
    let known = cluster.node.until_whole(&pod.spec).unwrap();
    assert_eq!(known.pod.unwrap().uid, uid);
    assert_eq!(served_as(&cluster, "web"), [(uid, "sa-web".to_owned())]);
    cluster.node.del(&pod).unwrap();
    cluster
        .node
        .until(&pod.spec, PodState::Out, TIMEOUT)
        .unwrap();
}

#[test]
fn a_kubeconfig_that_is_missing_or_malformed_ends_the_start_with_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let start = |kubeconfig: &str| {
        let output = Command::new(bin("pod-events").unwrap())
            .args(["--node-name=n", "--peer=uid", "--pods-from=kubernetes"])
            .arg(format!("--run-dir={}", dir.path().display()))
            .arg(format!("--kubeconfig={kubeconfig}"))
            .env_clear()
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    let missing = dir.path().join("missing").display().to_string();
    let malformed = dir.path().join("malformed").display().to_string();
    fs::write(&malformed, "clusters: [").unwrap();
    let empty = dir.path().join("empty").display().to_string();
    fs::write(&empty, "{}").unwrap();
    for path in [missing, malformed, empty] {
        let said = start(&path);
        assert!(
            said.contains("setting kubeconfig") && said.contains(&path),
            "{said}"
        );
    }
    let said = start("");
    assert!(
        said.contains("service account") && said.contains("setting kubeconfig"),
        "{said}"
    );
}
