//! Chains and ip rules of others, some left by Istio's node agent.

use std::net::TcpListener;

use netconfig::conflicts::Kind;

use crate::look::{
    FROM_ZTUNNEL, POD, SERVER, address, arrives, capture, dial, findings, iptables, is_clean,
    is_found, listen, pod,
};

#[test]
fn the_youngest_of_nat_chains_at_inpods_priority_is_found() {
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
    is_found(&pod, Kind::NatChain, subject, "so that it comes first");
    assert!(goes_to(&theirs));
    // Our table is created again.
    pod.nft("delete table inet inpod-nat");
    is_found(&pod, Kind::NatChain, subject, "inpod's, which is missing");
    capture(&pod);
    is_found(&pod, Kind::NatChain, subject, "is in an older table");
    assert!(goes_to(&outbound));
}

#[test]
fn a_nat_chain_of_an_earlier_priority_is_found_whatever_its_age() {
    let (pod, server) = pod();
    pod.nft("delete table inet inpod-nat");
    // Names that resemble inpod's hide nothing.
    pod.nft("add table inet inpod-theirs");
    pod.nft("add chain inet inpod-theirs INPOD_pre { type nat hook prerouting priority -101; }");
    pod.nft("add rule inet inpod-theirs INPOD_pre tcp dport 8080 redirect to :9999");
    capture(&pod);
    is_found(
        &pod,
        Kind::NatChain,
        "table inet inpod-theirs, chain INPOD_pre",
        "Chain INPOD_pre of table inet inpod-theirs (hook prerouting, priority -101) comes before inpod's",
    );
    let (theirs, _inbound) = (listen(&pod, 9999), listen(&pod, 15006));
    let stream = dial(&server, None, 0, address(POD, 8080)).unwrap();
    assert!(arrives(&theirs, &stream));
}

#[test]
fn listed_chains_without_rules_and_later_chains_are_no_conflict() {
    let (pod, _server) = pod();
    for table in ["nat", "mangle", "raw", "filter"] {
        iptables(&pod, &format!("-t {table} -L"));
    }
    // The listing created base chains at inpod's priority.
    assert!(
        pod.nft("list ruleset")
            .contains("hook output priority -100")
    );
    is_clean(&pod);
    iptables(&pod, "-t nat -A POSTROUTING -p tcp -j MASQUERADE");
    iptables(&pod, "-t mangle -A OUTPUT -p tcp -j ACCEPT");
    pod.nft("add table inet theirs");
    pod.nft("add chain inet theirs late { type nat hook output priority -99; }");
    pod.nft("add rule inet theirs late tcp dport 80 redirect to :9999");
    is_clean(&pod);
    iptables(&pod, "-t nat -A OUTPUT -p tcp -j ACCEPT");
    let subject = "table ip nat, chain OUTPUT";
    is_found(&pod, Kind::NatChain, subject, "so that it comes first");
}

#[test]
fn a_drop_policy_is_found_where_redirected_connections_pass() {
    let (pod, server) = pod();
    let inbound = listen(&pod, 15006);
    let connects = || dial(&server, None, 0, address(POD, 8080));
    assert!(arrives(&inbound, &connects().unwrap()));
    iptables(&pod, "-P INPUT DROP");
    iptables(&pod, "-A INPUT -p tcp --dport 8080 -j ACCEPT");
    let subject = "table ip filter, chain INPUT";
    let found = "; now connections from and to the pod are dropped.";
    is_found(&pod, Kind::Drops, subject, found);
    assert!(connects().is_none(), "the redirected port is not accepted");
    iptables(&pod, "-A INPUT -i lo -j ACCEPT");
    is_found(
        &pod,
        Kind::Drops,
        subject,
        "; now connections to the pod are",
    );
    for port in [15006, 15008] {
        iptables(&pod, &format!("-A INPUT -p tcp --dport {port} -j ACCEPT"));
    }
    is_found(&pod, Kind::DropPolicy, subject, "15001, 15006, 15008");
    assert!(arrives(&inbound, &connects().unwrap()));
    iptables(&pod, "-P INPUT ACCEPT");
    is_clean(&pod);
    assert!(arrives(&inbound, &connects().unwrap()));
    iptables(&pod, "-P FORWARD DROP");
    is_clean(&pod);
}

/// The rules of a VPN's container: what does not go through the tunnel is dropped.
#[test]
fn a_kill_switch_is_found_while_it_drops_redirected_connections() {
    let (pod, server) = pod();
    let (outbound, _app) = (listen(&pod, 15001), listen(&server, 8080));
    let connects = || dial(&pod, None, 0, address(SERVER, 8080));
    assert!(arrives(&outbound, &connects().unwrap()));
    for rule in [
        "-A OUTPUT -o lo -j ACCEPT",
        "-A OUTPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
        "-A OUTPUT -d 203.0.113.7 -p udp --dport 51820 -j ACCEPT",
        "-A OUTPUT -d 10.9.0.0/16 -j ACCEPT",
        "-P OUTPUT DROP",
    ] {
        iptables(&pod, rule);
    }
    let subject = "table ip filter, chain OUTPUT";
    let found = "; now the pod's outbound connections are dropped.";
    is_found(&pod, Kind::Drops, subject, found);
    assert!(connects().is_none());
    for accepts in [
        "-p tcp --dport 15001",
        "-d 127.0.0.1",
        "-m conntrack --ctstate NEW",
        "-o eth0",
    ] {
        iptables(&pod, &format!("-A OUTPUT {accepts} -j ACCEPT"));
        is_found(&pod, Kind::DropPolicy, subject, "15001");
        assert!(arrives(&outbound, &connects().unwrap()), "{accepts}");
        iptables(&pod, &format!("-D OUTPUT {accepts} -j ACCEPT"));
    }
    is_found(&pod, Kind::Drops, subject, found);
}

