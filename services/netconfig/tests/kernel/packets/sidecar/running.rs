//! A running pod receives its redirection, as after a missing plugin.

use std::time::{Duration, Instant};

use netconfig::{
    apply::{Applied, Phase},
    inspect::{self, Proxies},
    rules::{Redirection, Sidecar},
};

use super::{
    mesh::{APPLICATION, EVERYWHERE, Mesh, PRIVILEGED, PROXY},
    process::Role,
    settings,
};
use crate::packets::{
    probe::Dial,
    stand_in::By,
    world::{Place, Pod, World, outside, pod},
};

fn held(world: &World, dial: &Dial) -> (crate::packets::probe::Flow, Option<By>) {
    let (flow, found) = dial.hold(world);
    let by = found.by();
    (flow.unwrap_or_else(|| panic!("{dial:?}: {found}")), by)
}

/// Connections that bypassed the proxy are cut; the proxy's own continue.
#[test]
fn connections_from_before_end_but_for_the_proxys_own() {
    let mesh = Mesh::new(Pod::Dual, PROXY, Role::Answers);
    let world = &mesh.world;
    for family in world.families() {
        let out = Dial::tcp(Place::Pod, outside(*family), EVERYWHERE);
        let into = Dial::tcp(Place::Outside, pod(*family), EVERYWHERE);
        let (mut proxys, _) = held(world, &out.clone().of(PROXY));
        let past = [out.of(APPLICATION), into].map(|dial| held(world, &dial));
        mesh.apply(&settings::basic());
        proxys.talk().unwrap();
        for (mut flow, by) in past {
            assert!(flow.talk().is_err(), "{family}: {by:?} goes on");
        }
        world.remove(Phase::Final);
    }
}

/// Some of the proxy's connections, such as to its control plane, last forever.
#[test]
fn nobody_waits_for_the_proxys_own_connections_and_others_have_a_second_to_end() {
    let mesh = Mesh::new(Pod::Dual, PROXY, Role::Answers);
    let world = &mesh.world;
    let redirection = Redirection::Sidecar(settings::basic());
    let second = Duration::from_secs(1);
    let waits = || {
        let began = Instant::now();
        assert!(world.redirect(&redirection).changed);
        let took = began.elapsed();
        world.remove(Phase::Final);
        took >= second
    };
    let hold = |owner| {
        let families = world.families().iter();
        let out = families.map(|family| Dial::tcp(Place::Pod, outside(*family), EVERYWHERE));
        out.map(|dial| held(world, &dial.of(owner)))
            .collect::<Vec<_>>()
    };
    let _proxys = hold(PROXY);
    // Writing rules may take as long on a busy machine, but not every time.
    assert!((0..10).any(|_| !waits()), "it waits each time");
    let _others = hold(APPLICATION);
    assert!(waits(), "it does not wait");
}

/// Returns the application's connections that bypass the proxy. Without its rules no process is the proxy.
#[test]
fn the_proxys_own_connections_are_not_direct_and_those_that_go_past_it_are() {
    let mesh = Mesh::new(Pod::Dual, PROXY, Role::Answers);
    let world = &mesh.world;
    let mut flows = Vec::new();
    for family in world.families() {
        let out = Dial::tcp(Place::Pod, outside(*family), EVERYWHERE);
        flows.extend([PROXY, APPLICATION].map(|owner| held(world, &out.clone().of(owner))));
    }
    let seen = || {
        let proxies = world.writer.observe(&world.pod.netns).unwrap().proxies;
        inspect::sockets(&world.pod.netns, &proxies)
            .unwrap()
            .direct_flows
    };
    assert_eq!(seen(), 4);
    let keeps = Redirection::Sidecar(Sidecar {
        keep_existing_connections: true,
        ..settings::basic()
    });
    let Applied { direct_flows, .. } = world.redirect(&keeps);
    assert_eq!((direct_flows, seen()), (2, 2));
    let all = inspect::direct_flows(&world.pod.netns, &Proxies::default());
    assert_eq!(all.unwrap(), 4);
}

/// Counts them whichever way they came.
#[test]
fn connections_that_the_proxy_took_are_counted() {
    for by_tproxy in [false, true] {
        let owner = if by_tproxy { PRIVILEGED } else { PROXY };
        let mut mesh = Mesh::new(Pod::Dual, owner, Role::Answers);
        let settings = if by_tproxy {
            mesh.proxy.set_transparent(true);
            settings::by_tproxy(settings::basic())
        } else {
            settings::basic()
        };
        mesh.apply(&settings);
        let world = &mesh.world;
        let mut flows = Vec::new();
        for family in world.families() {
            let out = Dial::tcp(Place::Pod, outside(*family), EVERYWHERE).of(APPLICATION);
            let into = Dial::tcp(Place::Outside, pod(*family), EVERYWHERE);
            flows.extend([out, into].map(|dial| held(world, &dial)));
        }
        let by = [By::Ztunnel(15001), By::Ztunnel(15006)];
        assert!(flows.iter().all(|(_, found)| by.map(Some).contains(found)));
        let captured = inspect::captured_flows(&world.pod.netns).unwrap();
        assert_eq!(captured, 4, "{by_tproxy}");
    }
}
