//! Finds conflicts outside of the packet filter: interfaces, sysctls, asymmetric routes.

use std::{
    collections::BTreeMap,
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
};

use inpod_types::keys::REROUTE_VIRTUAL_INTERFACES;
use netlink_bindings::{
    rt_route::{self, OpGetrouteDo, Rtmsg},
    traits::NetlinkRequest as _,
};
use nix::{
    ifaddrs::getifaddrs,
    net::if_::{InterfaceFlags, if_nametoindex},
    sys::socket::SockProtocol,
};

use super::{Finding, Kind, printable};
use crate::{
    family::Family,
    marks::Mark,
    netlink::{KernelError, Socket},
    routes::{Routes, Routing},
    rules::InterfaceName,
};

const SYSCTLS: &str = "/proc/sys/net";

/// Sources outside of any pod: one of no host (RFC 5737), and that of
/// kubelet probes (services/docs/facts/istio-ambient.md, 6.7).
const OUTSIDE_SOURCE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const PROBE_SOURCE: Ipv4Addr = Ipv4Addr::new(169, 254, 7, 127);

/// Strict mode of rp_filter (ip-sysctl.rst).
const STRICT: u8 = 1;

/// Any process with NET_ADMIN in the netns can add more.
const MAX_INTERFACES: usize = 64;
const MAX_ADDRESSES: usize = 64;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Environment {
    pub(super) interfaces: Vec<Interface>,
    pub(super) has_ipv6: bool,
    /// inpod's ip rule for IPv6 exists.
    pub(super) routes_ipv6: bool,
    /// Foreign ip rules that match ztunnel's mark: family, priority and mark.
    pub(super) marked_rules: Vec<(Family, u32, Mark)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Interface {
    pub(super) name: String,
    pub(super) index: u32,
    pub(super) is_up: bool,
    pub(super) is_loopback: bool,
    pub(super) addresses: Vec<Ipv4Addr>,
    /// True if the interface can transmit, as a bridge with a running port can.
    pub(super) is_running: bool,
    pub(super) is_bridge: bool,
    pub(super) ipv6_addresses: Vec<Ipv6Addr>,
    /// Effective: the maximum of the interface's and that of `all`.
    pub(super) rp_filter: u8,
    pub(super) is_without_ipv6: bool,
    /// Local address and source whose replies leave by another interface.
    pub(super) asymmetric_paths: Vec<(Ipv4Addr, Ipv4Addr)>,
}

/// State that has to be read inside the netns, and sockets for the rest.
#[derive(Debug)]
pub(super) struct Reader {
    interfaces: Vec<Interface>,
    has_ipv6: bool,
    routes: Routes,
    lookups: Socket,
}

impl Reader {
    /// Reads the calling thread's netns.
    pub(super) fn open() -> io::Result<Self> {
        Ok(Self {
            interfaces: interfaces()?,
            has_ipv6: Path::new(SYSCTLS).join("ipv6").exists(),
            routes: Routes::open()?,
            lookups: Socket::open(SockProtocol::NetlinkRoute)?,
        })
    }

    /// Can be called from any netns.
    pub(super) fn read(mut self) -> Result<Environment, KernelError> {
        let strict = self.interfaces.iter_mut();
        for interface in strict.filter(|found| filters_strictly(found)) {
            interface.asymmetric_paths = asymmetric_paths(&mut self.lookups, interface);
        }
        let bridges = self.lookups.bridges()?;
        for interface in &mut self.interfaces {
            interface.is_bridge = bridges.contains(&interface.index);
        }
        let routing = self.routes.read()?;
        Ok(Environment {
            interfaces: self.interfaces,
            has_ipv6: self.has_ipv6,
            routes_ipv6: routing.leads_to_ztunnel(Family::V6),
            marked_rules: marked_rules(&routing),
        })
    }
}

fn marked_rules(routing: &Routing) -> Vec<(Family, u32, Mark)> {
    let rules = routing.rules_for_ztunnel().into_iter();
    rules
        .filter_map(|rule| Some((rule.family, rule.priority, rule.mark?)))
        .collect()
}

fn filters_strictly(interface: &Interface) -> bool {
    interface.rp_filter == STRICT && interface.is_up && !interface.is_loopback
}

fn interfaces() -> io::Result<Vec<Interface>> {
    let mut found: BTreeMap<String, Interface> = BTreeMap::new();
    for entry in getifaddrs()? {
        let flags = entry.flags;
        let name = entry.interface_name.clone();
        let known = found.len();
        let interface = found.entry(name).or_insert_with_key(|name| Interface {
            name: name.clone(),
            index: if_nametoindex(name.as_str()).unwrap_or(0),
            is_up: flags.contains(InterfaceFlags::IFF_UP),
            is_loopback: flags.contains(InterfaceFlags::IFF_LOOPBACK),
            addresses: Vec::new(),
            ipv6_addresses: Vec::new(),
            is_running: flags.contains(InterfaceFlags::IFF_RUNNING),
            is_bridge: false,
            rp_filter: 0,
            is_without_ipv6: false,
            asymmetric_paths: Vec::new(),
        });
        let address = entry.address.as_ref();
        let v4 = address.and_then(|address| Some(address.as_sockaddr_in()?.ip()));
        interface.addresses.extend(v4);
        let v6 = address.and_then(|address| Some(address.as_sockaddr_in6()?.ip()));
        interface.ipv6_addresses.extend(v6);
        if known >= MAX_INTERFACES {
            break;
        }
    }
    let mut interfaces: Vec<_> = found.into_values().collect();
    let for_all = sysctl("ipv4", "all", "rp_filter");
    for interface in &mut interfaces {
        let own = sysctl("ipv4", &interface.name, "rp_filter");
        interface.rp_filter = own.max(for_all).unwrap_or(0);
        interface.is_without_ipv6 = sysctl("ipv6", &interface.name, "disable_ipv6") == Some(1);
    }
    Ok(interfaces)
}

/// Returns `None` if missing or unreadable. The kernel allows no `/` in interface names.
fn sysctl(family: &str, interface: &str, name: &str) -> Option<u8> {
    let path = Path::new(SYSCTLS).join(family).join("conf").join(interface);
    let text = fs::read_to_string(path.join(name)).ok()?;
    text.trim().parse().ok()
}

fn asymmetric_paths(socket: &mut Socket, interface: &Interface) -> Vec<(Ipv4Addr, Ipv4Addr)> {
    let own = interface.addresses.iter().take(MAX_ADDRESSES);
    let pairs = own.flat_map(|own| [OUTSIDE_SOURCE, PROBE_SOURCE].map(|source| (*own, source)));
    pairs
        .filter(|(own, source)| {
            reply_interface(socket, *own, *source).is_some_and(|index| index != interface.index)
        })
        .collect()
}

/// Returns the interface of the route to the source, with which the kernel compares (`__fib_validate_source` in
/// net/ipv4/fib_frontend.c). Having no route is no conflict of this kind.
fn reply_interface(socket: &mut Socket, own: Ipv4Addr, source: Ipv4Addr) -> Option<u32> {
    let header = Rtmsg {
        // AF_INET.
        rtm_family: 2,
        rtm_dst_len: 32,
        rtm_src_len: 32,
        ..Rtmsg::new()
    };
    let mut request = rt_route::Request::new().op_getroute_do(&header);
    drop(
        request
            .encode()
            .push_dst(IpAddr::V4(source))
            .push_src(IpAddr::V4(own)),
    );
    let payload: Result<_, KernelError> = socket.get("look up the way back", &request);
    let payload = payload.ok()?;
    let (_, attributes) = OpGetrouteDo::decode_reply(&payload);
    attributes.get_oif().ok()
}

pub(super) fn findings(environment: &Environment, addresses: &[IpAddr]) -> Vec<Finding> {
    let mut found = Vec::new();
    found.extend(loopback_down(environment));
    let interfaces = environment.interfaces.iter();
    found.extend(interfaces.filter_map(|found| rp_filter(found, addresses)));
    found.extend(ipv6_disabled(environment, addresses));
    found.extend(environment.marked_rules.iter().map(describe_marked_rule));
    found
}

/// Finds bridges of the pod with containers behind them. Rules take connections from a bridge for inbound connections,
/// unless the pod's annotation names the bridge. A bridge with an address of the pod is the pod's own interface.
pub(super) fn uncovered_bridges(
    environment: &Environment,
    addresses: &[IpAddr],
    covered: &[&InterfaceName],
) -> Vec<Finding> {
    let is_pods = |interface: &Interface| {
        let (v4, v6) = (&interface.addresses, &interface.ipv6_addresses);
        addresses.iter().any(|address| match address {
            IpAddr::V4(address) => v4.contains(address),
            IpAddr::V6(address) => v6.contains(address),
        })
    };
    let is_covered = |name: &str| covered.iter().any(|known| known.matches(name));
    let bridges = environment.interfaces.iter().filter(|it| it.is_bridge);
    let running = bridges.filter(|it| it.is_up && it.is_running && !is_pods(it));
    let uncovered = running.filter(|it| !is_covered(&it.name));
    uncovered.map(describe_bridge).collect()
}

fn describe_bridge(bridge: &Interface) -> Finding {
    let name = printable(&bridge.name);
    Finding {
        kind: Kind::Bridge,
        sentence: format!(
            "Connections of the containers behind the bridge {name} hang, because rules take them for inbound \
             connections: add {name}, or a pattern such as br-*, to the pod's annotation {REROUTE_VIRTUAL_INTERFACES}."
        ),
        subject: format!("interface {name}"),
    }
}

fn describe_marked_rule((family, priority, mark): &(Family, u32, Mark)) -> Finding {
    Finding {
        kind: Kind::MarkedRule,
        subject: format!("{family} ip rule {priority}"),
        sentence: format!(
            "The {family} ip rule with priority {priority} and fwmark {mark} matches packets with ztunnel's \
             mark: ztunnel's connections can take another route."
        ),
    }
}

fn loopback_down(environment: &Environment) -> Option<Finding> {
    let mut interfaces = environment.interfaces.iter();
    let loopback = interfaces.find(|found| found.is_loopback)?;
    (!loopback.is_up).then(|| Finding {
        kind: Kind::LoopbackDown,
        subject: printable(&loopback.name),
        sentence: "The loopback interface is down: redirected connections do not reach ztunnel, and replies to \
                   ztunnel are lost."
            .to_owned(),
    })
}

/// Strict mode is harmless where replies leave by the same interface, as with a single one. Packets that ztunnel
/// sends from a client's address arrive by lo with their route set and are not checked (tested on 6.18). Probes go
/// only to the pod's own address.
fn rp_filter(interface: &Interface, addresses: &[IpAddr]) -> Option<Finding> {
    if !filters_strictly(interface) {
        return None;
    }
    let concerns = |(own, source): &&(Ipv4Addr, Ipv4Addr)| {
        *source != PROBE_SOURCE || addresses.contains(&IpAddr::V4(*own))
    };
    let (own, source) = interface.asymmetric_paths.iter().find(concerns)?;
    let name = printable(&interface.name);
    let whose = if *source == PROBE_SOURCE {
        "host probes"
    } else {
        "sources outside"
    };
    Some(Finding {
        kind: Kind::RpFilter,
        subject: format!("net.ipv4.conf.{name}.rp_filter"),
        sentence: format!(
            "Reverse path filtering is strict (1) on {name}, but replies from {own} to {whose} ({source}) leave by \
             another interface: packets from there are dropped before any rule sees them."
        ),
    })
}

fn ipv6_disabled(environment: &Environment, addresses: &[IpAddr]) -> Vec<Finding> {
    let given = addresses.iter().find(|address| address.is_ipv6());
    let why = match given {
        Some(address) => format!("the pod has {address}"),
        None if environment.routes_ipv6 => "inpod's ip rule for IPv6 exists".to_owned(),
        None => return Vec::new(),
    };
    let finding = |subject: String, where_: &str| Finding {
        kind: Kind::Ipv6Disabled,
        subject,
        sentence: format!("IPv6 is disabled {where_}, but {why}."),
    };
    if !environment.has_ipv6 {
        return vec![finding("net.ipv6".to_owned(), "in the kernel")];
    }
    let interfaces = environment.interfaces.iter();
    let off = interfaces.filter(|found| found.is_without_ipv6);
    off.filter(|found| found.is_loopback || !has_ipv6_egress(environment))
        .map(|interface| {
            let name = printable(&interface.name);
            let subject = format!("net.ipv6.conf.{name}.disable_ipv6");
            finding(subject, &format!("on {name}"))
        })
        .collect()
}

/// Returns whether IPv6 can leave by any interface; it may be disabled on single ones on purpose.
fn has_ipv6_egress(environment: &Environment) -> bool {
    let mut interfaces = environment.interfaces.iter();
    interfaces.any(|found| !found.is_loopback && found.is_up && !found.is_without_ipv6)
}
