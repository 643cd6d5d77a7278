//! Foreign rules with a final verdict.

use netconfig::conflicts::Kind;

use crate::look::{
    POD, SERVER, address, arrives, dial, findings, iptables, is_clean, is_found, listen, pod,
};

#[test]
fn what_is_dropped_or_untracked_ahead_of_our_rules_does_not_come_to_ztunnel() {
    let (pod, server) = pod();
    let (outbound, application) = (listen(&pod, 15001), listen(&server, 8080));
    iptables(&pod, "-t raw -A OUTPUT -p tcp --dport 8080 -j NOTRACK");
    let raw = "table ip raw, chain OUTPUT";
    is_found(
        &pod,
        Kind::EarlyVerdict,
        raw,
        "excludes packets from connection tracking",
    );
    let direct = dial(&pod, None, 0, address(SERVER, 8080)).unwrap();
    assert!(arrives(&application, &direct));
    iptables(&pod, "-t raw -F");
    iptables(&pod, "-t raw -A OUTPUT -p tcp --dport 8080 -j DROP");
    is_found(
        &pod,
        Kind::EarlyVerdict,
        raw,
        "drops packets before inpod's rules see them",
    );
    assert!(dial(&pod, None, 0, address(SERVER, 8080)).is_none());
    iptables(&pod, "-t raw -F");
    is_clean(&pod);
    let captured = dial(&pod, None, 0, address(SERVER, 8080)).unwrap();
    assert!(arrives(&outbound, &captured));
}

#[test]
fn a_policy_that_drops_ahead_of_our_rules_is_told_unless_every_packet_is_accepted_before() {
    let (pod, server) = pod();
    let _inbound = listen(&pod, 15006);
    pod.nft("add table inet theirs");
    pod.nft(
        "add chain inet theirs pre { type filter hook prerouting priority -290; policy drop; }",
    );
    pod.nft("add rule inet theirs pre iifname lo accept");
    let subject = "table inet theirs, chain pre";
    is_found(
        &pod,
        Kind::EarlyVerdict,
        subject,
        "drops packets without a verdict by its policy",
    );
    assert!(dial(&server, None, 0, address(POD, 8080)).is_none());
    pod.nft("add rule inet theirs pre accept");
    is_clean(&pod);
    assert!(dial(&server, None, 0, address(POD, 8080)).is_some());
}

#[test]
fn verdicts_that_end_no_way_to_our_rules_are_no_conflict() {
    let (pod, _server) = pod();
    // Ends only the foreign table's own base chain.
    iptables(&pod, "-t mangle -A PREROUTING -j ACCEPT");
    iptables(&pod, "-t mangle -A OUTPUT -p tcp -j RETURN");
    iptables(&pod, "-t nat -A OUTPUT -p tcp -j ACCEPT");
    // A chain that runs after ours.
    iptables(&pod, "-t filter -A OUTPUT -p tcp --dport 25 -j DROP");
    iptables(&pod, "-t filter -A INPUT -p tcp --dport 25 -j REJECT");
    // Packets that do not open a connection.
    iptables(&pod, "-t raw -A OUTPUT -p icmp -j DROP");
    is_clean(&pod);
    iptables(&pod, "-t mangle -F");
    iptables(
        &pod,
        "-t mangle -A PREROUTING -m conntrack --ctstate INVALID -j DROP",
    );
    pod.nft("add table inet theirs");
    pod.nft("add chain inet theirs pre { type filter hook prerouting priority -150; }");
    pod.nft("add rule inet theirs pre ct state invalid drop");
    pod.nft("add rule inet theirs pre ct state != new drop");
    pod.nft("add rule inet theirs pre ct state established,related drop");
    pod.nft("add rule inet theirs pre ip daddr 127.0.0.0/8 drop");
    pod.nft("add rule inet theirs pre ip6 daddr ::1 drop");
    pod.nft("add rule inet theirs pre ip protocol icmp drop");
    pod.nft("add rule inet theirs pre meta l4proto != tcp udp dport != 53 drop");
    iptables(
        &pod,
        "-t mangle -A PREROUTING -m conntrack ! --ctstate NEW -j DROP",
    );
    // Too late: the packet is tracked by then.
    pod.nft("add chain inet theirs out { type filter hook output priority -180; }");
    pod.nft("add rule inet theirs out tcp dport 80 notrack");
    is_clean(&pod);
}

#[test]
fn a_condition_that_packets_may_meet_leaves_a_verdict_a_conflict() {
    let (pod, _server) = pod();
    for rule in [
        "ct state new drop",
        "ct state != established drop",
        "ip daddr 10.0.0.0/8 drop",
        "ip daddr != 127.0.0.0/8 drop",
        "ip6 nexthdr tcp drop",
        "meta mark & 0x1 == 0 drop",
        "meta l4proto != udp drop",
    ] {
        pod.nft("add table inet theirs");
        pod.nft("add chain inet theirs pre { type filter hook prerouting priority -150; }");
        pod.nft(&format!("add rule inet theirs pre {rule}"));
        let kinds: Vec<_> = findings(&pod).iter().map(|finding| finding.kind).collect();
        assert_eq!(kinds, [Kind::EarlyVerdict], "{rule}");
        pod.nft("delete table inet theirs");
    }
}

#[test]
fn a_verdict_map_may_lead_to_every_chain_of_its_table() {
    let (pod, _server) = pod();
    pod.nft("add table inet theirs");
    pod.nft("add chain inet theirs gone { drop; }");
    pod.nft("add chain inet theirs pre { type filter hook prerouting priority -290; }");
    is_clean(&pod);
    pod.nft("add rule inet theirs pre tcp dport vmap { 22 : jump gone }");
    is_found(
        &pod,
        Kind::EarlyVerdict,
        "table inet theirs, chain gone",
        "reached from pre",
    );
}

/// A pod's own rules must not exhaust netconfig's memory.
#[test]
fn a_table_of_more_rules_than_are_looked_at_is_left_out_and_hides_no_other() {
    let (pod, _server) = pod();
    let mut script = String::from(
        "add table ip huge\nadd chain ip huge out { type filter hook output priority -300; }\n",
    );
    script += &"add rule ip huge out tcp dport 1 counter\n".repeat(10_000);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), script).unwrap();
    pod.command("nft", &["-f", file.path().to_str().unwrap()]);
    pod.nft("insert rule ip huge out tcp dport 2 drop");
    is_clean(&pod);
    pod.nft("delete rule ip huge out handle 3");
    let subject = "table ip huge, chain out";
    is_found(&pod, Kind::EarlyVerdict, subject, "drops packets");
    pod.nft("insert rule ip huge out tcp dport 3 counter");
    iptables(&pod, "-t raw -A OUTPUT -p tcp --dport 5 -j DROP");
    let subject = "table ip raw, chain OUTPUT";
    is_found(&pod, Kind::EarlyVerdict, subject, "drops packets");
}
