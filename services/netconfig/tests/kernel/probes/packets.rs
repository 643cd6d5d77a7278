//! Probes' destinations and source addresses.

use netconfig::{
    probes::ProbeSettings,
    rules::{Ambient, Ipv6},
};

use crate::probes::place::{Arrival, OnNode, POD, Place, captured, spared};

fn settings(probe_match: &str) -> ProbeSettings {
    ProbeSettings {
        probe_match: probe_match.parse().unwrap(),
        ..ProbeSettings::default()
    }
}

#[test]
fn roots_probe_reaches_the_application_and_other_calls_are_captured() {
    let place = Place::new();
    let host = OnNode::start(&place.node, ProbeSettings::default());
    for (index, to) in POD.into_iter().enumerate() {
        assert_eq!(place.probe(0, to), captured(index)[0], "not named yet");
    }
    host.set_addresses("c1", &POD);
    for (index, to) in POD.into_iter().enumerate() {
        assert_eq!(place.probe(0, to), spared(to));
        assert_eq!(place.probe(4711, to), captured(index)[0]);
        assert_eq!(place.call(to), captured(index)[1]);
    }
    host.release("c1");
    for (index, to) in POD.into_iter().enumerate() {
        assert_eq!(place.probe(0, to), captured(index)[0], "released");
    }
}

#[test]
fn other_source_nat_of_the_node_does_not_hide_that_it_is_a_probe() {
    let place = Place::new();
    let masquerade = "table inet theirs { chain post { \
                      type nat hook postrouting priority 100; masquerade; }; }";
    place.node.nft(masquerade);
    let host = OnNode::start(&place.node, ProbeSettings::default());
    host.set_addresses("c1", &POD);
    for to in POD {
        assert_eq!(place.probe(0, to), spared(to));
    }
    // Foreign rules before and after ours, by nft and by iptables.
    for program in ["iptables-nft", "ip6tables-nft"] {
        let rule = ["-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE"];
        place.node.command(program, &rule);
    }
    place.node.nft("delete table inet theirs");
    for to in POD {
        assert_eq!(place.probe(0, to), spared(to));
    }
}

#[test]
fn with_a_user_only_that_users_connections_are_probes() {
    let place = Place::new();
    let host = OnNode::start(&place.node, settings("uid:4711"));
    host.set_addresses("c1", &POD);
    for (index, to) in POD.into_iter().enumerate() {
        assert_eq!(place.probe(4711, to), spared(to));
        assert_eq!(place.probe(0, to), captured(index)[0]);
        assert_eq!(place.call(to), captured(index)[1]);
    }
}

#[test]
fn with_socket_every_users_connections_are_probes() {
    let place = Place::new();
    let host = OnNode::start(&place.node, settings("socket"));
    host.set_addresses("c1", &POD);
    for (index, to) in POD.into_iter().enumerate() {
        assert_eq!(place.probe(4711, to), spared(to));
        assert_eq!(place.call(to), captured(index)[1]);
    }
}

#[test]
fn a_pod_of_both_families_is_probed_at_both_where_ipv6_is_not_captured() {
    let place = Place::with(Ambient {
        ipv6: Ipv6::Off,
        ..Ambient::default()
    });
    let host = OnNode::start(&place.node, ProbeSettings::default());
    host.set_addresses("c1", &POD);
    for to in POD {
        assert_eq!(place.probe(0, to), spared(to));
    }
    assert!(matches!(place.call(POD[1]), Arrival::Direct(_)));
    host.release("c1");
}

#[test]
fn a_pod_of_both_families_is_named_and_released_on_a_node_without_ipv6() {
    let place = Place::new();
    place
        .node
        .command("sysctl", &["-qw", "net.ipv6.conf.all.disable_ipv6=1"]);
    let host = OnNode::start(&place.node, ProbeSettings::default());
    host.set_addresses("c1", &POD);
    assert_eq!(place.probe(0, POD[0]), spared(POD[0]));
    assert!(!host.set_addresses("c1", &POD));
    host.release("c1");
    assert_eq!(place.probe(0, POD[0]), captured(0)[0]);
}
