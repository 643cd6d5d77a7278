//! An open socket for DNS queries follows DNS capture on and off.

use netconfig::{
    apply::Phase,
    rules::{Ambient, Ipv6},
};

use crate::istio::Form;
use crate::packets::{
    checks::{checks, direct},
    client::wanted,
    incumbent,
    matrix::scenario,
    probe::{Dial, Flow},
    world::{Place, Pod, World, outside},
};

/// One socket per family.
struct Sockets(Vec<(Dial, Flow)>);

impl Sockets {
    fn open(world: &World) -> Self {
        let open = |family: &_| {
            let dial = Dial::udp(Place::Pod, outside(*family), 53);
            let flow = dial.hold(world).0.unwrap();
            (dial, flow)
        };
        Self(world.families().iter().map(open).collect())
    }

    /// The redirection's listener answers, or the outside without one.
    fn are_answered(&mut self, world: &World, when: &str, settings: Option<&Ambient>) {
        let families = world.families();
        let checks =
            settings.map_or_else(|| direct(families), |settings| checks(settings, families));
        for (dial, flow) in &mut self.0 {
            let found = flow
                .ask()
                .map_or_else(|error| error.to_string(), |answer| answer.to_string());
            assert_eq!(found, wanted(&checks, dial).to_string(), "{when}: {dial:?}");
        }
    }
}

fn names() -> Ambient {
    scenario("dns")
}

#[test]
fn a_socket_that_is_held_open_follows_dns_capture_in_both_directions() {
    let world = World::new(Pod::Dual);
    let mut sockets = Sockets::open(&world);
    let plain = scenario("plain");
    for round in 0..3 {
        for (what, settings) in [("on", &names()), ("off", &plain)] {
            world.apply(settings);
            sockets.are_answered(&world, &format!("{what} {round}"), Some(settings));
        }
    }
    world.apply(&names());
    sockets.are_answered(&world, "on", Some(&names()));
    for phase in [Phase::Drain, Phase::Final] {
        world.remove(phase);
        sockets.are_answered(&world, &format!("{phase:?}"), None);
    }
}

#[test]
fn a_socket_that_is_held_open_follows_the_capture_of_ipv6() {
    let world = World::new(Pod::Dual);
    let mut sockets = Sockets::open(&world);
    for ipv6 in [Ipv6::Auto, Ipv6::Off, Ipv6::On, Ipv6::Off] {
        let settings = Ambient { ipv6, ..names() };
        world.apply(&settings);
        sockets.are_answered(&world, &format!("{ipv6:?}"), Some(&settings));
    }
}

/// It bypassed ztunnel without the rules.
#[test]
fn a_socket_that_is_held_open_comes_back_when_rules_are_mended() {
    let world = World::new(Pod::Dual);
    let mut sockets = Sockets::open(&world);
    for script in [
        "delete table inet inpod-nat",
        "flush chain inet inpod-nat output",
        "flush ruleset",
    ] {
        world.apply(&names());
        sockets.are_answered(&world, "before", Some(&names()));
        world.pod.nft(script);
        // Its conntrack entry may survive the rules; a new socket certainly bypasses ztunnel.
        let mut others = Sockets::open(&world);
        others.are_answered(&world, script, None);
        world.apply(&names());
        sockets.are_answered(&world, script, Some(&names()));
        others.are_answered(&world, script, Some(&names()));
    }
}

#[test]
fn a_socket_that_is_held_open_follows_a_takeover_from_the_incumbent() {
    for settings in [names(), scenario("plain")] {
        let world = World::new(Pod::Dual);
        crate::istio::leave(Form::Nft, &world.pod);
        let mut sockets = Sockets::open(&world);
        sockets.are_answered(&world, "theirs", Some(&incumbent::settings()));
        world.apply(&settings);
        sockets.are_answered(&world, "ours", Some(&settings));
    }
}
