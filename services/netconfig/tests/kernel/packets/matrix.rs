//! Every check with every combination of settings, on pods whose redirection changes.

use std::{collections::BTreeMap, time::Duration};

use inpod_types::Reason;
use netconfig::{
    apply::Phase,
    rules::{Ambient, Ipv6, Redirection},
};

use crate::packets::{
    checks::{Check, checks, direct},
    pairwise::{every, pairwise},
    probe::{PATIENCE, TIMEOUT, at_once, run},
    world::{Pod, World},
};
use crate::scenarios;
use crate::support::sandbox;

pub(crate) fn all() -> bool {
    std::env::var_os("INTEGRATION_FULL").is_some_and(|value| value == "1")
}

pub(crate) const MAX_PODS: usize = 4;

/// Checks that wait for an answer at once.
const MAX_WAITING_CHECKS: usize = 16;

/// Each setting's number of values. Two means off and on, unless noted.
const COLUMNS: [usize; 9] = [Pod::ALL.len(), IPV6.len(), 2, 2, 2, 2, 2, 2, 2];

const IPV6: [Ipv6; 3] = [Ipv6::Auto, Ipv6::On, Ipv6::Off];

/// For pods of one kind.
type Groups = BTreeMap<Pod, Vec<Ambient>>;

#[test]
fn every_combination_of_settings_does_what_it_says() {
    let rows = if all() {
        every(&COLUMNS)
    } else {
        pairwise(&COLUMNS)
    };
    let mut groups = Groups::new();
    for row in &rows {
        let (pod, settings) = combination(row);
        groups.entry(pod).or_default().push(settings);
    }
    // A pod's client ports are the limit.
    let pods = groups
        .iter()
        .flat_map(|(pod, settings)| settings.chunks(100).map(move |some| (pod, some)));
    let failures = at_once(MAX_PODS, &pods.collect::<Vec<_>>(), |(pod, settings)| {
        try_pod(&World::new(**pod), settings)
    });
    let failures: Vec<_> = failures.into_iter().flatten().collect();
    assert!(
        failures.is_empty(),
        "{} combinations:\n{}",
        rows.len(),
        failures.join("\n")
    );
}

#[test]
fn where_ipv6_is_switched_off_it_is_refused_to_capture_it_and_nothing_is_changed() {
    let world = World::new(Pod::V4);
    let settings = Ambient {
        ipv6: Ipv6::On,
        ..scenario("everything")
    };
    let redirection = Redirection::Ambient(settings);
    let refused = world
        .writer
        .apply(&world.pod.netns, &redirection, &sandbox("c1"));
    assert_eq!(refused.unwrap_err().reason, Reason::Ipv6Unavailable);
    assert_eq!(run_all(&world, &direct(world.families())), [""; 0]);
}

fn combination(row: &[usize]) -> (Pod, Ambient) {
    let [pod, ipv6, rest @ ..] = row else {
        unreachable!("{row:?}")
    };
    let pod = Pod::ALL[*pod];
    let on: Vec<_> = rest.iter().map(|value| *value == 1).collect();
    let everything = scenario("everything");
    let chosen = |is_on, what| if is_on { what } else { Default::default() };
    let settings = Ambient {
        // A pod without IPv6 refuses required IPv6 capture.
        ipv6: if pod == Pod::V4 && IPV6[*ipv6] == Ipv6::On {
            Ipv6::Auto
        } else {
            IPV6[*ipv6]
        },
        dns_capture: on[0],
        bypass_inbound_capture: on[1],
        keep_existing_connections: on[2],
        virtual_interfaces: if on[3] {
            everything.virtual_interfaces
        } else {
            Vec::new()
        },
        probe_sources: if on[4] {
            everything.probe_sources
        } else {
            Vec::new()
        },
        probe_ports: everything.probe_ports.filter(|_| on[4]),
        exclusions: chosen(on[5], everything.exclusions),
    };
    (pod, settings)
}

