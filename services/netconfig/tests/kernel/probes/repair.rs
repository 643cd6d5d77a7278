//! The set's repair after others' changes.

use std::{sync::Arc, time::Duration};

use netconfig::probes::{ProbeSettings, ReconcilerGuard};

use crate::probes::{
    place::{Kind, OnNode, POD, Place, spared, within},
    set::shown,
};
use crate::support::Fresh;

/// A third of the time until a read by the clock: what is repaired earlier was repaired by a notification, but for
/// iptables-legacy and ipset, which send none and are looked at each second.
const LIMIT: Duration = Duration::from_secs(20);

/// Its reconciler runs; nothing else happens on the node.
fn guarded(kind: Kind) -> (Arc<Fresh>, OnNode, ReconcilerGuard) {
    let (node, host) = filled(kind);
    let guard = host.start_reconciler();
    (node, host, guard)
}

/// The same without a reconciler.
fn filled(kind: Kind) -> (Arc<Fresh>, OnNode) {
    let node = Arc::new(Fresh::new());
    let host = OnNode::start(&node, ProbeSettings::default(), kind);
    host.set_addresses("c1", &POD);
    host.set_addresses("c2", &["10.9.0.8"]);
    (node, host)
}

fn everything(node: &Fresh, kind: Kind) -> String {
    let saved = |program| {
        let text = node.command(program, &["-t", "nat"]);
        let lines = text.lines().filter(|line| line.starts_with("-A "));
        lines.collect::<Vec<_>>().join("\n")
    };
    match kind {
        Kind::Nft => node.command("nft", &["-s", "list", "ruleset"]),
        Kind::IptablesNft => saved("iptables-nft-save") + &saved("ip6tables-nft-save"),
        Kind::IptablesLegacy => saved("iptables-legacy-save") + &saved("ip6tables-legacy-save"),
    }
}

/// The tools fail to list missing tables or sets.
fn is_whole(node: &Fresh, kind: Kind, wanted: &(String, Vec<(String, String)>)) -> bool {
    let is_there = match kind {
        Kind::Nft => node.nft("list tables").contains("inpod-host"),
        Kind::IptablesNft | Kind::IptablesLegacy => {
            node.command("ipset", &["list", "-n"]).lines().count() == 2
        }
    };
    is_there && everything(node, kind) == wanted.0 && shown(node, kind) == wanted.1
}

