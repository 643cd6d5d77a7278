//! Pods with an AWS branch ENI, as AWS's agent sets them up.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use netconfig::probes::{AwsBranchEni, ProbeSettings};

use crate::probes::place::{OnNode, TIMEOUT, within};
use crate::support::Fresh;

/// An AWS node with two such pods and another.
fn node() -> Arc<Fresh> {
    let node = Fresh::new();
    node.command("sysctl", &["-qw", "net.ipv4.tcp_early_demux=0"]);
    for name in ["vlan.eth.1", "vlana", "vlan.eth.2", "vlanb", "eni7"] {
        node.ip(&format!("link add {name} type veth peer name p-{name}"));
        node.ip(&format!("link set {name} up"));
    }
    for command in [
        "rule add iif vlan.eth.1 lookup 101 pref 10",
        "rule add iif vlana lookup 101 pref 10",
        "rule add iif vlan.eth.2 lookup 102 pref 10",
        "rule add iif vlanb lookup 102 pref 10",
        "route add 10.0.0.5/32 dev vlana table 101",
        "route add 10.0.0.6/32 dev vlanb table 102",
        "route add 10.0.0.7/32 dev eni7",
        "-6 rule add iif vlana lookup 101 pref 10",
        "-6 route add fd00::5/128 dev vlana table 101",
    ] {
        node.ip(command);
    }
    Arc::new(node)
}

fn start(node: &Arc<Fresh>) -> OnNode {
    OnNode::start(node, ProbeSettings::default())
}

fn ours(node: &Fresh, family: &str) -> Vec<String> {
    let text = node.command("ip", &["-d", family, "rule"]);
    let lines = text.lines().filter(|line| line.contains("proto 105"));
    let words = lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    words.map(|line| line.replace(" unicast", "")).collect()
}

/// So long that whatever is repaired was noticed by the check of the rules themselves.
const NEVER: Duration = Duration::from_secs(3600);

const BACK: &str = "9: from all iif vlana lookup local proto 105";
const THERE: &str = "512: from all to 10.0.0.5 lookup 101 proto 105";

#[test]
fn probes_are_led_to_a_pod_of_its_own_interface_and_back() {
    let node = node();
    let host = start(&node);
    host.set_addresses("c1", &["10.0.0.5", "fd00::5"]);
    assert_eq!(ours(&node, "-4"), [BACK, THERE]);
    assert_eq!(
        ours(&node, "-6"),
        [BACK, "512: from all to fd00::5 lookup 101 proto 105"]
    );
    assert!(!host.set_addresses("c1", &["10.0.0.5", "fd00::5"]));
    host.release("c1");
    assert_eq!(ours(&node, "-4"), [""; 0]);
    assert_eq!(ours(&node, "-6"), [""; 0]);
}

#[test]
fn other_pods_are_not_led_and_other_rules_not_touched() {
    let node = node();
    let before = node.ip("rule");
    let host = start(&node);
    host.set_addresses("c1", &["10.0.0.7", "10.0.0.8"]);
    assert_eq!(node.ip("rule"), before);
    host.set_addresses("c2", &["10.0.0.5"]);
    host.release("c2");
    assert_eq!(node.ip("rule"), before);
}

#[test]
fn nothing_is_led_where_the_node_is_not_set_up_for_it_or_it_is_switched_off() {
    let node = node();
    let off = ProbeSettings {
        aws_branch_eni: AwsBranchEni::Off,
        ..ProbeSettings::default()
    };
    OnNode::start(&node, off).set_addresses("c1", &["10.0.0.5"]);
    assert_eq!(ours(&node, "-4"), [""; 0]);
    node.command("sysctl", &["-qw", "net.ipv4.tcp_early_demux=1"]);
    start(&node).set_addresses("c1", &["10.0.0.5"]);
    assert_eq!(ours(&node, "-4"), [""; 0]);
}

#[test]
fn a_restart_knows_its_rules_and_takes_them_away_with_the_pod() {
    let node = node();
    start(&node).set_addresses("c1", &["10.0.0.5"]);
    let host = start(&node);
    assert_eq!(ours(&node, "-4"), [BACK, THERE]);
    host.release("c1");
    assert_eq!(ours(&node, "-4"), [""; 0]);
}

