//! A pod, the outside, and a guest: linked network namespaces.

use std::{
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicU16, Ordering},
    time::{Duration, Instant},
};

use netconfig::{
    Family,
    apply::{Applied, Phase, Removed, Writer},
    rules::{Ambient, Redirection},
};

use crate::packets::{
    checks,
    probe::Dial,
    sidecar,
    stand_in::{By, Listener},
};
use crate::support::{Fresh, sandbox};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Pod {
    V4,
    V6,
    Dual,
}

impl Pod {
    pub(crate) const ALL: [Self; 3] = [Self::V4, Self::V6, Self::Dual];

    pub(crate) fn families(self) -> &'static [Family] {
        match self {
            Self::V4 => &[Family::V4],
            Self::V6 => &[Family::V6],
            Self::Dual => &Family::ALL,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Pod,
    Outside,
    /// A virtual machine in the pod.
    Guest,
}

pub(crate) fn pod(family: Family) -> IpAddr {
    either(family, "10.9.0.1", "fd09::1")
}

/// Also the gateway to all others.
pub(crate) fn outside(family: Family) -> IpAddr {
    either(family, "10.9.0.2", "fd09::2")
}

/// Returns the guest behind this interface.
pub(crate) fn guest(family: Family, interface: &str) -> IpAddr {
    let number = INTERFACES.iter().position(|name| *name == interface);
    let (v4, v6) = guest_network(number.unwrap());
    either(family, &format!("{v4}.2"), &format!("{v6}::2"))
}

pub(crate) fn either(family: Family, v4: &str, v6: &str) -> IpAddr {
    match family {
        Family::V4 => v4.parse().unwrap(),
        Family::V6 => v6.parse().unwrap(),
    }
}

pub(crate) fn loopback(family: Family) -> IpAddr {
    either(family, "127.0.0.1", "::1")
}

/// The pod's interfaces to the guest.
pub(crate) const INTERFACES: [&str; 3] = ["vm0", "k6t-net1", "vm1"];

fn guest_network(number: usize) -> (String, String) {
    (format!("10.200.{number}"), format!("fd20:0:0:{number}"))
}

/// The usual ones, and the scenarios' exclusions.
const APPLICATION_PORTS: [u16; 5] = [53, 8080, 9089, 9090, 9091];

/// The outside's, chosen likewise.
const OUTSIDE_PORTS: [u16; 8] = [53, 8080, 5431, 5432, 5433, 6378, 6379, 6380];

/// ztunnel's that accept foreign destinations.
const TRANSPARENT: [u16; 2] = [15006, 15008];

/// Each client port is used once, so that no conntrack entry affects a later connection.
const CLIENT_PORTS: std::ops::Range<u16> = 16_000..65_000;

/// Three network namespaces with all listeners.
pub(crate) struct World {
    pub(crate) pod: Fresh,
    pub(crate) kind: Pod,
    pub(crate) writer: Writer,
    outside: Fresh,
    pub(crate) guest: Fresh,
    next_port: AtomicU16,
    listeners: Vec<Listener>,
    /// The host's ID of the pod's first user.
    pub(crate) users_from: u32,
}

impl World {
    pub(crate) fn new(kind: Pod) -> Self {
        let mut world = Self::without_ztunnel(kind, Fresh::new(), 0);
        let ztunnels = world.listen_as_ztunnel();
        world.listeners.extend(ztunnels);
        for port in TRANSPARENT {
            let is_wanted = |listener: &&Listener| listener.by == By::Ztunnel(port);
            let listeners = world.listeners.iter().filter(is_wanted);
            listeners.for_each(|listener| listener.set_transparent(true));
        }
        world
    }

