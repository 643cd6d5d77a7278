//! Foreign NAT chains, some left by Istio's node agent.

use std::net::TcpListener;

use netconfig::conflicts::Kind;

use crate::look::{
    POD, SERVER, address, arrives, capture, dial, findings, iptables, is_clean, is_found, listen,
    pod,
};
use crate::support::Fresh;

#[test]
fn of_nat_chains_at_our_priority_the_one_that_was_made_last_decides() {
    let (pod, server) = pod();
    let (outbound, _app) = (listen(&pod, 15001), listen(&server, 8080));
    let theirs = listen(&pod, 9999);
    let goes_to = |wanted: &TcpListener| {
        let stream = dial(&pod, None, 0, address(SERVER, 8080)).unwrap();
        arrives(wanted, &stream)
    };
    assert!(goes_to(&outbound));
    pod.nft("add table ip theirs");
    pod.nft("add chain ip theirs out { type nat hook output priority -100; }");
    is_clean(&pod);
    pod.nft("add rule ip theirs out tcp dport 8080 redirect to :9999");
    let subject = "table ip theirs, chain out";
    is_found(
        &pod,
        Kind::NatChain,
        subject,
        "was created later, so that it comes first",
    );
    assert!(goes_to(&theirs));
    // Our table is created again.
    pod.nft("delete table inet inpod-nat");
    is_found(
        &pod,
        Kind::NatChain,
        subject,
        "inpod's rules, which are missing",
    );
    capture(&pod);
    is_found(&pod, Kind::NatChain, subject, "is in an older table");
    assert!(goes_to(&outbound));
}

#[test]
fn a_nat_chain_of_an_earlier_priority_decides_whenever_it_was_made() {
    let (pod, server) = pod();
    pod.nft("delete table inet inpod-nat");
    pod.nft("add table inet theirs");
    pod.nft("add chain inet theirs pre { type nat hook prerouting priority -101; }");
    pod.nft("add rule inet theirs pre tcp dport 8080 redirect to :9999");
    capture(&pod);
    let expected = "Chain pre of table inet theirs (hook prerouting, priority -101) translates connections before inpod's rules";
    is_found(
        &pod,
        Kind::NatChain,
        "table inet theirs, chain pre",
        expected,
    );
    let (theirs, _inbound) = (listen(&pod, 9999), listen(&pod, 15006));
    let stream = dial(&server, None, 0, address(POD, 8080)).unwrap();
    assert!(arrives(&theirs, &stream));
}

#[test]
fn nat_rules_of_iptables_are_seen_through_their_chains() {
    let (pod, _server) = pod();
    for rule in [
        "-t nat -N APP",
        "-t nat -A OUTPUT -j APP",
        "-t nat -A APP -p tcp --dport 80 -j REDIRECT --to-ports 9999",
    ] {
        iptables(&pod, rule);
    }
    let expected = "Chain APP of table ip nat, reached from OUTPUT, (hook output, priority -100)";
    is_found(&pod, Kind::NatChain, "table ip nat, chain APP", expected);
}

#[test]
fn nat_that_no_captured_packet_meets_is_no_conflict() {
    let (pod, _server) = pod();
    // As Docker's resolver does.
    iptables(
        &pod,
        "-t nat -A OUTPUT -d 127.0.0.11/32 -p tcp --dport 53 -j DNAT --to-destination 127.0.0.11:4000",
    );
    iptables(
        &pod,
        "-t nat -A OUTPUT -p udp --dport 5353 -j REDIRECT --to-ports 9999",
    );
    iptables(&pod, "-t nat -A POSTROUTING -p tcp -j MASQUERADE");
    pod.nft("add table inet theirs");
    pod.nft("add chain inet theirs late { type nat hook output priority -99; }");
    pod.nft("add rule inet theirs late tcp dport 80 redirect to :9999");
    // No rule jumps to this chain.
    pod.nft("add chain inet theirs unused");
    pod.nft("add rule inet theirs unused tcp dport 80 redirect to :9999");
    // Unreachable after a rule that always matches.
    pod.nft("add chain inet theirs early { type nat hook output priority -199; }");
    pod.nft("add rule inet theirs early counter accept");
    pod.nft("add rule inet theirs early tcp dport 80 redirect to :9999");
    is_clean(&pod);
}

#[test]
fn names_that_a_pod_chose_are_escaped_and_end() {
    let (pod, _server) = pod();
    let name = "x".repeat(200);
    pod.nft(&format!("add table ip {name}"));
    pod.nft(&format!(
        "add chain ip {name} out {{ type nat hook output priority -199; }}"
    ));
    pod.nft(&format!(
        "add rule ip {name} out tcp dport 80 redirect to :9999"
    ));
    let found = findings(&pod);
    assert_eq!(found.len(), 1);
    assert_eq!(
        found[0].subject,
        format!("table ip {}, chain out", "x".repeat(64))
    );
}

#[test]
fn rules_of_istios_node_agent_are_told_once_for_each_table_and_judged_no_further() {
    let (pod, _server) = pod();
    pod.nft("add table inet istio-ambient-nat");
    pod.nft("add chain inet istio-ambient-nat output { type nat hook output priority -100; }");
    pod.nft("add rule inet istio-ambient-nat output meta l4proto tcp redirect to :15001");
    is_found(
        &pod,
        Kind::Incumbent,
        "table inet istio-ambient-nat",
        "replaces",
    );
    pod.nft("delete table inet istio-ambient-nat");
    for rule in [
        "-t mangle -N ISTIO_PRERT",
        "-t mangle -N ISTIO_OUTPUT",
        "-t mangle -A PREROUTING -j ISTIO_PRERT",
        "-t mangle -A OUTPUT -j ISTIO_OUTPUT",
        "-t mangle -A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff",
        "-t mangle -A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
    ] {
        iptables(&pod, rule);
    }
    is_found(
        &pod,
        Kind::Incumbent,
        "table ip mangle, chains ISTIO_*",
        "replaces",
    );
}

#[test]
fn chains_of_ours_among_those_of_iptables_are_shadowed_by_what_stands_in_front_of_them() {
    let pod = Fresh::new();
    for rule in [
        "-t nat -N INPOD_OUTPUT",
        "-t nat -A OUTPUT -j INPOD_OUTPUT",
        "-t nat -A INPOD_OUTPUT -p tcp -j REDIRECT --to-ports 15001",
        "-t nat -A OUTPUT -p tcp --dport 80 -j REDIRECT --to-ports 9999",
        "-t nat -A OUTPUT -p tcp --dport 81 -j ACCEPT",
    ] {
        iptables(&pod, rule);
    }
    is_clean(&pod);
    let subject = "table ip nat, chain OUTPUT";
    iptables(&pod, "-t nat -I OUTPUT -p tcp --dport 82 -j ACCEPT");
    is_found(
        &pod,
        Kind::EarlyVerdict,
        subject,
        "before the jump to inpod's rules",
    );
    iptables(&pod, "-t nat -D OUTPUT 1");
    iptables(
        &pod,
        "-t nat -I OUTPUT -p tcp --dport 82 -j REDIRECT --to-ports 9999",
    );
    is_found(
        &pod,
        Kind::NatChain,
        subject,
        "before the jump to inpod's rules",
    );
}
