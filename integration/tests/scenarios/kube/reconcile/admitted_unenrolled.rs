//! Operators and metrics show pods that were admitted unenrolled until their membership is known.

use inpod_proto::podevents::v1::{ListPodsRequest, PodSummary};
use integration::{Act, ApiProxy, Cut, Verb, number};
use nix::sys::signal::Signal;

use super::*;

const METRIC: &str = "inpod_pod_events_pods_let_through";

fn listed(cluster: &Cluster) -> Vec<PodSummary> {
    let filter = ListPodsRequest {
        let_through: true,
        ..ListPodsRequest::default()
    };
    cluster.node.api().list(filter).unwrap()
}

fn counted(cluster: &Cluster) -> f64 {
    let socket = inpod_service::socket(&cluster.node.run_dir(), "pod-events");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let text = runtime
        .block_on(inpod_service::metrics::fetch(&socket))
        .unwrap();
    assert!(text.contains(METRIC), "{text}");
    number(&text, METRIC)
}

fn until_none(cluster: &Cluster) {
    eventually("nobody is let through any more", TIMEOUT, || {
        let all = listed(cluster);
        ensure!(all.is_empty(), "{all:?}");
        let count = counted(cluster);
        ensure!(count == 0.0, "{count} are counted");
        anyhow::Ok(())
    })
    .unwrap();
}

/// The API server does not answer; these pods were admitted unenrolled.
fn admitted_unenrolled(pods: &[(&str, Option<&str>)]) -> (Cluster, ApiProxy, Vec<Pod>) {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    proxy.fault(Verb::Any, "*", usize::MAX, Act::Refuse(500, None));
    proxy.cut(Cut::Broken);
    cluster.until_pods(false);
    let admit = |(name, mode): &(&str, Option<&str>)| {
        let uid = cluster.create(&cluster.object(name, *mode));
        let pod = cluster.sandbox(name, &uid);
        let outcome = cluster.add_within(&pod, 9);
        assert_eq!(outcome.code, 0, "{outcome:?}");
        pod
    };
    let pods = pods.iter().map(admit).collect();
    (cluster, proxy, pods)
}

// scenario: 3
#[test]
fn pods_that_were_admitted_unenrolled_are_listed_and_counted_until_they_are_in_the_mesh() {
    let (cluster, proxy, pods) =
        admitted_unenrolled(&[("a", Some("ambient")), ("b", Some("ambient"))]);
    let mut names: Vec<_> = listed(&cluster)
        .into_iter()
        .map(|it| it.pod.unwrap().name)
        .collect();
    names.sort();
    assert_eq!(names, ["a", "b"]);
    assert!(listed(&cluster).iter().all(|pod| pod.let_through));
    assert!((counted(&cluster) - 2.0).abs() < f64::EPSILON);
    proxy.heal();
    for pod in &pods {
        until_in(&cluster, pod, Reason::LabelOnPod);
    }
    until_none(&cluster);
}

// scenario: 3
#[test]
fn a_pod_that_was_rightly_admitted_unenrolled_is_listed_no_more_and_stays_outside() {
    let (cluster, proxy, pods) = admitted_unenrolled(&[("plain", None)]);
    assert_eq!(listed(&cluster).len(), 1);
    proxy.heal();
    until_none(&cluster);
    until_out(&cluster, &pods[0], Reason::NotSelected);
}

// scenario: 3
#[test]
fn pods_that_were_admitted_unenrolled_are_known_after_a_restart_and_forgotten_with_the_pod() {
    let (cluster, proxy, pods) =
        admitted_unenrolled(&[("a", Some("ambient")), ("b", Some("ambient"))]);
    cluster.node.stop("pod-events", Signal::SIGKILL).unwrap();
    cluster.node.start("pod-events").unwrap();
    eventually("it serves", TIMEOUT, || cluster.node.api().status()).unwrap();
    let all = listed(&cluster);
    assert_eq!(all.len(), 2, "{all:?}");
    let [first, second] = &*pods else {
        panic!("two pods")
    };
    cluster.node.del(first).unwrap();
    let all = listed(&cluster);
    assert_eq!(all.len(), 1, "{all:?}");
    let left = all[0].pod.clone().unwrap();
    assert_eq!(left.name, second.spec.name);
    proxy.heal();
    until_in(&cluster, second, Reason::LabelOnPod);
    until_none(&cluster);
}

// scenario: 3
#[test]
fn a_pod_that_is_admitted_unenrolled_is_listed_as_unhealthy_and_a_healthy_one_is_not() {
    let (cluster, proxy, _pods) = admitted_unenrolled(&[("a", Some("ambient"))]);
    let amiss = || {
        let filter = ListPodsRequest {
            amiss: true,
            ..ListPodsRequest::default()
        };
        cluster.node.api().list(filter).unwrap()
    };
    let names: Vec<_> = amiss().into_iter().map(|it| it.pod.unwrap().name).collect();
    assert_eq!(names, ["a"]);
    proxy.heal();
    until_none(&cluster);
    eventually("nothing is amiss", TIMEOUT, || {
        let all = amiss();
        ensure!(all.is_empty(), "{all:?}");
        anyhow::Ok(())
    })
    .unwrap();
}