fn is_repaired(kind: Kind, damages: &[&[&'static str]]) {
    for damage in damages {
        repair(kind, damage);
    }
}

/// Expects a single repair, and returns its duration. The reconciler starts after a damage of several commands, to repair
/// nothing in between.
fn repair(kind: Kind, damage: &[&'static str]) -> Duration {
    let what = format!("{kind:?} after {damage:?}");
    let (node, host) = filled(kind);
    let guard = (damage.len() == 1).then(|| host.start_reconciler());
    let wanted = (everything(&node, kind), shown(&node, kind));
    for command in damage {
        let words: Vec<_> = command.split(' ').collect();
        node.command(words[0], &words[1..]);
    }
    let _guard = guard.unwrap_or_else(|| host.start_reconciler());
    let took = within(LIMIT, &what, || is_whole(&node, kind, &wanted));
    within(LIMIT, &what, || {
        host.host.restores() > 0 && host.is_ok("probe-set")
    });
    assert_eq!(host.host.restores(), 1, "{what}");
    took
}

#[test]
fn what_others_delete_from_nf_tables_is_repaired() {
    is_repaired(
        Kind::Nft,
        &[
            &["nft flush ruleset"],
            &["nft delete table inet inpod-host"],
            &["nft flush table inet inpod-host"],
            &["nft flush set inet inpod-host probes-v4"],
            &["nft delete element inet inpod-host probes-v6 { fd09::1 }"],
            &["nft flush chain inet inpod-host postrouting"],
            &["nft insert rule inet inpod-host postrouting accept"],
            &["nft add chain inet inpod-host theirs"],
        ],
    );
}

/// A test of times, which nothing may disturb.
mod alone {
    use super::*;

    #[test]
    fn a_flush_is_repaired_within_a_second() {
        let took = repair(Kind::Nft, &["nft flush ruleset"]);
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
}

#[test]
fn what_others_delete_from_iptables_nft_and_ipset_is_repaired() {
    is_repaired(
        Kind::IptablesNft,
        &[
            &["nft flush ruleset"],
            &["iptables-nft -t nat -F"],
            &["ip6tables-nft -t nat -F POSTROUTING"],
            &["iptables-nft -t nat -F INPOD_POSTRT"],
            &["iptables-nft -t nat -D POSTROUTING -j INPOD_POSTRT"],
            &["ipset flush inpod-probes-v4"],
            &["ipset del inpod-probes-v6 fd09::1"],
            &["nft flush ruleset", "ipset destroy"],
        ],
    );
}

#[test]
fn what_others_delete_from_iptables_legacy_and_ipset_is_repaired() {
    is_repaired(
        Kind::IptablesLegacy,
        &[
            &["iptables-legacy -t nat -F"],
            &["ip6tables-legacy -t nat -F POSTROUTING"],
            &["iptables-legacy -t nat -F INPOD_POSTRT"],
            &["iptables-legacy -t nat -D POSTROUTING -j INPOD_POSTRT"],
            &["ipset flush inpod-probes-v4"],
            &[
                "iptables-legacy -t nat -F",
                "ip6tables-legacy -t nat -F",
                "ipset destroy",
            ],
        ],
    );
}

/// Another's rule would match first.
#[test]
fn the_jump_is_first_again_when_others_put_a_rule_ahead_of_it() {
    for (kind, program) in [
        (Kind::IptablesNft, "iptables-nft"),
        (Kind::IptablesLegacy, "iptables-legacy"),
    ] {
        let (node, _host, _guard) = guarded(kind);
        let rule = ["-t", "nat", "-I", "POSTROUTING", "1", "-j", "MASQUERADE"];
        node.command(program, &rule);
        within(LIMIT, "the jump is first", || {
            let text = everything(&node, kind);
            let mut rules = text.lines().filter(|line| line.contains(" POSTROUTING "));
            let first = rules.next() == Some("-A POSTROUTING -j INPOD_POSTRT");
            first && text.contains("MASQUERADE")
        });
    }
}

#[test]
fn probes_go_through_again_after_a_flush() {
    for (kind, flush) in [
        (Kind::Nft, &["nft", "flush", "ruleset"][..]),
        (Kind::IptablesNft, &["nft", "flush", "ruleset"]),
        (
            Kind::IptablesLegacy,
            &["iptables-legacy", "-t", "nat", "-F"],
        ),
    ] {
        let place = Place::new();
        let host = OnNode::start(&place.node, ProbeSettings::default(), kind);
        host.set_addresses("c1", &POD);
        let _guard = host.start_reconciler();
        assert_eq!(place.probe(0, POD[0]), spared(POD[0]));
        place.node.command(flush[0], &flush[1..]);
        within(LIMIT, "probes go through", || {
            place.probe(0, POD[0]) == spared(POD[0])
        });
    }
}

/// Irrelevant changes and its own cause no write.
#[test]
fn what_does_not_concern_it_is_not_written_for() {
    for kind in Kind::ALL {
        let (node, host, _guard) = guarded(kind);
        // A rewritten table or rule has a new handle.
        let handles = || node.command("nft", &["-a", "-s", "list", "ruleset"]);
        let before = handles();
        for n in 0..20 {
            node.nft(&format!("add table inet theirs-{n}"));
            host.set_addresses("c3", &["10.9.0.9"]);
            host.release("c3");
            node.nft(&format!("delete table inet theirs-{n}"));
        }
        assert_eq!(handles(), before, "{kind:?}");
        // What comes last concerns it: all before that was judged.
        match kind {
            Kind::Nft | Kind::IptablesNft => node.nft("flush ruleset"),
            Kind::IptablesLegacy => node.command("iptables-legacy", &["-t", "nat", "-F"]),
        };
        within(LIMIT, "it is repaired", || host.host.restores() > 0);
        within(LIMIT, "it is well", || host.is_ok("probe-set"));
        assert_eq!(host.host.restores(), 1, "{kind:?}");
    }
}

#[test]
fn a_tool_that_does_not_stop_is_told_of_and_not_fought_without_end() {
    let (node, host, _guard) = guarded(Kind::Nft);
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
