//! During changes of a redirection, connections continue, and new ones are neither refused nor leaked.

use std::{
    thread,
    time::{Duration, Instant},
};

use netconfig::{
    Family,
    apply::Phase,
    inspect,
    rules::{Ambient, Ipv6},
};

use crate::istio::Form;
use crate::packets::{
    checks::{Check, checks, direct},
    client::watch,
    incumbent,
    matrix::{MAX_PODS, all, name, run_all, scenario},
    probe::{ASK_PATIENCE, Dial, Flow, Step, at_once},
    stand_in::By,
    world::{Place, Pod, World, outside, pod},
};

/// The number of times that each setting is toggled.
fn times() -> usize {
    if all() { 20 } else { 1 }
}

pub(crate) type Open = (String, Flow);

pub(crate) fn open_all(world: &World, checks: &[Check]) -> Vec<Open> {
    let mut open = Vec::new();
    for check in checks {
        if let Some(Step { dial, wanted }) = check.connection() {
            let (flow, found) = dial.hold(world);
            assert_eq!(found, *wanted, "{check}");
            open.push((check.to_string(), flow.unwrap()));
        }
    }
    open
}

/// Returns a sentence for each cut connection, whichever side sends first.
pub(crate) fn cut(world: &World, open: &mut [Open]) -> Vec<String> {
    world.speak();
    let cut = open.iter_mut().filter_map(|(what, flow)| {
        let why = flow.hear().and_then(|()| flow.talk()).err()?;
        Some(format!("cut: {what}: {why}"))
    });
    cut.collect()
}

/// Returns each option changed individually.
fn toggled(base: &Ambient) -> Vec<Ambient> {
    let with = |change: &dyn Fn(&mut Ambient)| {
        let mut toggled = base.clone();
        change(&mut toggled);
        toggled
    };
    let everything = scenario("everything");
    let swap = |list: &Vec<_>, full: &Vec<_>| {
        if list.is_empty() {
            full.clone()
        } else {
            Vec::new()
        }
    };
    vec![
        with(&|chosen| chosen.dns_capture ^= true),
        with(&|chosen| chosen.bypass_inbound_capture ^= true),
        with(&|chosen| chosen.keep_existing_connections ^= true),
        with(&|chosen| {
            let interfaces = &mut chosen.virtual_interfaces;
            *interfaces = if interfaces.is_empty() {
                everything.virtual_interfaces.clone()
            } else {
                Vec::new()
            };
        }),
        with(&|chosen| {
            chosen.probe_sources = swap(&chosen.probe_sources, &everything.probe_sources);
        }),
        with(&|chosen| {
            let were_listed = chosen.probe_ports.take().is_some();
            chosen.probe_ports = everything.probe_ports.clone().filter(|_| !were_listed);
        }),
        with(&|chosen| {
            let none = chosen.exclusions == Default::default();
            chosen.exclusions = if none {
                everything.exclusions.clone()
            } else {
                Default::default()
            };
        }),
        with(&|chosen| {
            chosen.ipv6 = if chosen.ipv6 == Ipv6::Off {
                Ipv6::Auto
            } else {
                Ipv6::Off
            }
        }),
    ]
}

#[test]
fn no_toggle_cuts_refuses_or_lets_out_a_connection() {
    let mut work = Vec::new();
    for base in ["plain", "everything"] {
        for toggled in toggled(&scenario(base)) {
            work.push((scenario(base), toggled));
        }
    }
    let failures = try_each(&work, |(base, toggled)| {
        toggle(&World::new(Pod::Dual), base, toggled)
    });
    assert_eq!(failures, [""; 0]);
}

/// Works on several pods at once; returns a sentence for each failure.
fn try_each<T: Sync>(work: &[T], act: impl Fn(&T) -> Vec<String> + Sync) -> Vec<String> {
    at_once(MAX_PODS, work, act).into_iter().flatten().collect()
}

fn toggle(world: &World, base: &Ambient, toggled: &Ambient) -> Vec<String> {
    let mut failures = Vec::new();
    world.apply(base);
    let mut open = open_all(world, &checks(base, world.families()));
    for _ in 0..times() {
        for (from, to) in [(base, toggled), (toggled, base)] {
            let (before, after) = (checks(from, world.families()), checks(to, world.families()));
            let failed = watch(world, &before, &after, || {
                world.apply(to);
            });
            if to.ipv6 == Ipv6::Off {
                open.retain(|(what, _)| !ends_with_ipv6(what));
            }
            let failed = failed.into_iter().chain(cut(world, &mut open));
            let when = format!("{} -> {}", name(from), name(to));
            failures.extend(failed.map(|failed| format!("{when}: {failed}")));
        }
    }
    failures
}

