//! Probes' destinations and source addresses.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use netconfig::{
    probes::{ProbeMatch, ProbeSettings},
    rules::{Ambient, Ipv6},
};

use crate::probes::place::{Arrival, OnNode, POD, Place, captured, dial, spared};
use crate::support::{ambient, plain, sandbox};

fn settings(probe_match: &str) -> ProbeSettings {
    ProbeSettings {
        probe_match: probe_match.parse().unwrap(),
        ..ProbeSettings::default()
    }
}

#[test]
fn a_probe_of_the_node_reaches_the_application_and_a_strangers_call_is_captured() {
    let place = Place::new();
    let host = OnNode::start(&place.node, ProbeSettings::default());
    for (index, to) in POD.into_iter().enumerate() {
        assert_eq!(place.probe(0, to), captured(index)[0], "not named yet");
    }
    host.set_addresses("c1", &POD);
    for (index, to) in POD.into_iter().enumerate() {
        assert_eq!(place.probe(0, to), spared(to));
        assert_eq!(place.probe(4711, to), spared(to));
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
fn off_writes_nothing_and_lets_nothing_through() {
    let place = Place::new();
    let host = OnNode::start(&place.node, settings("off"));
    let _guard = host.start_reconciler(Duration::ZERO);
    assert!(!host.set_addresses("c1", &POD));
    host.release("c1");
    assert_eq!(place.node.nft("list ruleset"), "");
    let spared_nobody = plain().apply(&place.pod.netns, &ambient(), &sandbox("c1"));
    assert!(spared_nobody.unwrap().changed);
    assert_eq!(place.probe(0, POD[0]), captured(0)[0]);
    assert_eq!(settings("off").sources().len(), 0);
    assert_eq!(settings("off").probe_match, ProbeMatch::Off);
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

/// No probe may fail or be captured.
fn probe_until(stop: &AtomicBool, probes: &AtomicU32, place: &Place) {
    while !stop.load(Ordering::Relaxed) {
        for to in POD {
            let stream = dial(0, SocketAddr::new(to.parse().unwrap(), 8080));
            assert!(stream.is_some(), "a probe failed");
            assert_eq!(place.arrival(), spared(to));
            probes.fetch_add(1, Ordering::Relaxed);
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Elements and rule are never absent, even during changes.
#[test]
fn a_prober_at_constant_rate_sees_no_gap_while_the_host_is_started_again_and_again() {
    let place = Arc::new(Place::new());
    OnNode::start(&place.node, ProbeSettings::default()).set_addresses("c1", &POD);
    let (stop, probes) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU32::new(0)),
    );
    let prober = {
        let (at, stop, probes) = (Arc::clone(&place), Arc::clone(&stop), Arc::clone(&probes));
        // Its own thread in the node's netns: the node's thread starts probe sets meanwhile.
        let probe = move || probe_until(&stop, &probes, &at);
        place.node.run(move || thread::spawn(probe))
    };
    let mut starts = 0;
    while !prober.is_finished() && (starts < 10 || probes.load(Ordering::Relaxed) < 200) {
        for probe_match in ["uid:0", "socket"] {
            // Each start has its own repair budget.
            let host = OnNode::start(&place.node, settings(probe_match));
            let reported = host.readiness.all();
            assert!(host.is_ok("probe-set"), "{reported:?}");
            assert_eq!(host.host.elements(), 2);
            starts += 1;
        }
    }
    stop.store(true, Ordering::Relaxed);
    prober.join().unwrap();
}
