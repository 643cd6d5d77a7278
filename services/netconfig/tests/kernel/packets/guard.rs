//! On ztunnel's ports, only a listener with ztunnel's mark receives anything.

use std::net::SocketAddr;

use netconfig::{
    Family,
    rules::{Ambient, Redirection},
};

use crate::packets::{
    matrix::scenario,
    mutation::{Part, rules},
    probe::{Dial, Evidence},
    stand_in::{By, Listener},
    world::{Place, Pod, World, loopback, outside, pod},
};
use crate::support::Fresh;

fn world() -> World {
    World::without_ztunnel(Pod::Dual, Fresh::new(), 0)
}

fn everything_captured() -> Ambient {
    scenario("dns")
}

/// Opens a process's listeners on ztunnel's ports; ports above 1024 need no capability.
fn occupy(world: &World) -> Vec<Listener> {
    let any = |port| SocketAddr::new("::".parse().unwrap(), port);
    let by = |port| By::Ztunnel(port);
    let tcp = |port| Listener::tcp(&world.pod, by(port), any(port));
    let mut listeners = Vec::from([15001, 15006, 15008].map(tcp));
    for family in Family::ALL {
        let at = SocketAddr::new(loopback(family), 15053);
        listeners.push(Listener::tcp(&world.pod, by(15053), at));
        listeners.push(Listener::udp(&world.pod, by(15053), at));
    }
    listeners
}

/// Connections and queries to each of ztunnel's ports, by the port.
fn dials(family: Family) -> [(u16, Dial); 5] {
    let (pod, outside) = (pod(family), outside(family));
    [
        (15001, Dial::tcp(Place::Pod, outside, 8080)),
        (15006, Dial::tcp(Place::Outside, pod, 8080)),
        (15008, Dial::tcp(Place::Outside, pod, 15008)),
        (15053, Dial::tcp(Place::Pod, outside, 53)),
        (15053, Dial::udp(Place::Pod, outside, 53)),
    ]
}

fn evidence(world: &World) -> Vec<(String, u16, Evidence)> {
    let dials = Family::ALL.into_iter().flat_map(dials);
    let ask = |(port, dial): (u16, Dial)| (format!("{dial:?}"), port, dial.ask(world));
    dials.map(ask).collect()
}

#[test]
fn a_listener_without_the_mark_gets_nothing() {
    let mut world = world();
    world.apply(&everything_captured());
    let listeners = occupy(&world);
    world.add(listeners);
    for (dial, _, found) in evidence(&world) {
        let refused = Evidence::Refused(std::io::ErrorKind::ConnectionRefused);
        assert_eq!(found, refused, "{dial}");
    }
}

#[test]
fn a_listener_with_the_mark_is_reached() {
    let mut world = world();
    world.apply(&everything_captured());
    let listeners = occupy(&world);
    listeners.iter().for_each(Listener::mark_as_ztunnel);
    world.add(listeners);
    for (dial, port, found) in evidence(&world) {
        assert_eq!(found.by(), Some(By::Ztunnel(port)), "{dial}: {found}");
    }
}

#[test]
fn every_rule_of_the_guard_is_needed() {
    let mut world = world();
    let settings = everything_captured();
    world.apply(&settings);
    let listeners = occupy(&world);
    world.add(listeners);
    let parts = rules(&Redirection::Ambient(settings.clone()));
    let guards: Vec<_> = parts.iter().filter(|part| part.is_guard()).collect();
    for (port, dial) in Family::ALL.into_iter().flat_map(dials) {
        let of_port = |part: &&&Part| part.what().contains(&format!("port {port} "));
        // From the last one, so that the places of the others stay.
        for part in guards.iter().rev().filter(of_port) {
            part.delete(&world);
        }
        assert_eq!(dial.ask(&world).by(), Some(By::Ztunnel(port)), "{dial:?}");
        assert!(world.apply(&settings).changed, "{dial:?}");
    }
}

#[test]
fn connections_outlive_the_mark_of_their_listener() {
    let mut world = world();
    world.apply(&everything_captured());
    let listeners = occupy(&world);
    listeners.iter().for_each(Listener::mark_as_ztunnel);
    let dials = Family::ALL.into_iter().flat_map(dials);
    let mut open: Vec<_> = dials
        .map(|(_, dial)| dial)
        .filter(Dial::is_tcp)
        .map(|dial| dial.hold(&world).0.unwrap())
        .collect();
    listeners.iter().for_each(Listener::unmark);
    world.add(listeners);
    world.apply(&scenario("everything"));
    world.apply(&everything_captured());
    for flow in &mut open {
        flow.talk().unwrap();
    }
}

/// Stock ztunnel forwards a connection of the pod to its own address on port 15001 to itself, again and again.
#[test]
fn ztunnel_cannot_call_its_own_outbound_listener() {
    let mut world = world();
    world.apply(&everything_captured());
    let listeners = occupy(&world);
    listeners.iter().for_each(Listener::mark_as_ztunnel);
    world.add(listeners);
    for family in Family::ALL {
        let to_itself = Dial::tcp(Place::Pod, pod(family), 15001);
        assert_eq!(to_itself.ask(&world).by(), Some(By::Ztunnel(15001)));
        let again = to_itself.marked(0x539).ask(&world);
        let refused = Evidence::Refused(std::io::ErrorKind::ConnectionRefused);
        assert_eq!(again, refused, "{family}");
    }
}