/// Without IPv6 capture, nothing routes replies to ztunnel's connections with a client's source address.
fn ends_with_ipv6(what: &str) -> bool {
    what.starts_with("IPv6: TCP of ztunnel in the name of")
}

/// Damaged rules are repaired during traffic.
#[test]
fn nothing_that_is_mended_cuts_refuses_or_lets_out_a_connection() {
    let mut failures = Vec::new();
    let world = World::new(Pod::Dual);
    let settings = scenario("everything");
    world.apply(&settings);
    let checks = checks(&settings, world.families());
    let mut open = open_all(&world, &checks);
    for tamper in [
        "add rule inet inpod-nat output counter",
        "add chain inet inpod-nat theirs",
        "delete table inet inpod-raw",
        "add rule inet inpod-mangle prerouting counter",
        "insert rule inet inpod-nat prerouting tcp dport 1 accept",
    ] {
        world.pod.nft(tamper);
        let failed = watch(&world, &checks, &checks, || {
            assert!(world.apply(&settings).changed);
        });
        failures.extend(
            failed
                .into_iter()
                .chain(cut(&world, &mut open))
                .map(|failed| format!("{tamper}: {failed}")),
        );
    }
    // Without a client: ztunnel's connections with other source addresses need this table.
    world.pod.nft("delete table inet inpod-mangle");
    assert!(world.apply(&settings).changed);
    failures.extend(cut(&world, &mut open));
    let failed = watch(&world, &checks, &checks, || {
        assert!(!world.apply(&settings).changed);
    });
    failures.extend(failed);
    assert_eq!(failures, [""; 0]);
}

#[test]
fn the_incumbents_rules_are_taken_over_and_no_connection_is_cut_refused_or_let_out() {
    let ours: &[_] = if all() {
        &["probes", "dns", "plain", "everything"]
    } else {
        &["probes", "everything"]
    };
    let mut work = Vec::new();
    for form in Form::ALL {
        work.extend(ours.iter().map(|ours| (form, scenario(ours))));
    }
    let failures = try_each(&work, |(form, ours)| {
        let failures = take_over(&World::new(Pod::Dual), *form, ours).into_iter();
        let when = format!("istio in {form:?} -> {}", name(ours));
        failures.map(|failed| format!("{when}: {failed}")).collect()
    });
    assert_eq!(failures, [""; 0]);
}

fn take_over(world: &World, form: Form, ours: &Ambient) -> Vec<String> {
    crate::istio::leave(form, &world.pod);
    // Istio exempts connections to the source of probes, too.
    let is_common = |check: &Check| !check.to_string().contains("where probes come from");
    let [before, after] = [&incumbent::settings(), ours].map(|settings| {
        let all = checks(settings, world.families()).into_iter();
        all.filter(is_common).collect::<Vec<_>>()
    });
    // Equivalent to our rules: the same checks hold.
    let mut failures = run_all(world, &before);
    let mut open = open_all(world, &before);
    failures.extend(watch(world, &before, &after, || {
        world.apply(ours);
    }));
    failures.extend(cut(world, &mut open));
    failures.extend(incumbent::left(world));
    failures.extend(run_all(world, &after));
    world.remove(Phase::Final);
    for family in ["-4", "-6"] {
        failures.push(world.pod.ip(&format!("{family} rule show pref 500")));
        failures.push(world.pod.ip(&format!("{family} route show table 10500")));
    }
    failures.retain(|failure| !failure.is_empty());
    failures
}

