//! The set's repair after others' changes.

use std::{sync::Arc, time::Duration};

use netconfig::probes::{ProbeSettings, ReconcilerGuard};

use crate::probes::{
    place::{OnNode, POD, Place, spared, within},
    set::shown,
};
use crate::support::Fresh;

/// A third of the time until a read by the clock: what is repaired earlier was repaired by a notification.
const LIMIT: Duration = Duration::from_secs(20);

/// Its reconciler runs; nothing else happens on the node.
fn guarded() -> (Arc<Fresh>, OnNode, ReconcilerGuard) {
    let (node, host) = filled();
    let guard = host.start_reconciler();
    (node, host, guard)
}

/// The same without a reconciler.
fn filled() -> (Arc<Fresh>, OnNode) {
    let node = Arc::new(Fresh::new());
    let host = OnNode::start(&node, ProbeSettings::default());
    host.set_addresses("c1", &POD);
    host.set_addresses("c2", &["10.9.0.8"]);
    (node, host)
}

fn everything(node: &Fresh) -> String {
    node.command("nft", &["-s", "list", "ruleset"])
}

/// The tools fail to list missing tables or sets.
fn is_whole(node: &Fresh, wanted: &(String, Vec<(String, String)>)) -> bool {
    let is_there = node.nft("list tables").contains("inpod-host");
    is_there && everything(node) == wanted.0 && shown(node) == wanted.1
}

fn is_repaired(damages: &[&[&'static str]]) {
    for damage in damages {
        repair(damage);
    }
}

/// Expects a single repair, and returns its duration. The reconciler starts after a damage of several commands, to repair
/// nothing in between.
fn repair(damage: &[&'static str]) -> Duration {
    let what = format!("after {damage:?}");
    let (node, host) = filled();
    let guard = (damage.len() == 1).then(|| host.start_reconciler());
    let wanted = (everything(&node), shown(&node));
    for command in damage {
        let words: Vec<_> = command.split(' ').collect();
        node.command(words[0], &words[1..]);
    }
    let _guard = guard.unwrap_or_else(|| host.start_reconciler());
    let took = within(LIMIT, &what, || is_whole(&node, &wanted));
    within(LIMIT, &what, || {
        host.host.restores() > 0 && host.is_ok("probe-set")
    });
    assert_eq!(host.host.restores(), 1, "{what}");
    took
}

#[test]
fn what_others_delete_from_nf_tables_is_repaired() {
    is_repaired(&[
        &["nft flush ruleset"],
        &["nft delete table inet inpod-host"],
        &["nft flush table inet inpod-host"],
        &["nft flush set inet inpod-host probes-v4"],
        &["nft delete element inet inpod-host probes-v6 { fd09::1 }"],
        &["nft flush chain inet inpod-host postrouting"],
        &["nft insert rule inet inpod-host postrouting accept"],
        &["nft add chain inet inpod-host theirs"],
    ]);
}

/// A test of times, which nothing may disturb.
mod alone {
    use super::*;

    #[test]
    fn a_flush_is_repaired_within_a_second() {
        let took = repair(&["nft flush ruleset"]);
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
}

#[test]
fn probes_go_through_again_after_a_flush() {
    let place = Place::new();
    let host = OnNode::start(&place.node, ProbeSettings::default());
    host.set_addresses("c1", &POD);
    let _guard = host.start_reconciler();
    assert_eq!(place.probe(0, POD[0]), spared(POD[0]));
    place.node.nft("flush ruleset");
    within(LIMIT, "probes go through", || {
        place.probe(0, POD[0]) == spared(POD[0])
    });
}

/// Irrelevant changes and its own cause no write.
#[test]
fn what_does_not_concern_it_is_not_written_for() {
    let (node, host, _guard) = guarded();
    // A rewritten table or rule has a new handle.
    let handles = || node.command("nft", &["-a", "-s", "list", "ruleset"]);
    let before = handles();
    for n in 0..20 {
        node.nft(&format!("add table inet theirs-{n}"));
        host.set_addresses("c3", &["10.9.0.9"]);
        host.release("c3");
        node.nft(&format!("delete table inet theirs-{n}"));
    }
    assert_eq!(handles(), before);
    // What comes last concerns it: all before that was judged.
    node.nft("flush ruleset");
    within(LIMIT, "it is repaired", || host.host.restores() > 0);
    within(LIMIT, "it is well", || host.is_ok("probe-set"));
    assert_eq!(host.host.restores(), 1);
}

#[test]
fn a_tool_that_does_not_stop_is_told_of_and_not_fought_without_end() {
    let (node, host, _guard) = guarded();
    let mut flushes = 0;
    within(Duration::from_secs(30), "it is reported", || {
        if node.nft("list tables").contains("inpod-host") {
            node.nft("flush ruleset");
            flushes += 1;
        }
        !host.is_ok("probe-set")
    });
    let restores = host.host.restores();
    assert!(restores <= 6, "{restores}");
    assert!(flushes >= restores, "{flushes}");
    let reported = host.readiness.all()["probe-set"].message.clone();
    assert!(
        reported.contains("another process keeps changing it"),
        "{reported}"
    );
}