#[test]
fn rules_of_a_pod_that_aws_forgot_meanwhile_are_taken_away_too() {
    let node = node();
    let host = start(&node);
    host.set_addresses("c1", &["10.0.0.5"]);
    host.set_addresses("c2", &["10.0.0.6"]);
    node.ip("rule del iif vlana lookup 101");
    node.ip("link del vlana");
    let host = start(&node);
    host.release("c1");
    let left = ours(&node, "-4");
    assert_eq!(left.len(), 2, "{left:?}");
    assert!(
        left[0].contains("vlanb") && left[1].contains("10.0.0.6"),
        "{left:?}"
    );
}

/// systemd-networkd deletes foreign rules when it reloads.
#[test]
fn rules_that_others_deleted_come_back() {
    let node = node();
    let host = start(&node);
    host.set_addresses("c1", &["10.0.0.5", "fd00::5"]);
    let before = [ours(&node, "-4"), ours(&node, "-6")];
    let _guard = host.start_reconciler(NEVER);
    for of_aws_too in [false, true] {
        let began = Instant::now();
        for family in ["-4", "-6"] {
            for pref in [9, 512] {
                node.ip(&format!("{family} rule del pref {pref}"));
            }
            if of_aws_too {
                node.ip(&format!("{family} rule flush"));
            }
        }
        let shown = || [ours(&node, "-4"), ours(&node, "-6")];
        within(TIMEOUT, "the rules of inpod", || shown() == before);
        println!("back after {:?}", began.elapsed());
    }
}

#[test]
fn rules_that_a_pod_needs_only_later_are_written_and_are_no_loss() {
    let node = node();
    node.command("sysctl", &["-qw", "net.ipv4.tcp_early_demux=1"]);
    let host = start(&node);
    host.set_addresses("c1", &["10.0.0.5"]);
    let _guard = host.start_reconciler(Duration::ZERO);
    node.command("sysctl", &["-qw", "net.ipv4.tcp_early_demux=0"]);
    let are_there = || ours(&node, "-4") == [BACK, THERE];
    within(TIMEOUT, "the rules of inpod", are_there);
    assert_eq!(host.host.restores().get(), 0);
    node.ip("rule del pref 9");
    within(TIMEOUT, "a repair", || host.host.restores().get() == 1);
    assert!(are_there());
}

#[test]
fn a_loss_that_is_repaired_for_another_pod_is_counted() {
    let node = node();
    let host = start(&node);
    host.set_addresses("c1", &["10.0.0.5"]);
    node.ip("rule del pref 9");
    host.set_addresses("c2", &["10.0.0.7"]);
    assert_eq!(ours(&node, "-4"), [BACK, THERE]);
    assert_eq!(host.host.restores().get(), 1);
    node.nft("flush ruleset");
    host.set_addresses("c3", &["10.0.0.8"]);
    assert!(node.nft("list ruleset").contains("10.0.0.5"));
    assert_eq!(host.host.restores().get(), 2);
}

#[test]
fn a_restart_writes_rules_that_were_deleted_meanwhile() {
    let node = node();
    start(&node).set_addresses("c1", &["10.0.0.5"]);
    node.ip("rule del pref 9");
    node.ip("rule del pref 512");
    let host = start(&node);
    assert_eq!(ours(&node, "-4"), [BACK, THERE]);
    host.release("c1");
    assert_eq!(ours(&node, "-4"), [""; 0]);
}

#[test]
fn a_restart_without_the_set_keeps_the_rules_until_the_pod_goes() {
    let node = node();
    start(&node).set_addresses("c1", &["10.0.0.5"]);
    node.nft("flush ruleset");
    let host = start(&node);
    assert_eq!(ours(&node, "-4"), [BACK, THERE]);
    assert!(node.nft("list ruleset").contains("10.0.0.5"));
    host.set_addresses("c1", &["10.0.0.5"]);
    host.release("c1");
    assert_eq!(ours(&node, "-4"), [""; 0]);
    assert!(!node.nft("list ruleset").contains("10.0.0.5"));
}

#[test]
fn an_address_that_moved_to_another_interface_is_led_there() {
    let node = node();
    let host = start(&node);
    host.set_addresses("c1", &["10.0.0.5"]);
    node.ip("route del 10.0.0.5/32 table 101");
    node.ip("route add 10.0.0.5/32 dev vlanb table 102");
    host.set_addresses("c2", &["10.0.0.5"]);
    let found = ours(&node, "-4");
    assert_eq!(
        found,
        [BACK.replace("vlana", "vlanb"), THERE.replace("101", "102")]
    );
}
