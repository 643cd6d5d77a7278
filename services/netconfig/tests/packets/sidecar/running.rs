//! A pod that runs already is given its redirection, as one is for which the plugin was missing.

use netconfig::{apply::Phase, inspect};

use super::{
    mesh::{APPLICATION, EVERYWHERE, Mesh, PRIVILEGED, PROXY},
    process::Role,
    settings,
};
use crate::{
    probe::Dial,
    stand_in::By,
    world::{BACKENDS, Place, Pod, World, outside, pod},
};

fn held(world: &World, dial: &Dial) -> (crate::probe::Flow, Option<By>) {
    let (flow, found) = dial.hold(world);
    let by = found.by();
    (flow.unwrap_or_else(|| panic!("{dial:?}: {found}")), by)
}

/// What went past the proxy is cut, and the proxy's own goes on.
#[test]
fn connections_from_before_end_but_for_the_proxys_own() {
    for backend in BACKENDS {
        let mesh = Mesh::new(*backend, Pod::Dual, PROXY, Role::Answers);
        let world = &mesh.world;
        for family in world.families() {
            let out = Dial::tcp(Place::Pod, outside(*family), EVERYWHERE);
            let into = Dial::tcp(Place::Outside, pod(*family), EVERYWHERE);
            let (mut proxys, _) = held(world, &out.clone().of(PROXY));
            let past = [out.of(APPLICATION), into].map(|dial| held(world, &dial));
            mesh.apply(&settings::basic());
            proxys.talk().unwrap();
            for (mut flow, by) in past {
                assert!(flow.talk().is_err(), "{backend} {family}: {by:?} goes on");
            }
            world.remove(Phase::Final);
        }
    }
}

/// By whichever way they came to the proxy.
#[test]
fn connections_that_the_proxy_took_are_counted() {
    for backend in BACKENDS {
        for by_tproxy in [false, true] {
            let owner = if by_tproxy { PRIVILEGED } else { PROXY };
            let mut mesh = Mesh::new(*backend, Pod::Dual, owner, Role::Answers);
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
            assert_eq!(captured, 4, "{backend} {by_tproxy}");
        }
    }
}
