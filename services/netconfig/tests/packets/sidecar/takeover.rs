//! What Istio's sidecar installer left is taken over while everything goes on.

use std::time::{Duration, Instant};

use netconfig::{Backend, Family, apply::Phase};

use super::{
    mesh::{EVERYWHERE, Mesh, PRIVILEGED, PROXY},
    observed::observed,
    process::Role,
    settings,
};
use crate::{
    before::{MOST_OF_A_SECOND, last_answer},
    checks::{Check, answer, question},
    client::watch,
    incumbent,
    istio_sidecar::{self, Left},
    matrix::{HANDS, all, run_all},
    probe::{Dial, Evidence, Flow, Step, at_once},
    stand_in::By,
    world::{BACKENDS, Place, Pod, World, outside, pod},
};

/// What a client does all the time, and what comes of it before and after.
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
    for (number, form) in BACKENDS.iter().enumerate() {
        for (other, backend) in BACKENDS.iter().enumerate() {
            for left in Left::ALL {
                // Where not all are tried, each form and each backend is.
                let is_chosen = number == other || (number + 1) % BACKENDS.len() == other;
                if is_chosen || all() {
                    work.push((*form, *backend, left));
                }
            }
        }
    }
    let failures = at_once(HANDS, &work, |(form, backend, left)| {
        let told = take_over(*form, *backend, *left).into_iter();
        told.map(|told| format!("{left:?} in {form} -> {backend}: {told}"))
            .collect::<Vec<_>>()
    });
    assert_eq!(failures.concat(), [""; 0]);
}

/// Its installer captures IPv4 alone unless it is told otherwise: of IPv6 nobody saw a connection begin.
#[test]
fn where_istios_rules_of_a_sidecar_are_of_ipv4_alone_connections_of_ipv6_have_their_second() {
    let mesh = Mesh::new(Backend::Nftables, Pod::Dual, PROXY, Role::Answers);
    let world = &mesh.world;
    istio_sidecar::leave(Backend::IptablesNft, Left::Redirect, &world.pod);
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
    assert!(lasted >= MOST_OF_A_SECOND, "cut after {lasted:?}");
    // The pod's own firewall has connection tracking know it.
    assert!(past.talk().is_err(), "it goes past the proxy");
    taken.talk().unwrap();
}

/// The kernel leads packets to a new address of IPv6 a moment after it has it (addrconf_dad_work in
/// net/ipv6/addrconf.c), and nobody waits for that who adds one by ip.
fn wait_for_address(world: &World) {
    let deadline = Instant::now() + Duration::from_secs(10);
    let way = "local ::6 dev lo";
    while !world.pod.ip("-6 route show table local").contains(way) {
        assert!(Instant::now() < deadline, "no way to ::6");
    }
}

fn take_over(form: Backend, backend: Backend, left: Left) -> Vec<String> {
    let by_tproxy = left == Left::Tproxy;
    let owner = if by_tproxy { PRIVILEGED } else { PROXY };
    let mut mesh = Mesh::new(backend, Pod::Dual, owner, Role::Answers);
    let settings = if by_tproxy {
        mesh.proxy.set_transparent(true);
        settings::by_tproxy(settings::names())
    } else {
        settings::names()
    };
    let world = &mesh.world;
    istio_sidecar::leave(form, left, &world.pod);
    wait_for_address(world);
    let checks = observed(world.families(), by_tproxy);
    let always = always(world.families(), left);
    let mut failures = run_all(world, &checks);
    // Istio's rules of TPROXY capture port 15008 as well.
    failures.retain(|failure| !(by_tproxy && failure.contains("to 15008 reaches")));
    let mut open: Vec<(String, Flow)> = Vec::new();
    for check in &checks {
        if let Some(step) = check.connection() {
            let (flow, found) = step.dial.hold(world);
            let flow = flow.filter(|_| found == step.wanted);
            open.extend(flow.map(|flow| (check.to_string(), flow)));
        }
    }
    assert!(open.len() > 2 * always.len(), "{form} {backend}");
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
        if rules.matches("lookup 133").count() != wanted {
            failures.push(rules);
        }
    }
    failures.extend(run_all(world, &checks));
    assert!(!mesh.apply(&settings), "{form} {backend}");
    world.remove(Phase::Final);
    let address = world.pod.ip("-6 addr show dev lo");
    let routes = ["route show table all", "-6 route show table all"].map(|what| world.pod.ip(what));
    let left = address.contains("::6/128") || routes.concat().contains("table 133");
    failures.extend(left.then_some(address + &routes.concat()));
    failures
}