#[test]
fn an_ip_rule_that_takes_ztunnels_mark_is_found() {
    let (pod, server) = pod();
    let application = listen(&server, 8080);
    let from_ztunnel = || dial(&pod, None, FROM_ZTUNNEL, address(SERVER, 8080));
    pod.ip("rule add fwmark 0x1/0x1 pref 100 lookup 200");
    pod.ip("route add blackhole default table 200");
    let expected = "priority 100 and fwmark 0x1/0x1 matches packets with ztunnel's mark";
    is_found(&pod, Kind::MarkedRule, "IPv4 ip rule 100", expected);
    assert!(from_ztunnel().is_none());
    pod.ip("rule del pref 100");
    for harmless in [
        "fwmark 0x1000/0x1000 pref 100",
        "fwmark 0x2/0xfff pref 100",
        "fwmark 0x1/0x1 pref 32768",
        "from 10.9.0.9 pref 100",
    ] {
        pod.ip(&format!("rule add {harmless} lookup 200"));
        is_clean(&pod);
    }
    assert!(arrives(&application, &from_ztunnel().unwrap()));
}

#[test]
fn names_that_a_pod_chose_are_escaped_and_end() {
    let (pod, _server) = pod();
    let name = "x".repeat(200);
    pod.nft(&format!("add table ip {name}"));
    pod.nft(&format!(
        "add chain ip {name} out {{ type filter hook output priority 0; policy drop; }}"
    ));
    let found = findings(&pod);
    assert_eq!(found.len(), 1);
    let wanted = format!("table ip {}, chain out", "x".repeat(64));
    assert_eq!(found[0].subject, wanted);
}

#[test]
fn rules_of_istios_node_agent_are_found_once_per_table() {
    let (pod, _server) = pod();
    pod.nft("add table inet istio-ambient-nat");
    pod.nft("add chain inet istio-ambient-nat output { type nat hook output priority -100; }");
    pod.nft("add rule inet istio-ambient-nat output meta l4proto tcp redirect to :15001");
    let subject = "table inet istio-ambient-nat";
    is_found(&pod, Kind::Incumbent, subject, "replaces");
    pod.nft("delete table inet istio-ambient-nat");
    for rule in [
        "-t nat -N ISTIO_PRERT",
        "-t nat -N ISTIO_OUTPUT",
        "-t nat -A PREROUTING -j ISTIO_PRERT",
        "-t nat -A OUTPUT -j ISTIO_OUTPUT",
        "-t nat -A ISTIO_OUTPUT -p tcp -j REDIRECT --to-ports 15001",
    ] {
        iptables(&pod, rule);
    }
    is_found(&pod, Kind::Incumbent, "table ip nat", "replaces");
    // What the next ApplyRules leaves are chains without rules.
    capture(&pod);
    is_clean(&pod);
}

#[test]
fn a_chain_that_gives_packets_ztunnels_mark_is_found() {
    let (pod, server) = pod();
    let (outbound, app) = (listen(&pod, 15001), listen(&server, 8080));
    let goes_to = |wanted: &TcpListener| {
        let stream = dial(&pod, None, 0, address(SERVER, 8080)).unwrap();
        arrives(wanted, &stream)
    };
    assert!(goes_to(&outbound));
    pod.nft("add table inet theirs");
    pod.nft("add chain inet theirs out { type filter hook output priority -200; }");
    pod.nft("add chain inet theirs marks");
    pod.nft("add rule inet theirs out meta mark set 0x111539");
    let bypasses = "gives packets ztunnel's mark: their connections bypass ztunnel";
    let is_marking = |chain: &str| is_found(&pod, Kind::MarkingChain, chain, bypasses);
    is_marking("table inet theirs, chain out");
    assert!(goes_to(&app));
    for (rule, is_ztunnels) in [
        ("tcp dport 8080 meta mark set meta mark or 0x539", true),
        ("meta mark set meta mark and 0xfffff000 or 0x539", true),
        ("ct mark set 0x539", true),
        ("meta mark set 0x538", false),
        ("meta mark 0x539 accept", false),
    ] {
        pod.nft("flush chain inet theirs out");
        pod.nft("add rule inet theirs out jump marks");
        pod.nft("flush chain inet theirs marks");
        pod.nft(&format!("add rule inet theirs marks {rule}"));
        if is_ztunnels {
            is_marking("table inet theirs, chain marks");
        } else {
            is_clean(&pod);
        }
    }
    pod.nft("delete table inet theirs");
    iptables(&pod, "-t mangle -A OUTPUT -j MARK --set-mark 0x1");
    is_clean(&pod);
    iptables(&pod, "-t mangle -A OUTPUT -j MARK --set-mark 0x539");
    is_marking("table ip mangle, chain OUTPUT");
}
