//! Conflicts in a pod's netns, as `inpod explain` and `inpod doctor` print them.

use integration::{Node, Spec};

use crate::netns::people::{asked, explain::explained};

/// The kind and the beginning of a finding, and the commands that cause and end the conflict. inpod itself ends those of
/// a loopback that is down and of rules that Istio left.
const CONFLICTS: [(&str, &str, &str, &str); 5] = [
    (
        "NAT_CHAIN",
        "table ip theirs, chain out: Chain out of table ip theirs (hook output, priority -100)",
        "nft table ip theirs { chain out { type nat hook output priority -100; tcp dport 80 redirect to :9; }; }",
        "nft delete table ip theirs",
    ),
    (
        "DROP_POLICY",
        "table inet theirs, chain in: Chain in of table inet theirs (hook input, priority 0) drops packets",
        "nft table inet theirs { chain in { type filter hook input priority 0; policy drop; }; }",
        "nft delete table inet theirs",
    ),
    (
        "MARKED_RULE",
        "IPv4 ip rule 100: The IPv4 ip rule with priority 100 and fwmark 0x1/0x1 matches",
        "ip rule add fwmark 0x1/0x1 pref 100 lookup 200",
        "ip rule del pref 100",
    ),
    (
        "RP_FILTER",
        "net.ipv4.conf.net1.rp_filter: Reverse path filtering is strict (1) on net1",
        "ip link add net1 type veth peer name net2; ip addr add 10.99.0.1/24 dev net1; ip link set net1 up; \
         ip link set net2 up; echo 1 > /proc/sys/net/ipv4/conf/net1/rp_filter",
        "ip link del net1",
    ),
    (
        "IPV6_DISABLED",
        "net.ipv6.conf.lo.disable_ipv6: IPv6 is disabled on lo",
        "echo 1 > /proc/sys/net/ipv6/conf/lo/disable_ipv6",
        "echo 0 > /proc/sys/net/ipv6/conf/lo/disable_ipv6",
    ),
];

#[test]
fn conflicts_are_printed_and_listed_chains_are_none() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    let shell = |script: &str| pod.exec(&["sh", "-ec", script]).unwrap();
    for table in ["nat", "mangle", "filter"] {
        shell(&format!("iptables-nft -t {table} -L >&2"));
    }
    let text = explained(&node, "a");
    assert!(!text.contains("finding: "), "{text}");
    // doctor has other findings here, and exits with 1.
    let doctor = || {
        let output = asked(&node, &["doctor", "--verbose"]);
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(doctor().contains("none in 1 netns"), "{}", doctor());
    for (kind, finding, begin, end) in CONFLICTS {
        // nft takes braces and semicolons, which a shell does not.
        let run = |command: &str| match command.strip_prefix("nft ") {
            Some(script) => pod.exec(&["nft", script]).unwrap(),
            None => shell(command),
        };
        run(begin);
        let text = explained(&node, "a");
        println!("== {kind}\n{text}");
        assert!(
            text.contains(&format!("finding: {finding}")),
            "{kind}: {text}"
        );
        let doctor = doctor();
        assert!(doctor.contains(&format!("1 {kind} (")), "{kind}: {doctor}");
        run(end);
        // The pod's rules are repaired meanwhile where a conflict removed some.
        node.api().resync().unwrap();
    }
}
