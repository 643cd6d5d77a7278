//! Removal takes everything of inpod's and nothing else.

use netconfig::apply::Phase;

use crate::apply::{applied, differences, everything, is_reported_and_repaired, tag_of};
use crate::support::{Fresh, ambient, plain, sandbox};

#[test]
fn a_last_removal_leaves_nothing_and_can_be_repeated() {
    let fresh = Fresh::new();
    let before = everything(&fresh);
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    assert_ne!(everything(&fresh), before);
    for _ in 0..2 {
        assert_eq!(
            plain()
                .remove(&fresh.netns, &sandbox("c1"), Phase::Final)
                .unwrap()
                .captured_flows,
            0
        );
        assert_eq!(everything(&fresh), before);
    }
    assert_eq!(tag_of(&fresh), None);
}

#[test]
fn a_drain_replaces_capture_keeps_the_rest_and_can_be_repeated() {
    let fresh = applied();
    let mark = || fresh.nft("list chain inet inpod-mangle prerouting");
    let before = mark();
    let tag = tag_of(&fresh);
    for _ in 0..2 {
        plain()
            .remove(&fresh.netns, &sandbox("c1"), Phase::Drain)
            .unwrap();
        let nat = fresh.nft("list table inet inpod-nat");
        assert!(!nat.contains("redirect"), "{nat}");
        assert_eq!(nat.matches("ct state new counter").count(), 2, "{nat}");
        assert_eq!(mark(), before);
        let mangle = fresh.nft("list table inet inpod-mangle");
        assert!(
            mangle.contains("ct mark & 0x00000fff == 0x00000111"),
            "{mangle}"
        );
        assert!(!mangle.contains("1500"), "{mangle}");
    }
    assert_ne!(tag_of(&fresh), tag);
    is_reported_and_repaired(&fresh, "redirect to :15001` is missing in inpod-nat output");
    plain()
        .remove(&fresh.netns, &sandbox("c1"), Phase::Final)
        .unwrap();
    plain()
        .remove(&fresh.netns, &sandbox("c1"), Phase::Drain)
        .unwrap();
    assert_eq!(fresh.nft("list ruleset"), "");
}

#[test]
fn tables_rules_and_routes_of_others_stay() {
    let fresh = Fresh::new();
    fresh.nft("add table inet theirs { chain output { type nat hook output priority -100; }; }");
    fresh.nft("add table ip inpod-nat");
    fresh.ip("rule add fwmark 0x7/0xff pref 32764 lookup 100");
    fresh.ip("route add local 10.1.0.0/16 dev lo table 100");
    let before = everything(&fresh);
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    assert_eq!(differences(&fresh), [""; 0]);
    plain()
        .remove(&fresh.netns, &sandbox("c1"), Phase::Final)
        .unwrap();
    assert_eq!(everything(&fresh), before);
}

#[test]
fn an_equal_route_and_rule_of_others_are_used_and_not_taken_away() {
    let fresh = Fresh::new();
    fresh.ip("rule add fwmark 0x111/0xfff pref 32764 lookup 100");
    fresh.ip("route add local default dev lo table 100");
    let before = everything(&fresh);
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    assert_eq!(differences(&fresh), [""; 0]);
    plain()
        .remove(&fresh.netns, &sandbox("c1"), Phase::Final)
        .unwrap();
    assert_eq!(everything(&fresh), before);
}

#[test]
fn a_netns_without_ipv6_gets_no_ipv6_routes() {
    let fresh = Fresh::new();
    fresh.run(|| std::fs::write("/proc/sys/net/ipv6/conf/lo/disable_ipv6", "1").unwrap());
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    assert_eq!(differences(&fresh), [""; 0]);
    assert!(!fresh.ip("-6 rule").contains("500:"));
    assert!(fresh.ip("rule").contains("500:"));
    plain()
        .remove(&fresh.netns, &sandbox("c1"), Phase::Final)
        .unwrap();
}
