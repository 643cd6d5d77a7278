//! The cases of stock ztunnel's own state tests. In place of a proxy, these tests use a name.

use std::fs::File;

use super::*;

type Named = Pods<&'static str>;

/// Two files that stand for network namespaces, because only the identity matters.
const ONE: &str = "/dev/null";
const OTHER: &str = "/dev/zero";

fn workload(uid: &str, netns: &str) -> Workload {
    let file = File::open(netns).expect("a file that every system has");
    Workload {
        uid: uid.to_owned(),
        info: WorkloadInfo {
            name: format!("name of {uid}"),
            namespace: "default".to_owned(),
            service_account: "default".to_owned(),
        },
        netns: Netns::new(file.into()).expect("metadata"),
    }
}

const START: Admission<&str> = Admission::Start { replaced: None };

/// Adds a pod whose proxy starts.
fn add(pods: &mut Named, uid: &str, netns: &str, proxy: &'static str) {
    let workload = workload(uid, netns);
    if let Admission::Start { .. } = pods.add(&workload) {
        pods.started(workload, proxy);
    }
}

/// Adds a pod whose proxy does not start.
fn fail(pods: &mut Named, uid: &str, netns: &str) {
    let workload = workload(uid, netns);
    assert_eq!(pods.add(&workload), START);
    pods.failed(workload);
}

fn phases(pods: &Named) -> Vec<(String, Phase)> {
    let states = pods.states().into_iter();
    states.map(|pod| (pod.uid, pod.state)).collect()
}

fn running(uid: &str) -> (String, Phase) {
    (uid.to_owned(), Phase::Running)
}

fn pending(uid: &str) -> (String, Phase) {
    (uid.to_owned(), Phase::Pending)
}

#[test]
fn an_added_pod_is_started() {
    let mut pods = Named::new(Fault::None);
    assert_eq!(pods.add(&workload("a", ONE)), START);
    pods.started(workload("a", ONE), "first");
    assert_eq!(phases(&pods), [running("a")]);
}

#[test]
fn a_pod_that_is_added_twice_is_started_once() {
    let mut pods = Named::new(Fault::None);
    add(&mut pods, "a", ONE, "first");
    assert_eq!(pods.add(&workload("a", ONE)), Admission::Running);
}

#[test]
fn a_changed_info_in_the_same_netns_is_ignored() {
    let mut pods = Named::new(Fault::None);
    add(&mut pods, "a", ONE, "first");
    let mut renamed = workload("a", ONE);
    "renamed".clone_into(&mut renamed.info.name);
    assert_eq!(pods.add(&renamed), Admission::Running);
    assert_eq!(pods.states()[0].name, "name of a");
}

#[test]
fn a_pod_that_cannot_be_started_is_pending_and_starts_with_a_later_add() {
    let mut pods = Named::new(Fault::None);
    fail(&mut pods, "a", ONE);
    assert_eq!(phases(&pods), [pending("a")]);
    fail(&mut pods, "a", ONE);
    assert_eq!(phases(&pods), [pending("a")]);
    add(&mut pods, "a", ONE, "first");
    assert_eq!(phases(&pods), [running("a")]);
    assert!(!pods.has_pending());
}

#[test]
fn a_pending_pod_that_is_added_with_another_netns_is_replaced() {
    let mut pods = Named::new(Fault::None);
    fail(&mut pods, "a", ONE);
    add(&mut pods, "a", OTHER, "other");
    assert_eq!(phases(&pods), [running("a")]);
    assert_eq!(pods.states()[0].netns, workload("a", OTHER).netns.id());
}

#[test]
fn a_pending_pod_that_is_deleted_is_gone() {
    let mut pods = Named::new(Fault::None);
    fail(&mut pods, "a", ONE);
    assert_eq!(pods.del("a"), None);
    assert!(phases(&pods).is_empty());
    assert!(pods.pending().is_empty());
}

#[test]
fn a_pod_that_is_retried_and_starts_is_no_longer_pending() {
    let mut pods = Named::new(Fault::None);
    fail(&mut pods, "a", ONE);
    for workload in pods.pending() {
        pods.started(workload, "first");
    }
    assert_eq!(phases(&pods), [running("a")]);
}

