//! The set's repair after others' changes.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use netconfig::probes::ProbeSettings;

use crate::probes::{
    place::{OnNode, POD, Place, spared, within},
    set::shown,
};
use crate::support::Fresh;

const LIMIT: Duration = Duration::from_secs(20);

/// So long that whatever is repaired was noticed by the check of the table itself.
const NEVER: Duration = Duration::from_secs(3600);

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

/// Expects a single repair.
fn is_repaired(damage: &'static str, read_interval: Duration) {
    let (node, host) = filled();
    let _guard = host.start_reconciler(read_interval);
    let wanted = (everything(&node), shown(&node));
    let words: Vec<_> = damage.split(' ').collect();
    node.command("nft", &words);
    within(LIMIT, damage, || is_whole(&node, &wanted));
    within(LIMIT, damage, || {
        host.host.restores().get() > 0 && host.is_ok("probe-set")
    });
    assert_eq!(host.host.restores().get(), 1, "{damage}");
}

#[test]
fn a_probe_table_that_others_delete_or_extend_is_repaired() {
    for damage in [
        "flush ruleset",
        "delete table inet inpod-host",
        "add chain inet inpod-host theirs",
    ] {
        is_repaired(damage, NEVER);
    }
}

#[test]
fn a_complete_read_repairs_changed_rules_and_elements() {
    for damage in [
        "flush table inet inpod-host",
        "flush set inet inpod-host probes-v4",
        "delete element inet inpod-host probes-v6 { fd09::1 }",
        "flush chain inet inpod-host postrouting",
        "insert rule inet inpod-host postrouting accept",
    ] {
        is_repaired(damage, Duration::ZERO);
    }
}

/// Another process owns a table of the name, as a kernel without tables of family bridge refuses the table.
#[test]
fn a_refused_table_for_bridges_leaves_probes_exempt() {
    let place = Place::new();
    let mut nft = Command::new("nft");
    nft.arg("-i").stdin(Stdio::piped()).stdout(Stdio::null());
    let mut owner = place.node.run(move || nft.spawn()).unwrap();
    let mut input = owner.stdin.take().unwrap();
    writeln!(input, "add table bridge inpod-host {{ flags owner; }}").unwrap();
    within(LIMIT, "the table has an owner", || {
        place.node.nft("list tables").contains("inpod-host")
    });
    let host = OnNode::start(&place.node, ProbeSettings::default());
    host.set_addresses("c1", &POD);
    for to in POD {
        assert_eq!(place.probe(0, to), spared(to));
    }
    assert!(host.is_ok("probe-set"));
    drop(input);
    owner.wait().unwrap();
}

/// A test of times, which nothing may disturb.
mod alone {
    use std::time::Instant;

    use super::*;

    #[test]
    fn probes_pass_again_within_three_seconds_of_a_firewall_reload() {
        let place = Place::new();
        let host = OnNode::start(&place.node, ProbeSettings::default());
        host.set_addresses("c1", &POD);
        let _guard = host.start_reconciler(NEVER);
        for _ in 0..3 {
            assert_eq!(place.probe(0, POD[0]), spared(POD[0]));
            place.node.nft("flush ruleset");
            let flushed = Instant::now();
            assert_ne!(place.probe(0, POD[0]), spared(POD[0]));
            within(LIMIT, "probes go through", || {
                place.probe(0, POD[0]) == spared(POD[0])
            });
            let took = flushed.elapsed();
            assert!(took < Duration::from_secs(3), "{took:?}");
        }
    }
}

/// Irrelevant changes and its own cause no write.
#[test]
fn what_does_not_concern_it_is_not_written_for() {
    let (node, host) = filled();
    let _guard = host.start_reconciler(NEVER);
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
    within(LIMIT, "it is repaired", || host.host.restores().get() > 0);
    within(LIMIT, "it is well", || host.is_ok("probe-set"));
    assert_eq!(host.host.restores().get(), 1);
}

#[test]
fn a_tool_that_does_not_stop_is_told_of_and_not_fought_without_end() {
    let (node, host) = filled();
    let _guard = host.start_reconciler(NEVER);
    let mut flushes = 0;
    within(Duration::from_secs(60), "it is reported", || {
        if node.nft("list tables").contains("inpod-host") {
            node.nft("flush ruleset");
            flushes += 1;
        }
        !host.is_ok("probe-set")
    });
    let restores = host.host.restores().get();
    assert!(restores <= 6, "{restores}");
    assert!(flushes >= restores, "{flushes}");
    let reported = host.readiness.all()["probe-set"].message.clone();
    assert!(
        reported.contains("another process keeps changing it"),
        "{reported}"
    );
}
