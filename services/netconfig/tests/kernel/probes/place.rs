//! A node, a pod, and a stranger, each in a netns.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use inpod_service::Readiness;
use netconfig::{
    probes::{ProbeSet, ProbeSettings, ReconcilerGuard},
    rules::{Ambient, Redirection},
};
use nix::unistd::{Uid, setfsuid};
use socket2::{Domain, Protocol, Socket, Type};

use crate::support::{Fresh, mark_as_ztunnel, plain, sandbox};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// The addresses of the pod, of the node on the pod's link, and of the stranger.
pub(crate) const POD: [&str; 2] = ["10.9.0.1", "fd09::1"];
pub(crate) const NODE: [&str; 2] = ["10.9.0.2", "fd09::2"];
pub(crate) const STRANGER: [&str; 2] = ["10.8.0.1", "fd08::1"];

/// The addresses of the stranger behind the pod's bridge.
const NEIGHBOR: [&str; 2] = ["10.9.0.3", "fd09::3"];

/// Works on the node's thread, as netconfig does in its own netns.
#[derive(Clone)]
pub(crate) struct OnNode {
    pub(crate) node: Arc<Fresh>,
    pub(crate) host: Arc<ProbeSet>,
    pub(crate) readiness: Readiness,
}

impl OnNode {
    pub(crate) fn start(node: &Arc<Fresh>, settings: ProbeSettings) -> Self {
        let readiness = Readiness::default();
        let conditions = readiness.clone();
        let host = node
            .run(move || ProbeSet::start(&settings, conditions))
            .unwrap();
        Self {
            node: Arc::clone(node),
            host: Arc::new(host),
            readiness,
        }
    }

    pub(crate) fn start_reconciler(&self, read_interval: Duration) -> ReconcilerGuard {
        let host = Arc::clone(&self.host);
        let start = move || host.start_reconciler(read_interval);
        self.node.run(start).unwrap()
    }

    /// Must succeed; returns whether anything had to be written.
    pub(crate) fn set_addresses(&self, name: &'static str, addresses: &[&str]) -> bool {
        self.try_name(name, addresses).unwrap()
    }

    pub(crate) fn try_name(&self, name: &'static str, texts: &[&str]) -> Result<bool, String> {
        let (host, addresses) = (Arc::clone(&self.host), addresses(texts));
        let named = self
            .node
            .run(move || host.set_addresses(&sandbox(name), &addresses));
        let named = named.map_err(|unnamed| {
            assert_eq!(unnamed.undo_failures, [""; 0]);
            unnamed.to_string()
        });
        Ok(named?.changed)
    }

    pub(crate) fn release(&self, name: &'static str) {
        let host = Arc::clone(&self.host);
        self.node.run(move || host.release(&sandbox(name))).unwrap();
    }

    /// Returns whether there was anything to remove.
    pub(crate) fn clear(&self) -> Result<bool, String> {
        let host = Arc::clone(&self.host);
        let cleared = self.node.run(move || host.clear());
        cleared.map_err(|error| error.to_string())
    }

    pub(crate) fn is_ok(&self, condition: &str) -> bool {
        self.readiness.all()[condition].ok
    }
}

pub(crate) fn addresses(texts: &[&str]) -> BTreeSet<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