/// The drain phase cuts nothing. The final phase cuts, and counts, exactly the connections still captured.
#[test]
fn a_withdrawal_cuts_no_connection_before_its_end_and_refuses_none_ever() {
    for name in ["plain", "everything"] {
        let world = World::new(Pod::Dual);
        world.apply(&scenario(name));
        let captured = checks(&scenario(name), world.families());
        let free = direct(world.families());
        let held = Dial::tcp(Place::Pod, outside(Family::V4), 8080).hold(&world);
        assert_eq!(inspect::captured_flows(&world.pod.netns).unwrap(), 1);
        let mut of_before = open_all(&world, &captured);
        let failed = watch(&world, &captured, &free, || {
            assert!(world.remove(Phase::Drain).captured_flows > 1);
        });
        assert_eq!(failed, [""; 0], "{name}");
        assert_eq!(cut(&world, &mut of_before), [""; 0], "{name}");
        let mut of_drain = open_all(&world, &free);
        let failed = watch(&world, &free, &free, || {
            assert!(world.remove(Phase::Final).captured_flows > 1);
        });
        assert_eq!(failed, [""; 0], "{name}");
        assert_eq!(cut(&world, &mut of_drain), [""; 0], "{name}");
        assert!(held.0.unwrap().talk().is_err(), "{name}");
    }
}

#[test]
fn connections_from_before_go_on_where_that_is_chosen_and_only_there() {
    for keep_existing_connections in [true, false] {
        let settings = Ambient {
            keep_existing_connections,
            ..scenario("everything")
        };
        let world = World::new(Pod::Dual);
        let (before, after) = (
            direct(world.families()),
            checks(&settings, world.families()),
        );
        let mut open = open_all(&world, &before);
        if keep_existing_connections {
            let failed = watch(&world, &before, &after, || {
                world.apply(&settings);
            });
            assert_eq!(failed, [""; 0]);
            assert_eq!(cut(&world, &mut open), [""; 0]);
        } else {
            let is_plain = |what: &str| {
                what.contains(": inbound TCP reaches") || what.contains(": outbound TCP goes")
            };
            open.retain(|(what, _)| is_plain(what));
            world.apply(&settings);
            assert_eq!(cut(&world, &mut open).len(), 4);
        }
        assert_eq!(run_all(&world, &after), [""; 0]);
    }
}

/// Cuts even one with traffic meanwhile, which is therefore tracked: as after netconfig was killed
/// between an enrollment's two steps.
#[test]
fn connections_from_before_that_went_on_end_when_they_are_no_longer_to() {
    let world = World::new(Pod::Dual);
    let kept = scenario("keep-existing");
    let chosen = scenario("plain");
    let dials = world.families().iter().flat_map(|family| {
        [
            Dial::tcp(Place::Outside, pod(*family), 8080),
            Dial::tcp(Place::Pod, outside(*family), 8080),
        ]
    });
    let dials: Vec<_> = dials.collect();
    let hold = |dial: &Dial| (format!("{dial:?}"), dial.hold(&world).0.unwrap());
    let mut of_before: Vec<_> = dials.iter().map(hold).collect();
    world.apply(&kept);
    assert_eq!(cut(&world, &mut of_before), [""; 0]);
    let mut captured: Vec<_> = dials.iter().map(hold).collect();
    world.apply(&chosen);
    assert_eq!(cut(&world, &mut of_before).len(), 4);
    assert_eq!(cut(&world, &mut captured), [""; 0]);
    let after = checks(&chosen, world.families());
    assert_eq!(run_all(&world, &after), [""; 0]);
}

/// Negative control of the tests above.
#[test]
fn a_connection_that_is_let_out_and_one_that_is_refused_are_told() {
    let settings = scenario("plain");
    let dial = Dial::tcp(Place::Outside, pod(Family::V4), 8080);
    for (script, what) in [
        ("delete table inet inpod-nat", "application 8080"),
        (
            "insert rule inet inpod-nat prerouting tcp dport 8080 redirect to :9",
            "refused",
        ),
    ] {
        // Each call takes one of a world's ports.
        let world = World::new(Pod::Dual);
        world.apply(&settings);
        let checks = checks(&settings, world.families());
        let failed = watch(&world, &checks, &checks, || {
            world.pod.nft(script);
            // Calls that have just been cut need this long to fail.
            let began = Instant::now();
            while began.elapsed() < 2 * ASK_PATIENCE {
                assert_ne!(dial.ask(&world).by(), Some(By::Ztunnel(15006)));
                thread::sleep(Duration::from_millis(20));
            }
            world.apply(&settings);
        });
        assert!(
            failed.iter().any(|failed| failed.contains(what)),
            "{script}: {failed:?}"
        );
    }
}
