//! Classifies the sockets of a port by their reachability.

use inpod_proto::podevents::v1::{Bind, BindChange, BindKind, BindWarning, PortBinds};
use inpod_types::redirection::{ZTUNNEL_DNS_PORT, ZTUNNEL_PORTS};

use super::{PodNetwork, Port, Protocol, Socket, Ztunnel};

/// The index of the loopback interface in every netns (`LOOPBACK_IFINDEX` in net/flow.h).
const LOOPBACK: u32 = 1;

pub(super) fn is_ztunnel_port((protocol, port): Port) -> bool {
    port == ZTUNNEL_DNS_PORT || (protocol == Protocol::Tcp && ZTUNNEL_PORTS.contains(&port))
}

pub(super) fn classify_port(
    port: Port,
    references: PortBinds,
    mut sockets: Vec<Socket>,
    network: &PodNetwork,
) -> PortBinds {
    sockets.sort_by_key(|socket| (socket.address, socket.interface));
    let kinds = sockets.iter().map(|socket| kind(socket, network));
    let widest = kinds.min_by_key(|kind| i32::from(*kind));
    let widest = widest.unwrap_or(BindKind::NotFound);
    let is_referenced = references.declared || !references.services.is_empty();
    let warnings = is_referenced.then(|| warnings(port.0, widest, &sockets, network));
    let change = change(port, &sockets, network).into_iter();
    PortBinds {
        kind: widest.into(),
        binds: sockets.iter().map(|socket| bind(socket, network)).collect(),
        changes: change.map(i32::from).collect(),
        warnings: warnings.into_iter().flatten().map(i32::from).collect(),
        ..references
    }
}

fn bind(socket: &Socket, network: &PodNetwork) -> Bind {
    Bind {
        kind: kind(socket, network).into(),
        address: socket.address.to_string(),
        ipv4: accepts(socket, false),
        ipv6: accepts(socket, true),
        uid: socket.uid,
        interface_index: socket.interface.unwrap_or_default(),
    }
}

/// Classifies a bind. Kinds with greater numbers are reachable by fewer clients.
fn kind(socket: &Socket, network: &PodNetwork) -> BindKind {
    if is_local(socket) {
        BindKind::Localhost
    } else if socket.address.is_unspecified() {
        BindKind::Wildcard
    } else if network.addresses.contains(&socket.address) {
        BindKind::PodIp
    } else {
        BindKind::Other
    }
}

fn is_local(socket: &Socket) -> bool {
    socket.address.is_loopback() || socket.interface == Some(LOOPBACK)
}

fn accepts(socket: &Socket, is_ipv6: bool) -> bool {
    socket.address.is_ipv6() == is_ipv6 || (!is_ipv6 && socket.dual_stack)
}

/// Returns the sockets that another host or pod reaches without a mesh, through the pod's interface.
fn reached(sockets: &[Socket], is_ipv6: bool) -> impl Iterator<Item = &Socket> {
    let others = sockets.iter().filter(|socket| !is_local(socket));
    others.filter(move |socket| accepts(socket, is_ipv6))
}

fn change(port: Port, sockets: &[Socket], network: &PodNetwork) -> Option<BindChange> {
    if port.0 == Protocol::Udp || sockets.is_empty() {
        return None;
    }
    if network.ztunnel == Ztunnel::Needs && ZTUNNEL_PORTS.contains(&port.1) {
        return Some(BindChange::PortTaken);
    }
    // ztunnel connects through loopback, with the client's source address: a socket bound to an interface, even to
    // loopback, has no route back to it (measured).
    let is_lost = |is_ipv6| {
        reached(sockets, is_ipv6).next().is_some()
            && reached(sockets, is_ipv6).all(|socket| socket.interface.is_some())
    };
    (is_lost(false) || is_lost(true)).then_some(BindChange::Lost)
}

fn warnings(
    protocol: Protocol,
    widest: BindKind,
    sockets: &[Socket],
    network: &PodNetwork,
) -> impl Iterator<Item = BindWarning> {
    let forwarding = match (protocol, widest) {
        (Protocol::Tcp, BindKind::PodIp | BindKind::Other) if !sockets.iter().any(is_local) => {
            Some(BindWarning::LocalhostForwardingMisses)
        }
        (Protocol::Tcp, BindKind::Localhost) => Some(BindWarning::LocalhostForwardingExposes),
        _ => None,
    };
    let is_served = matches!(widest, BindKind::Wildcard | BindKind::PodIp);
    let mut families = network.addresses.iter().map(|address| address.is_ipv6());
    let is_missing = |is_ipv6| reached(sockets, is_ipv6).next().is_none();
    let missing = (is_served && families.any(is_missing)).then_some(BindWarning::FamilyMissing);
    forwarding.into_iter().chain(missing)
}
