//! A node's packet filter without the probe set.

use std::{sync::Arc, time::Duration};

use netconfig::probes::{ProbeMatch, ProbeSettings};

use crate::probes::{
    place::{OnNode, POD},
    set::shown,
};
use crate::support::Fresh;

fn everything(node: &Fresh) -> String {
    node.nft("list ruleset")
}

#[test]
fn nothing_is_left_on_a_node_that_is_left_and_nothing_of_others_goes() {
    let node = Arc::new(Fresh::new());
    node.nft("add table inet stranger");
    let before = everything(&node);
    let host = OnNode::start(&node, ProbeSettings::default());
    let guard = host.start_reconciler(Duration::ZERO);
    host.set_addresses("c1", &POD);
    assert_ne!(everything(&node), before);
    let held = host.clear().unwrap_err();
    assert!(held.contains("2 addresses of pods"), "{held}");
    assert_eq!(shown(&node).len(), 2, "nothing was changed");
    host.release("c1");
    assert!(host.clear().unwrap());
    assert_eq!(everything(&node), before);
    // Nothing is left to do, and the reconciler restores nothing.
    assert!(!host.clear().unwrap());
    drop(guard);
    assert_eq!(everything(&node), before);
    // The set can be used again afterwards.
    assert!(host.set_addresses("c1", &POD));
    assert_eq!(shown(&node).len(), 2);
}

#[test]
fn probe_match_off_removes_the_set_of_an_earlier_process() {
    let node = Arc::new(Fresh::new());
    node.nft("add table inet stranger");
    let before = everything(&node);
    let earlier = OnNode::start(&node, ProbeSettings::default());
    earlier.set_addresses("c1", &POD);
    drop(earlier);
    assert_ne!(everything(&node), before, "a restart keeps the set");
    let off = ProbeSettings {
        probe_match: ProbeMatch::Off,
        ..ProbeSettings::default()
    };
    let host = OnNode::start(&node, off);
    assert_eq!(everything(&node), before);
    assert!(host.is_ok("probe-set"));
    assert!(!host.set_addresses("c1", &POD));
    assert_eq!(everything(&node), before);
}
