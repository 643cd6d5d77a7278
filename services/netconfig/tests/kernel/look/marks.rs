//! Foreign rules that write marks.

use netconfig::conflicts::Kind;

use crate::look::{
    FROM_ZTUNNEL, POD, SERVER, address, arrives, dial, findings, iptables, is_found, listen, pod,
};

#[test]
fn a_rule_that_writes_the_whole_mark_has_ztunnels_packets_captured() {
    let (pod, server) = pod();
    let (outbound, application) = (listen(&pod, 15001), listen(&server, 8080));
    let dial = || dial(&pod, None, FROM_ZTUNNEL, address(SERVER, 8080)).unwrap();
    assert!(arrives(&application, &dial()));
    iptables(&pod, "-t mangle -A OUTPUT -p tcp -j MARK --set-mark 0x5");
    let expected = "overwrites the bits 0xfff of packet marks";
    is_found(
        &pod,
        Kind::UnmaskedMark,
        "table ip mangle, chain OUTPUT",
        expected,
    );
    assert!(arrives(&outbound, &dial()));
}

#[test]
fn a_rule_that_writes_the_whole_mark_of_connections_loses_the_answers_to_ztunnel() {
    let (pod, _server) = pod();
    let _application = listen(&pod, 8080);
    let answered = || dial(&pod, Some(SERVER), FROM_ZTUNNEL, address(POD, 8080)).is_some();
    assert!(answered());
    pod.nft("add table inet theirs");
    pod.nft("add chain inet theirs in { type filter hook input priority 0; }");
    pod.nft("add rule inet theirs in ct mark set meta mark");
    let expected = "overwrites the bits 0xfff of connection marks";
    is_found(
        &pod,
        Kind::UnmaskedMark,
        "table inet theirs, chain in",
        expected,
    );
    assert!(!answered());
}

/// Rules for iptables' mangle table or nft, and whether they change inpod's bits.
const WRITES: [(&str, &str, bool); 26] = [
    ("mangle", "-j MARK --set-mark 0x5", true),
    ("mangle", "-j MARK --set-xmark 0x10000/0xf0000", false),
    ("mangle", "-j MARK --or-mark 0x10000", false),
    ("mangle", "-j MARK --or-mark 0x1", true),
    ("mangle", "-j MARK --and-mark 0xfffff", false),
    ("mangle", "-j MARK --and-mark 0xfffff000", true),
    ("mangle", "-j CONNMARK --set-mark 0x5", true),
    ("mangle", "-j CONNMARK --set-xmark 0x10000/0xf0000", false),
    ("mangle", "-j CONNMARK --save-mark", true),
    ("mangle", "-j CONNMARK --save-mark --mask 0xf0000", false),
    ("mangle", "-j CONNMARK --restore-mark", true),
    ("mangle", "-j CONNMARK --restore-mark --mask 0xf0000", false),
    ("mangle", "-p udp -j MARK --set-mark 0x5", false),
    ("nft", "meta mark set 5", true),
    ("nft", "meta mark set meta mark | 0x10000", false),
    (
        "nft",
        "meta mark set meta mark & 0xfff0ffff | 0x10000",
        false,
    ),
    ("nft", "meta mark set meta mark & 0xfffff000 | 0x1", true),
    ("nft", "meta mark set ct mark", true),
    ("nft", "meta mark set ct mark & 0xf0000", true),
    ("nft", "ct mark set meta mark", true),
    ("nft", "ct mark set ct mark & 0xfff0ffff | 0x10000", false),
    ("nft", "ct mark set 0", true),
    (
        "nft",
        "meta mark set tcp dport map { 80 : 1, 443 : 2 }",
        true,
    ),
    ("nft", "meta l4proto udp meta mark set 5", false),
    ("nft", "ct state established meta mark set 5", true),
    (
        "nft",
        "meta mark & 0x10000 == 0x10000 meta priority set 5",
        false,
    ),
];

#[test]
fn every_way_of_writing_a_mark_is_judged_by_the_bits_that_it_changes() {
    let (pod, _server) = pod();
    for (table, rule, is_harmful) in WRITES {
        if table == "nft" {
            pod.nft("add table inet theirs");
            pod.nft("add chain inet theirs out { type route hook output priority -140; }");
            pod.nft(&format!("add rule inet theirs out {rule}"));
        } else {
            iptables(&pod, &format!("-t {table} -A OUTPUT {rule}"));
        }
        let found = findings(&pod);
        let marks = found
            .iter()
            .filter(|finding| finding.kind == Kind::UnmaskedMark);
        assert_eq!(
            (marks.count(), found.len()),
            (is_harmful.into(), is_harmful.into()),
            "{rule}: {found:#?}"
        );
        if table == "nft" {
            pod.nft("delete table inet theirs");
        } else {
            iptables(&pod, &format!("-t {table} -F"));
        }
    }
}

#[test]
fn a_mark_of_packets_matters_where_ours_is_read_after() {
    let (pod, _server) = pod();
    for (hook, matters) in [
        ("prerouting", true),
        ("input", false),
        ("forward", false),
        ("output", true),
        ("postrouting", true),
    ] {
        pod.nft("add table inet theirs");
        pod.nft(&format!(
            "add chain inet theirs x {{ type filter hook {hook} priority 0; }}"
        ));
        pod.nft("add rule inet theirs x meta mark set 5");
        assert_eq!(findings(&pod).len(), usize::from(matters), "{hook}");
        pod.nft("delete table inet theirs");
    }
}
