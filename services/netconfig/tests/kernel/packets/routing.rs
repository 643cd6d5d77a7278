//! Routes and ip rules of other programs in the pod, and those of earlier releases.

use inpod_types::Reason;
use netconfig::{
    apply::{Phase, Writer},
    rules::{Ambient, Redirection},
};

use crate::packets::{
    checks::checks,
    client::watch,
    connections::{cut, open_all},
    matrix::{MAX_PODS, run_all, scenario},
    probe::at_once,
    world::{Pod, World},
};
use crate::support::{Fresh, sandbox};

const EARLIER_PODS: usize = 50;

/// Several CNI plugins and VPNs leave such items in a pod: routing tables that Istio and inpod use, too, and rules that
/// select the replies to ztunnel.
const FOREIGN: [&[&str]; 6] = [
    &[
        "route add blackhole default table 100",
        "-6 route add blackhole default table 100",
        "rule add from 192.0.2.7 lookup 100",
    ],
    &[
        "route add blackhole 192.0.2.0/24 table 10500",
        "-6 rule add from 2001:db8::7 lookup 10502",
    ],
    &[
        "rule add fwmark 0x111/0xfff lookup 200 pref 100",
        "route add blackhole default table 200",
    ],
    &[
        "rule add fwmark 0x10/0x430 blackhole pref 7",
        "-6 rule add fwmark 0x11/0x431 lookup 200 pref 3",
    ],
    &[
        "rule add fwmark 0x539 to 192.0.2.1 lookup 200 pref 32764",
        "rule add from 192.0.2.1 lookup 55 pref 500",
    ],
    &[
        "link add name vrf0 type veth peer name vrf1",
        "rule add not fwmark 0xca6c lookup 51820 suppress_prefixlength 32 pref 1",
    ],
];

fn plain() -> Redirection {
    Redirection::Ambient(scenario("plain"))
}

/// Returns all routes and ip rules except inpod's.
fn foreign(fresh: &Fresh) -> String {
    let shown = ["-4", "-6"].map(|family| {
        let rules = fresh.ip(&format!("{family} rule"));
        rules + &fresh.ip(&format!("{family} route show table all"))
    });
    let shown = shown.concat();
    let lines = shown.lines().filter(|line| !line.contains("proto 105"));
    lines.map(|line| format!("{line}\n")).collect()
}

#[test]
fn routing_of_others_stays_and_traffic_is_captured_beside_it() {
    let work: Vec<_> = FOREIGN.into_iter().collect();
    let failures = at_once(MAX_PODS, &work, |commands| {
        let world = World::new(Pod::Dual);
        commands
            .iter()
            .for_each(|command| drop(world.pod.ip(command)));
        let before = foreign(&world.pod);
        let settings = scenario("plain");
        world.apply(&settings);
        let mut failures = run_all(&world, &checks(&settings, world.families()));
        let after = foreign(&world.pod);
        failures.extend((after != before).then_some(after));
        world.remove(Phase::Final);
        let left = world.pod.ip("rule") + &world.pod.ip("-6 rule");
        failures.extend(left.contains("proto 105").then_some(left));
        let told = failures.into_iter();
        told.map(|it| format!("{commands:?}: {it}"))
            .collect::<Vec<_>>()
    });
    let failures: Vec<String> = failures.into_iter().flatten().collect();
    assert_eq!(failures, [""; 0]);
}

/// The CNI plugin sbr adds such a rule after inpod: the kernel puts a rule without a priority first.
#[test]
fn a_rule_that_comes_later_and_first_is_overtaken_and_cuts_nothing() {
    let world = World::new(Pod::Dual);
    let settings = scenario("plain");
    world.apply(&settings);
    let checks = checks(&settings, world.families());
    let mut open = open_all(&world, &checks);
    world.pod.ip("route add blackhole default table 101");
    world
        .pod
        .ip("rule add from 10.9.0.1 fwmark 0x111/0xfff lookup 101");
    let failures = run_all(&world, &checks);
    assert!(
        failures.iter().any(|it| it.contains("IPv4")),
        "{failures:?}"
    );
    let redirection = plain();
    let verified = world.writer.verify(&world.pod.netns, &redirection).unwrap();
    let expected = "pref 498 lookup 10500` is missing";
    assert!(verified.differences[0].contains(expected), "{verified:?}");
    assert!(world.apply(&settings).changed);
    assert_eq!(run_all(&world, &checks), [""; 0]);
    assert_eq!(cut(&world, &mut open), [""; 0]);
    assert!(!world.apply(&settings).changed);
}

