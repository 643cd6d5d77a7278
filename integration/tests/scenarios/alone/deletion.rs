//! A deletion in the way of containerd, which sets `lo` down before it calls DEL.

use anyhow::{Context as _, ensure};
use integration::{Node, Spec, TIMEOUT, eventually};

use crate::common::asking::{number, scrape};

/// Takes less time than a netns may lack the routes of `lo` without a report.
#[test]
fn a_deletion_that_first_sets_lo_down_is_no_drift() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("web").ambient()).unwrap();
    let other = node.pod(Spec::new("other").ambient()).unwrap();
    node.until_whole(&pod.spec).unwrap();
    let series = |service: &str, name: &str| -> anyhow::Result<f64> {
        number(&scrape(&node, service)?, name).context("no such series")
    };
    let reads = || series("netconfig", "inpod_netconfig_drift_reads_total");
    let drift = || {
        let kind = "inpod_pod_events_drift_total{kind=\"changed\"}";
        series("pod-events", kind)
    };
    let before = reads().unwrap();
    pod.exec(&["ip", "link", "set", "lo", "down"]).unwrap();
    eventually("its netns is read", TIMEOUT, || {
        ensure!(reads()? > before);
        anyhow::Ok(())
    })
    .unwrap();
    // The report of this change follows the report of the other one.
    other.exec(&["ip", "rule", "del", "pref", "500"]).unwrap();
    eventually("a change of another pod is repaired", TIMEOUT, || {
        ensure!(drift()? > 0.0);
        anyhow::Ok(())
    })
    .unwrap();
    let known = node.explain(&pod.spec).unwrap();
    let differences = known.rules.unwrap().differences;
    assert!(!differences.is_empty(), "the kernel dropped no route");
    let is_repair = |event: &str| event.starts_with("repaired");
    let mut entries = known.timeline.iter();
    assert!(
        !entries.any(|it| is_repair(&it.event)),
        "{:?}",
        known.timeline
    );
    node.del(&pod).unwrap();
    assert!((drift().unwrap() - 1.0).abs() < f64::EPSILON);
}