    /// Nothing listens for captured traffic.
    pub(crate) fn without_ztunnel(kind: Pod, pod: Fresh, users_from: u32) -> Self {
        let world = Self {
            pod,
            kind,
            users_from,
            writer: Writer::default(),
            outside: Fresh::new(),
            guest: Fresh::new(),
            next_port: AtomicU16::new(CLIENT_PORTS.start),
            listeners: Vec::new(),
        };
        world.connect();
        let listeners = world.listen();
        let world = Self { listeners, ..world };
        world.wait_for_links();
        world
    }

    pub(crate) fn families(&self) -> &'static [Family] {
        self.kind.families()
    }

    pub(crate) fn at(&self, place: Place) -> &Fresh {
        match place {
            Place::Pod => &self.pod,
            Place::Outside => &self.outside,
            Place::Guest => &self.guest,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        let port = self.next_port.fetch_add(1, Ordering::Relaxed);
        assert!(
            CLIENT_PORTS.contains(&port),
            "all ports were used: another world is needed"
        );
        port
    }

    pub(crate) fn apply(&self, settings: &Ambient) -> Applied {
        self.redirect(&Redirection::Ambient(settings.clone()))
    }

    pub(crate) fn redirect(&self, redirection: &Redirection) -> Applied {
        let applied = self
            .writer
            .apply(&self.pod.netns, redirection, &sandbox("c1"));
        applied.unwrap()
    }

    pub(crate) fn remove(&self, phase: Phase) -> Removed {
        let removed = self.writer.remove(&self.pod.netns, &sandbox("c1"), phase);
        removed.unwrap()
    }

    /// Sends data on each listener's connections.
    pub(crate) fn speak(&self) {
        self.listeners.iter().for_each(Listener::speak);
    }

    fn connect(&self) {
        for fresh in [&self.pod, &self.outside, &self.guest] {
            // Otherwise an IPv6 address is usable only after a second.
            write(fresh, "ipv6/conf/all/accept_dad", "0");
            write(fresh, "ipv6/conf/default/accept_dad", "0");
        }
        // The guest's uncaptured packets are forwarded to the outside.
        write(&self.pod, "ipv4/ip_forward", "1");
        write(&self.pod, "ipv6/conf/all/forwarding", "1");
        if self.kind == Pod::V4 {
            write(&self.pod, "ipv6/conf/all/disable_ipv6", "1");
            write(&self.pod, "ipv6/conf/default/disable_ipv6", "1");
        }
        batch(&self.pod, &self.links());
        let (mut pod, mut outside, mut guest) = (Vec::new(), Vec::new(), Vec::new());
        for family in self.families() {
            addresses(*family, &mut pod, &mut outside);
            addresses_of_guests(*family, &mut pod, &mut guest);
        }
        for (fresh, lines) in [
            (&self.pod, pod),
            (&self.outside, outside),
            (&self.guest, guest),
        ] {
            batch(fresh, &lines);
        }
    }

    fn links(&self) -> Vec<String> {
        let link = |name: &str, to: &Fresh| {
            let task = task_of(to);
            [
                format!("link add {name} type veth peer name {name} netns {task}"),
                format!("link set {name} up"),
            ]
        };
        let guests = INTERFACES.iter().flat_map(|name| link(name, &self.guest));
        link("eth0", &self.outside)
            .into_iter()
            .chain(guests)
            .collect()
    }

    /// IPv6 may learn a second later that a link is up.
    fn wait_for_links(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        for family in self.families() {
            let dial = |at, by| Dial::udp(at, outside(*family), 53).by(by);
            let guests = INTERFACES.map(|name| dial(Place::Guest, name));
            for dial in guests.into_iter().chain([dial(Place::Pod, "eth0")]) {
                while dial.ask(self).by() != Some(By::Outside) {
                    assert!(Instant::now() < deadline, "nothing arrives: {dial:?}");
                }
            }
        }
    }

    pub(crate) fn add(&mut self, listeners: impl IntoIterator<Item = Listener>) {
        self.listeners.extend(listeners);
    }

    fn listen_as_ztunnel(&self) -> Vec<Listener> {
        let any = |port| SocketAddr::new("::".parse().unwrap(), port);
        let tcp = |port| Listener::tcp(&self.pod, By::Ztunnel(port), any(port));
        let mut listeners = Vec::from([15001, 15006, 15008].map(tcp));
        let resolver = By::Ztunnel(15053);
        for family in self.families() {
            let at = SocketAddr::new(loopback(*family), 15053);
            listeners.push(Listener::tcp(&self.pod, resolver, at));
            listeners.push(Listener::udp(&self.pod, resolver, at));
        }
        listeners.iter().for_each(Listener::mark_as_ztunnel);
        listeners
    }

    fn listen(&self) -> Vec<Listener> {
        let applications = APPLICATION_PORTS.map(|port| (&self.pod, By::Application, port));
        let outsides = OUTSIDE_PORTS.map(|port| (&self.outside, By::Outside, port));
        let tcp = applications.into_iter().chain(outsides);
        // On both families, like ztunnel.
        let any = |port| SocketAddr::new("::".parse().unwrap(), port);
        let tcp = tcp.map(|(fresh, by, port)| Listener::tcp(fresh, by, any(port)));
        let mut listeners: Vec<_> = tcp.collect();
        for family in self.families() {
            let at = |address, port| SocketAddr::new(address, port);
            listeners.extend([
                Listener::udp(&self.pod, By::Application, at(loopback(*family), 53)),
                Listener::udp(&self.outside, By::Outside, at(outside(*family), 53)),
            ]);
        }
        listeners
    }
}

fn addresses(family: Family, pod_lines: &mut Vec<String>, outside_lines: &mut Vec<String>) {
    let (length, host, guests) = match family {
        Family::V4 => ("/24", "/32", "10.200.0.0/16"),
        Family::V6 => ("/64 nodad", "/128 nodad", "fd20::/48"),
    };
    let (pod, outside) = (pod(family), outside(family));
    pod_lines.push(format!("addr add {pod}{length} dev eth0"));
    pod_lines.push(format!("route add default via {outside} dev eth0"));
    outside_lines.push("link set eth0 up".to_owned());
    outside_lines.push(format!("addr add {outside}{length} dev eth0"));
    let more = checks::addresses(family).chain(sidecar::more_addresses(family));
    outside_lines.extend(more.map(|more| format!("addr add {more}{host} dev eth0")));
    outside_lines.push(format!("route add {guests} via {pod} dev eth0"));
}

fn addresses_of_guests(family: Family, pod_lines: &mut Vec<String>, guest_lines: &mut Vec<String>) {
    for (number, name) in INTERFACES.iter().enumerate() {
        let (v4, v6) = guest_network(number);
        let (network, length) = match family {
            Family::V4 => (format!("{v4}."), "/24"),
            Family::V6 => (format!("{v6}::"), "/64 nodad"),
        };
        pod_lines.push(format!("addr add {network}1{length} dev {name}"));
        guest_lines.push(format!("link set {name} up"));
        guest_lines.push(format!("addr add {network}2{length} dev {name}"));
        guest_lines.push(format!(
            "route add default via {network}1 dev {name} metric {}",
            number + 1
        ));
    }
}

/// Returns the task in a netns, in `ip`'s syntax.
fn task_of(fresh: &Fresh) -> String {
    let path = fresh.netns.path().to_str().unwrap();
    path.split('/').nth(4).unwrap().to_owned()
}

fn batch(fresh: &Fresh, lines: &[String]) {
    fresh.command(
        "sh",
        &[
            "-c",
            &format!("ip -batch - <<END\n{}\nEND", lines.join("\n")),
        ],
    );
}

fn write(fresh: &Fresh, sysctl: &str, value: &'static str) {
    let path = format!("/proc/sys/net/{sysctl}");
    fresh.run(move || std::fs::write(path, value)).unwrap();
}