pub(crate) fn name(settings: &Ambient) -> String {
    let Ambient {
        dns_capture,
        bypass_inbound_capture,
        virtual_interfaces,
        ipv6,
        exclusions,
        keep_existing_connections,
        probe_sources,
        probe_ports,
    } = settings;
    let words = [
        ("dns", *dns_capture),
        ("ingress", *bypass_inbound_capture),
        ("virtual-interfaces", !virtual_interfaces.is_empty()),
        ("ipv6-off", *ipv6 == Ipv6::Off),
        ("exclusions", *exclusions != Default::default()),
        ("keep-existing", *keep_existing_connections),
        ("probes", !probe_sources.is_empty()),
        ("probe-ports", probe_ports.is_some()),
    ];
    let chosen: Vec<_> = words
        .iter()
        .filter(|(_, chosen)| *chosen)
        .map(|(word, _)| *word)
        .collect();
    format!("[{}]", chosen.join(" "))
}

pub(crate) fn scenario(name: &str) -> Ambient {
    scenarios::all()
        .find(|(found, _)| *found == name)
        .unwrap()
        .1
}

/// Applies all settings to one pod, in order. Before, every check must be able to fail; afterwards
/// nothing may be captured.
fn try_pod(world: &World, settings: &[Ambient]) -> Vec<String> {
    let families = world.families();
    let mut checked: Vec<Check> = Vec::new();
    for check in settings
        .iter()
        .flat_map(|settings| checks(settings, families))
    {
        if !checked.contains(&check) {
            checked.push(check);
        }
    }
    let mut failures = controls(world, &direct(world.families()), &checked);
    for settings in settings {
        world.apply(settings);
        failures.extend(labelled_failures(
            world,
            &name(settings),
            &checks(settings, families),
        ));
        let redirection = Redirection::Ambient(settings.clone());
        let verified = world.writer.verify(&world.pod.netns, &redirection);
        assert_eq!(verified.unwrap().differences, [""; 0]);
    }
    for phase in [Phase::Drain, Phase::Final] {
        world.remove(phase);
        failures.extend(labelled_failures(
            world,
            &format!("{phase:?}"),
            &direct(families),
        ));
    }
    failures
}

fn labelled_failures(world: &World, when: &str, checks: &[Check]) -> Vec<String> {
    let failed = run_all(world, checks).into_iter();
    failed
        .map(|failure| format!("{:?} {when}: {failure}", world.kind))
        .collect()
}

/// Returns a sentence for each check that fails. A busy machine answers late: what fails is tried again with more time.
pub(crate) fn run_all(world: &World, checks: &[Check]) -> Vec<String> {
    let failed = try_all(world, checks, TIMEOUT);
    if failed.is_empty() {
        failed
    } else {
        try_all(world, checks, PATIENCE)
    }
}

/// The same, where silence is a failure that is expected.
pub(crate) fn run_all_once(world: &World, checks: &[Check]) -> Vec<String> {
    try_all(world, checks, TIMEOUT)
}

fn try_all(world: &World, checks: &[Check], patience: Duration) -> Vec<String> {
    let failed = at_once(MAX_WAITING_CHECKS, checks, |check| {
        run(world, &check.steps, patience)
            .err()
            .map(|why| format!("{check}: {why}"))
    });
    failed.into_iter().flatten().collect()
}

/// Captures everything without an exemption.
const CAPTURE_ALL: &str = "table inet greedy {
    chain prerouting {
        type nat hook prerouting priority -100
        meta l4proto tcp redirect to :15006
        udp dport 53 redirect to :15053
    }
    chain output {
        type nat hook output priority -100
        meta l4proto tcp redirect to :15001
        udp dport 53 redirect to :15053
    }
}";

/// Negative controls: each check must fail without rules, or where everything is captured. Returns a sentence for
/// each that passes in both, and for traffic that is not direct without rules.
pub(crate) fn controls(world: &World, direct: &[Check], checks: &[Check]) -> Vec<String> {
    let unlike = run_all(world, direct);
    let bare = run_all_once(world, checks);
    world.pod.nft(CAPTURE_ALL);
    let greedy = run_all_once(world, checks);
    world.pod.nft("delete table inet greedy");
    let fails = |failures: &[String], check: &Check| {
        let sentence = format!("{check}: ");
        failures
            .iter()
            .any(|failure| failure.starts_with(&sentence))
    };
    let idle = checks
        .iter()
        .filter(|check| !fails(&bare, check) && !fails(&greedy, check));
    let idle = idle.map(|check| format!("nothing makes it fail: {check}"));
    idle.chain(unlike).collect()
}