#[test]
fn a_deleted_pod_can_be_added_again() {
    let mut pods = Named::new(Fault::None);
    pods.complete_snapshot();
    add(&mut pods, "a", ONE, "first");
    assert_eq!(pods.del("a"), Some("first"));
    assert_eq!(pods.add(&workload("a", ONE)), START);
}

#[test]
fn a_del_of_an_unknown_pod_does_nothing() {
    let mut pods = Named::new(Fault::None);
    assert_eq!(pods.del("a"), None);
    pods.complete_snapshot();
    assert_eq!(pods.del("a"), None);
}

#[test]
fn another_netns_replaces_the_proxy() {
    let mut pods = Named::new(Fault::None);
    add(&mut pods, "a", ONE, "first");
    let replaced = Some("first");
    let moved = workload("a", OTHER);
    assert_eq!(pods.add(&moved), Admission::Start { replaced });
    pods.started(moved, "second");
    assert_eq!(pods.add(&workload("a", OTHER)), Admission::Running);
}

#[test]
fn a_pod_whose_new_netns_fails_has_lost_the_old_one() {
    let mut pods = Named::new(Fault::None);
    add(&mut pods, "a", ONE, "first");
    let moved = workload("a", OTHER);
    pods.add(&moved);
    pods.failed(moved);
    assert_eq!(phases(&pods), [pending("a")]);
}

#[test]
fn two_pods_in_one_netns_both_run() {
    let mut pods = Named::new(Fault::None);
    add(&mut pods, "a", ONE, "first");
    assert_eq!(pods.add(&workload("b", ONE)), START);
}

#[test]
fn a_del_before_the_snapshot_stops_the_pod_only_with_the_snapshot() {
    let mut pods = Named::new(Fault::None);
    add(&mut pods, "a", ONE, "first");
    fail(&mut pods, "b", ONE);
    assert_eq!(pods.del("a"), None);
    assert_eq!(pods.del("b"), None);
    assert_eq!(phases(&pods), [running("a")]);
    assert_eq!(pods.complete_snapshot(), ["first"]);
    assert!(phases(&pods).is_empty());
}

#[test]
fn a_reconnect_keeps_what_runs_and_forgets_the_rest() {
    let mut pods = Named::new(Fault::None);
    add(&mut pods, "a", ONE, "first");
    fail(&mut pods, "b", ONE);
    pods.complete_snapshot();
    pods.reconnected();
    assert_eq!(phases(&pods), [running("a")]);
    assert!(!pods.snapshot_complete());
}

#[test]
fn a_pod_that_is_added_or_kept_survives_a_new_snapshot() {
    let mut pods = Named::new(Fault::None);
    add(&mut pods, "a", ONE, "first");
    add(&mut pods, "b", OTHER, "second");
    pods.complete_snapshot();
    pods.reconnected();
    assert_eq!(pods.add(&workload("a", ONE)), Admission::Running);
    pods.keep("b");
    assert!(pods.complete_snapshot().is_empty());
    assert_eq!(phases(&pods), [running("a"), running("b")]);
}

#[test]
fn a_pod_that_a_new_snapshot_does_not_name_is_stopped() {
    let mut pods = Named::new(Fault::None);
    add(&mut pods, "a", ONE, "first");
    add(&mut pods, "b", OTHER, "second");
    pods.complete_snapshot();
    pods.reconnected();
    pods.keep("a");
    assert_eq!(pods.complete_snapshot(), ["second"]);
    assert_eq!(phases(&pods), [running("a")]);
}

#[test]
fn a_keep_of_an_unknown_pod_starts_nothing() {
    let mut pods = Named::new(Fault::None);
    pods.keep("a");
    assert!(pods.complete_snapshot().is_empty());
    assert!(phases(&pods).is_empty());
}

#[test]
fn pods_added_after_the_snapshot_run_on_until_a_new_one_leaves_them_out() {
    let mut pods = Named::new(Fault::None);
    assert!(pods.complete_snapshot().is_empty());
    add(&mut pods, "a", ONE, "first");
    assert_eq!(phases(&pods), [running("a")]);
    pods.reconnected();
    assert_eq!(pods.complete_snapshot(), ["first"]);
}