#[test]
fn a_table_that_others_use_later_is_left_to_them_and_cuts_nothing() {
    let world = World::new(Pod::Dual);
    let settings = scenario("plain");
    world.apply(&settings);
    let checks = checks(&settings, world.families());
    let mut open = open_all(&world, &checks);
    world.pod.ip("route add blackhole 192.0.2.0/24 table 10500");
    let failed = watch(&world, &checks, &checks, || {
        assert!(world.apply(&settings).changed);
    });
    assert_eq!(failed, [""; 0]);
    assert_eq!(cut(&world, &mut open), [""; 0]);
    assert_eq!(
        world.pod.ip("route show table 10500"),
        "blackhole 192.0.2.0/24 \n"
    );
    assert!(
        world
            .pod
            .ip("route show table 10502")
            .contains("local default")
    );
}

#[test]
fn foreign_routing_without_a_way_around_is_named_and_nothing_written() {
    let everywhere: Vec<_> = (10_500..10_628)
        .map(|table| format!("route add blackhole 192.0.2.0/24 table {table}"))
        .collect();
    let first = vec!["rule add lookup 7 pref 0".to_owned()];
    for (commands, named) in [
        (everywhere, "an IPv4 route in table 10500"),
        (first, "foreign IPv4 ip rule `pref 0 lookup 7`"),
    ] {
        let fresh = Fresh::new();
        commands.iter().for_each(|command| drop(fresh.ip(command)));
        let before = foreign(&fresh);
        let applied = Writer::default().apply(&fresh.netns, &plain(), &sandbox("c1"));
        let failed = applied.unwrap_err();
        assert_eq!(failed.reason, Reason::RoutingTaken);
        assert!(failed.to_string().contains(named), "{failed}");
        assert_eq!(foreign(&fresh), before);
        assert_eq!(fresh.nft("list ruleset"), "");
    }
}

/// Gives a pod the routing of releases up to 0.1.
fn route_as_earlier(pod: &Fresh) {
    for family in ["-4", "-6"] {
        for command in [
            "route add local default dev lo table 100 proto 105",
            "rule add fwmark 0x111/0xfff pref 32764 lookup 100 protocol 105",
            "rule del pref 500",
            "route del local default dev lo table 10500",
        ] {
            pod.ip(&format!("{family} {command}"));
        }
    }
}

#[test]
fn routing_of_earlier_releases_is_taken_over_in_fifty_pods_and_cuts_nothing() {
    let before = scenario("plain");
    // Another setting, so that the tables are written again, too.
    let after = Ambient {
        bypass_inbound_capture: false,
        dns_capture: true,
        ..before.clone()
    };
    let pods: Vec<_> = (0..EARLIER_PODS).collect();
    let failures = at_once(MAX_PODS, &pods, |_| {
        let world = World::new(Pod::Dual);
        world.apply(&before);
        route_as_earlier(&world.pod);
        let [from, to] = [&before, &after].map(|it| checks(it, world.families()));
        let mut open = open_all(&world, &from);
        let mut failures = watch(&world, &from, &to, || {
            assert!(world.apply(&after).changed);
        });
        failures.extend(cut(&world, &mut open));
        for family in ["-4", "-6"] {
            let rules = world.pod.ip(&format!("{family} rule"));
            let is_ours = rules.contains("lookup 10500") && !rules.contains("32764");
            failures.extend((!is_ours).then_some(rules));
            let old = world.pod.ip(&format!("{family} route show table all"));
            failures.extend(old.contains("table 100 ").then_some(old));
        }
        failures
    });
    let failures: Vec<_> = failures.into_iter().flatten().collect();
    assert_eq!(failures, [""; 0]);
}
