//! A takeover from Istio's sidecar installer, during traffic.

use std::time::{Duration, Instant};

use netconfig::{Family, apply::Phase};

use super::{
    mesh::{EVERYWHERE, Mesh, PRIVILEGED, PROXY},
    observed::observed,
    process::Role,
    settings,
};
use crate::istio::Form;
use crate::istio_sidecar::Left;
use crate::packets::{
    before::{HALF_A_SECOND, last_answer},
    checks::{Check, answer, question},
    client::watch,
    incumbent,
    matrix::{MAX_PODS, run_all},
    probe::{Dial, Evidence, Flow, Step, at_once},
    stand_in::By,
    world::{Place, Pod, World, outside, pod},
};

/// Returns a client's calls, and the expected answers before and after.
fn always(families: &[Family], left: Left) -> Vec<Check> {
    let mut found = Vec::new();
    for family in families {
        let (pod, outside) = (pod(*family), outside(*family));
        let mut add = |dial: Dial, wanted: Evidence| {
            let steps = vec![Step { dial, wanted }];
            found.push(Check::new("what a client does", *family, steps));
        };
        let inbound = Dial::tcp(Place::Outside, pod, EVERYWHERE);
        let on = if left == Left::Tproxy {
            EVERYWHERE
        } else {
            15006
        };
        let wanted = answer(By::Ztunnel(15006), on, outside, inbound.to);
        add(inbound, wanted);
        let out = Dial::tcp(Place::Pod, outside, EVERYWHERE);
        let wanted = answer(By::Ztunnel(15001), 15001, pod, out.to);
        add(out, wanted);
        let asks = Dial::udp(Place::Pod, outside, 53);
        add(asks, question(By::Ztunnel(15053), 15053, pod));
    }
    found
}

#[test]
fn istios_rules_of_a_sidecar_are_taken_over_and_no_connection_is_cut_refused_or_let_out() {
    let mut work = Vec::new();
    for form in Form::ALL {
        work.extend(Left::ALL.map(|left| (form, left)));
    }
    let failures = at_once(MAX_PODS, &work, |(form, left)| {
        let failed = take_over(*form, *left).into_iter();
        failed
            .map(|failed| format!("{left:?} in {form:?}: {failed}"))
            .collect::<Vec<_>>()
    });
    assert_eq!(failures.concat(), [""; 0]);
}

/// Istio's installer captures only IPv4 by default: tracking has not seen IPv6 connections begin.
#[test]
fn where_istios_rules_of_a_sidecar_are_of_ipv4_alone_connections_of_ipv6_have_their_second() {
    let mesh = Mesh::new(Pod::Dual, PROXY, Role::Answers);
    let world = &mesh.world;
    crate::istio_sidecar::leave(Form::Iptables, Left::Redirect, &world.pod);
    for table in ["nat", "raw"] {
        world.pod.nft(&format!("delete table ip6 {table}"));
    }
    let hold = |family| {
        let dial = Dial::tcp(Place::Outside, pod(family), EVERYWHERE);
        let (flow, found) = dial.hold(world);
        (flow.unwrap(), found.by())
    };
    let (mut taken, by) = hold(Family::V4);
    assert_eq!(by, Some(By::Ztunnel(15006)));
    let (mut past, by) = hold(Family::V6);
    assert_eq!(by, Some(By::Application));
    let lasted = last_answer(&mut past, || {
        assert!(mesh.apply(&settings::basic()));
    });
    assert!(lasted >= HALF_A_SECOND, "cut after {lasted:?}");
    // The pod's firewall enables connection tracking.
    assert!(past.talk().is_err(), "it goes past the proxy");
    taken.talk().unwrap();
}

/// The kernel routes packets to a new IPv6 address a moment later (addrconf_dad_work in net/ipv6/addrconf.c), and
/// `ip` does not wait.
fn wait_for_address(world: &World) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let way = "local ::6 dev lo";
    while !world.pod.ip("-6 route show table local").contains(way) {
        assert!(Instant::now() < deadline, "no way to ::6");
    }
}

fn take_over(form: Form, left: Left) -> Vec<String> {
    let by_tproxy = left == Left::Tproxy;
    let owner = if by_tproxy { PRIVILEGED } else { PROXY };
    let mut mesh = Mesh::new(Pod::Dual, owner, Role::Answers);
    let settings = if by_tproxy {
        mesh.proxy.set_transparent(true);
        settings::by_tproxy(settings::names())
    } else {
        settings::names()
    };
    let world = &mesh.world;
    crate::istio_sidecar::leave(form, left, &world.pod);
    wait_for_address(world);
    let checks = observed(world.families(), by_tproxy);
    let always = always(world.families(), left);
    let mut failures = run_all(world, &checks);
    // Istio's TPROXY rules also capture port 15008.
    failures.retain(|failure| !(by_tproxy && failure.contains("to 15008 reaches")));
    let mut open: Vec<(String, Flow)> = Vec::new();
    for check in &checks {
        if let Some(step) = check.connection() {
            let (flow, found) = step.dial.hold(world);
            let flow = flow.filter(|_| found == step.wanted);
            open.extend(flow.map(|flow| (check.to_string(), flow)));
        }
    }
    assert!(open.len() > 2 * always.len(), "{form:?}");
    failures.extend(watch(world, &always, &always, || {
        assert!(mesh.apply(&settings));
    }));
    for (what, flow) in &mut open {
        failures.extend(flow.talk().err().map(|why| format!("cut: {what}: {why}")));
    }
    failures.extend(incumbent::left(world));
    for family in ["-4", "-6"] {
        let rules = world.pod.ip(&format!("{family} rule"));
        let wanted = usize::from(by_tproxy);
        let found = ["lookup 133", "lookup 10501"].map(|it| rules.matches(it).count());
        if found != [0, wanted] {
            failures.push(rules);
        }
    }
    failures.extend(run_all(world, &checks));
    assert!(!mesh.apply(&settings), "{form:?}");
    world.remove(Phase::Final);
    let address = world.pod.ip("-6 addr show dev lo");
    let routes = ["route show table all", "-6 route show table all"].map(|what| world.pod.ip(what));
    let routes = routes.concat();
    let left = ["table 133", "table 10501"].map(|table| routes.contains(table));
    let left = address.contains("::6/128") || left.contains(&true);
    failures.extend(left.then_some(address + &routes));
    failures
}
