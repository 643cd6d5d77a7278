//! A node's packet filter without the probe set.

use std::sync::Arc;

use netconfig::probes::ProbeSettings;

use crate::probes::{
    place::{Kind, OnNode, POD},
    set::shown,
};
use crate::support::Fresh;

/// A foreign nat chain beside ours.
const FOREIGN: &str = "KUBE-POSTROUTING";

/// They list and change the packet filter, for both families.
fn programs(kind: Kind) -> &'static [[&'static str; 2]] {
    match kind {
        Kind::Nft => &[],
        Kind::IptablesNft => &[
            ["iptables-nft-save", "iptables-nft"],
            ["ip6tables-nft-save", "ip6tables-nft"],
        ],
        Kind::IptablesLegacy => &[
            ["iptables-legacy-save", "iptables-legacy"],
            ["ip6tables-legacy-save", "ip6tables-legacy"],
        ],
    }
}

/// Returns parts of the packet filter that others share.
fn everything(node: &Fresh, kind: Kind) -> String {
    if kind == Kind::Nft {
        return node.nft("list ruleset");
    }
    let saved = programs(kind)
        .iter()
        .map(|[save, _]| node.command(save, &["-t", "nat"]));
    let saved: String = saved.collect();
    let lines = saved.lines().filter(|line| !line.starts_with('#'));
    // Without counters, which change.
    let lines = lines.map(|line| line.split(" [").next().unwrap());
    lines.collect::<Vec<_>>().join("\n")
}

fn with_a_stranger(node: &Fresh, kind: Kind) {
    if kind == Kind::Nft {
        node.nft("add table inet stranger");
    }
    for [_, program] in programs(kind) {
        node.command(program, &["-t", "nat", "-N", FOREIGN]);
        node.command(program, &["-t", "nat", "-A", "POSTROUTING", "-j", FOREIGN]);
    }
}

#[test]
fn nothing_is_left_on_a_node_that_is_left_and_nothing_of_others_goes() {
    for kind in Kind::ALL {
        let node = Arc::new(Fresh::new());
        with_a_stranger(&node, kind);
        let before = everything(&node, kind);
        let host = OnNode::start(&node, ProbeSettings::default(), kind);
        let guard = host.start_reconciler();
        host.set_addresses("c1", &POD);
        assert_ne!(everything(&node, kind), before, "{kind:?}");
        let held = host.clear().unwrap_err();
        assert!(held.contains("2 addresses of pods"), "{held}");
        assert_eq!(shown(&node, kind).len(), 2, "{kind:?}: nothing was changed");
        host.release("c1");
        assert!(host.clear().unwrap(), "{kind:?}");
        assert_eq!(everything(&node, kind), before, "{kind:?}");
        let is_iptables = kind != Kind::Nft;
        assert!(!is_iptables || node.command("ipset", &["save"]).is_empty());
        // Nothing is left to do, and the reconciler restores nothing.
        assert!(!host.clear().unwrap(), "{kind:?}");
        drop(guard);
        assert_eq!(everything(&node, kind), before, "{kind:?}");
        // The set can be used again afterwards.
        assert!(host.set_addresses("c1", &POD), "{kind:?}");
        assert_eq!(shown(&node, kind).len(), 2, "{kind:?}");
    }
}
