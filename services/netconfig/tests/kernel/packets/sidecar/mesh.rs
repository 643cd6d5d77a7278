//! A pod with a sidecar, and its surroundings.

use std::net::{IpAddr, SocketAddr};

use netconfig::{
    Family,
    rules::{Redirection, Sidecar},
};

use super::process::{Proxy, Role};
use crate::packets::{
    probe::Owner,
    stand_in::{By, Listener},
    world::{INTERFACES, Pod, World, guest, loopback, pod},
};
use crate::support::Fresh;

/// The installer's rules identify the proxy by it.
pub(super) const PROXY: Owner = Owner {
    user: 1337,
    group: 1337,
};

/// TPROXY needs capabilities that the proxy's user lacks.
pub(super) const PRIVILEGED: Owner = Owner {
    user: 0,
    group: 1337,
};

pub(super) const APPLICATION: Owner = Owner {
    user: 1000,
    group: 1000,
};

/// The application's, on all addresses, on the pod's only, on loopback only.
pub(super) const EVERYWHERE: u16 = 8080;
pub(super) const AT_THE_POD: u16 = 7070;
pub(super) const AT_LOOPBACK: u16 = 9191;

/// Admits replies, but no unsolicited packets that look like them.
const FIREWALL: &str = "table inet firewall {
    chain input {
        type filter hook input priority 0
        iifname != \"lo\" udp sport 53 ct state new counter drop
    }
}";

pub(super) struct Mesh {
    // Dropped before the world below.
    pub(super) proxy: Proxy,
    pub(super) world: World,
}

impl Mesh {
    pub(super) fn new(kind: Pod, owner: Owner, role: Role) -> Self {
        Self::within(kind, Fresh::new(), None, (owner, role))
    }

    /// The netns belongs to a process's user namespace, whose IDs begin at a number.
    pub(super) fn within(
        kind: Pod,
        fresh: Fresh,
        users: Option<(u32, u32)>,
        (owner, role): (Owner, Role),
    ) -> Self {
        let first = users.map_or(0, |(_, first)| first);
        let mut world = World::without_ztunnel(kind, fresh, first);
        let more = more_listeners(&world);
        world.add(more);
        world.pod.nft(FIREWALL);
        let proxy = Proxy::start(&world, owner, role, users.map(|(process, _)| process));
        Self { proxy, world }
    }

    pub(super) fn apply(&self, settings: &Sidecar) -> bool {
        let redirection = Redirection::Sidecar(settings.clone());
        self.world.redirect(&redirection).changed
    }
}

fn more_listeners(world: &World) -> Vec<Listener> {
    let any: IpAddr = "::".parse().unwrap();
    let application =
        |at, port| Listener::tcp(&world.pod, By::Application, SocketAddr::new(at, port));
    let mut listeners = Vec::from([15008, 15020, 15021, 15090].map(|port| application(any, port)));
    for family in world.families() {
        listeners.push(application(pod(*family), AT_THE_POD));
        listeners.push(application(loopback(*family), AT_LOOPBACK));
        for name in INTERFACES {
            let at = SocketAddr::new(guest(*family, name), EVERYWHERE);
            listeners.push(Listener::tcp(&world.guest, By::Outside, at));
            let at = SocketAddr::new(at.ip(), 53);
            listeners.push(Listener::udp(&world.guest, By::Outside, at));
        }
    }
    listeners
}

/// Returns the source of the proxy's connections to the application.
pub(super) fn returning(family: Family) -> IpAddr {
    match family {
        Family::V4 => "127.0.0.6".parse().unwrap(),
        Family::V6 => "::6".parse().unwrap(),
    }
}