pub(crate) struct Place {
    pub(crate) node: Arc<Fresh>,
    pub(crate) pod: Fresh,
    pub(crate) stranger: Fresh,
    pub(crate) application: TcpListener,
    /// Captured connections reach this listener.
    pub(crate) ztunnel: TcpListener,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self::with(Ambient::default())
    }

    pub(crate) fn with(ambient: Ambient) -> Self {
        let (node, pod, stranger) = (Fresh::new(), Fresh::new(), Fresh::new());
        for setting in ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"] {
            node.command("sysctl", &["-qw", setting]);
        }
        for fresh in [&node, &pod, &stranger] {
            fresh.command("sysctl", &["-qw", "net.ipv6.conf.default.accept_dad=0"]);
        }
        plug(&node, "pod", &pod, NODE, POD);
        plug(
            &node,
            "stranger",
            &stranger,
            ["10.8.0.2", "fd08::2"],
            STRANGER,
        );
        let redirection = Redirection::Ambient(Ambient {
            probe_sources: ProbeSettings::default().sources(),
            ..ambient
        });
        let applied = plain().apply(&pod.netns, &redirection, &sandbox("c1"));
        assert!(applied.unwrap().changed);
        let listen = |port: u16| pod.run(move || TcpListener::bind(("::", port)).unwrap());
        let (application, ztunnel) = (listen(8080), listen(15006));
        mark_as_ztunnel(&ztunnel);
        for listener in [&application, &ztunnel] {
            listener.set_nonblocking(true).unwrap();
        }
        Self {
            node: Arc::new(node),
            pod,
            stranger,
            application,
            ztunnel,
        }
    }

    /// Connects pod and stranger by a bridge of the node.
    pub(crate) fn bridged() -> Self {
        let place = Self::new();
        let node = &place.node;
        node.ip("link add br0 type bridge");
        for port in ["pod", "stranger"] {
            node.ip(&format!("link set {port} master br0"));
            node.ip(&format!("addr flush dev {port}"));
        }
        address(node, "br0", NODE);
        place.stranger.ip("addr flush dev eth0");
        address(&place.stranger, "eth0", NEIGHBOR);
        place
    }

    fn dial(from: &Fresh, user: u32, to: &str) -> Option<TcpStream> {
        let to = SocketAddr::new(to.parse().unwrap(), 8080);
        from.run(move || dial(user, to))
    }

    pub(crate) fn arrival(&self) -> Arrival {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            for (listener, is_direct) in [(&self.application, true), (&self.ztunnel, false)] {
                if let Ok((_, peer)) = listener.accept() {
                    let from = peer.ip().to_canonical();
                    return if is_direct {
                        Arrival::Direct(from)
                    } else {
                        Arrival::Captured(from)
                    };
                }
            }
            assert!(Instant::now() < deadline, "nobody took the connection");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn probe(&self, user: u32, to: &str) -> Arrival {
        let stream = Self::dial(&self.node, user, to);
        assert!(stream.is_some(), "no answer from {to}");
        self.arrival()
    }

    pub(crate) fn call(&self, to: &str) -> Arrival {
        let stream = Self::dial(&self.stranger, 0, to);
        assert!(stream.is_some(), "no answer from {to}");
        self.arrival()
    }
}

pub(crate) fn dial(user: u32, to: SocketAddr) -> Option<TcpStream> {
    setfsuid(Uid::from_raw(user));
    let kind = (Domain::for_address(to), Type::STREAM, Some(Protocol::TCP));
    let socket = Socket::new(kind.0, kind.1, kind.2);
    setfsuid(Uid::from_raw(0));
    let socket = socket.unwrap();
    socket.connect_timeout(&to.into(), TIMEOUT).ok()?;
    Some(socket.into())
}

/// A connection's listener, with the source address it sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    Direct(IpAddr),
    Captured(IpAddr),
}

/// Returns an arrival at the application, from the probe source address.
pub(crate) fn spared(to: &str) -> Arrival {
    let [v4, v6] = ProbeSettings::default().sources()[..] else {
        panic!("two sources");
    };
    Arrival::Direct(if to.contains(':') { v6 } else { v4 })
}

/// Returns unexempted connections' arrivals, from node and stranger.
pub(crate) fn captured(index: usize) -> [Arrival; 2] {
    [NODE, STRANGER].map(|from| Arrival::Captured(from[index].parse().unwrap()))
}

fn plug(node: &Fresh, interface: &str, other: &Fresh, near: [&str; 2], far: [&str; 2]) {
    let path = other.netns.path().to_str().unwrap();
    let task = path.split('/').nth(4).unwrap();
    node.ip(&format!(
        "link add {interface} type veth peer name eth0 netns {task}"
    ));
    for (fresh, interface, addresses) in [(node, interface, near), (other, "eth0", far)] {
        address(fresh, interface, addresses);
    }
    let [v4, v6] = near;
    other.ip(&format!("route add default via {v4}"));
    other.ip(&format!("-6 route add default via {v6}"));
}

fn address(fresh: &Fresh, interface: &str, [v4, v6]: [&str; 2]) {
    fresh.ip(&format!("addr add {v4}/24 dev {interface}"));
    fresh.ip(&format!("addr add {v6}/64 dev {interface} nodad"));
    fresh.ip(&format!("link set {interface} up"));
}

pub(crate) fn within(timeout: Duration, what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < timeout, "{what}: not within {timeout:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    start.elapsed()
}
