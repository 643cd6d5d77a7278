//! One port: how it is bound, and who reaches it where.

use std::net::IpAddr;

use inpod_proto::podevents::v1::{
    Bind, BindChange, BindKind, BindWarning, PortBinds, PortProtocol,
};

use super::{Place, Port, Protocol, Said, Socket, Ztunnel};

/// The loopback interface's index, in every netns (LOOPBACK_IFINDEX of net/flow.h).
const LOOPBACK: u32 = 1;

/// Where ztunnel listens in every pod of the mesh (section ports of istio-ambient: outbound, inbound, HBONE).
const NEEDED: [u16; 3] = [15001, 15006, 15008];

/// Where it answers questions for names.
const NAMES: u16 = 15053;

/// Whether ztunnel listens there in a pod of the mesh.
pub(super) fn is_ztunnels((protocol, port): Port) -> bool {
    port == NAMES || (protocol == Protocol::Tcp && NEEDED.contains(&port))
}

/// A port of which it is only known who speaks of it.
pub(super) fn spoken_of((protocol, port): Port, said: Said) -> PortBinds {
    let protocol = match protocol {
        Protocol::Tcp => PortProtocol::Tcp,
        Protocol::Udp => PortProtocol::Udp,
    };
    PortBinds {
        protocol: protocol.into(),
        port: port.into(),
        declared: said.declared,
        names: said.names.into_iter().collect(),
        services: said.services.into_iter().collect(),
        ..PortBinds::default()
    }
}

/// A port with its sockets.
pub(super) fn port(port: Port, said: Said, sockets: &[Socket], place: &Place) -> PortBinds {
    let is_meant = said != Said::default();
    let mut sockets: Vec<_> = sockets.iter().collect();
    sockets.sort_by_key(|socket| (socket.address, socket.interface));
    let kinds = sockets.iter().map(|socket| kind(socket, place));
    let widest = kinds.min_by_key(|kind| i32::from(*kind));
    let widest = widest.unwrap_or(BindKind::NotFound);
    let changes = changes(port, &sockets, place).into_iter();
    let warnings = if is_meant {
        warnings(port.0, widest, &sockets, place)
    } else {
        Vec::new()
    };
    PortBinds {
        kind: widest.into(),
        binds: sockets.iter().map(|socket| bind(socket, place)).collect(),
        changes: changes.map(i32::from).collect(),
        warnings: warnings.into_iter().map(i32::from).collect(),
        ..spoken_of(port, said)
    }
}

fn bind(socket: &Socket, place: &Place) -> Bind {
    Bind {
        kind: kind(socket, place).into(),
        address: socket.address.to_string(),
        ipv4: takes(socket, Family::V4),
        ipv6: takes(socket, Family::V6),
        uid: socket.uid,
        interface_index: socket.interface.unwrap_or_default(),
    }
}

/// How a socket is bound. The numbers of the kinds rise as fewer reach it.
fn kind(socket: &Socket, place: &Place) -> BindKind {
    let address = socket.address;
    if is_local(socket) {
        BindKind::Localhost
    } else if address.is_unspecified() {
        BindKind::Wildcard
    } else if place.addresses.contains(&address) {
        BindKind::PodIp
    } else {
        BindKind::Other
    }
}

/// Whether only the pod itself gets to a socket.
fn is_local(socket: &Socket) -> bool {
    socket.address.is_loopback() || socket.interface == Some(LOOPBACK)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

fn family(address: &IpAddr) -> Family {
    match address {
        IpAddr::V4(_) => Family::V4,
        IpAddr::V6(_) => Family::V6,
    }
}

/// Whether a socket takes what comes by a family.
fn takes(socket: &Socket, by: Family) -> bool {
    family(&socket.address) == by || (by == Family::V4 && socket.dual_stack)
}

/// From where a connection comes to the pod's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    /// From outside, by the pod's interface.
    Outside,
    /// From ztunnel in the pod, by loopback. It bears the client's address, to which a socket that is bound to an
    /// interface, be it loopback's, has no way back (measured).
    Ztunnel,
}

/// Whether a connection to the pod gets to a socket.
fn is_reached(socket: &Socket, by: Family, from: From) -> bool {
    let gets_there = socket.interface.is_none() || from == From::Outside;
    takes(socket, by) && gets_there && !is_local(socket)
}

fn changes(port: Port, sockets: &[&Socket], place: &Place) -> Vec<BindChange> {
    if port.0 == Protocol::Udp || sockets.is_empty() {
        return Vec::new();
    }
    if place.ztunnel == Ztunnel::Needs && is_ztunnels(port) && port.1 != NAMES {
        return vec![BindChange::PortTaken];
    }
    let is_reached = |by, from| sockets.iter().any(|socket| is_reached(socket, by, from));
    let is_lost = |by| is_reached(by, From::Outside) && !is_reached(by, From::Ztunnel);
    let is_lost = [Family::V4, Family::V6].into_iter().any(is_lost);
    is_lost.then_some(BindChange::Lost).into_iter().collect()
}

/// Of a port that somebody speaks of.
fn warnings(
    protocol: Protocol,
    widest: BindKind,
    sockets: &[&Socket],
    place: &Place,
) -> Vec<BindWarning> {
    let has_localhost = || sockets.iter().any(|socket| is_local(socket));
    let is_served = matches!(widest, BindKind::Wildcard | BindKind::PodIp);
    let forwarding = match (protocol, widest) {
        (Protocol::Tcp, BindKind::PodIp | BindKind::Other) if !has_localhost() => {
            Some(BindWarning::LocalhostForwardingMisses)
        }
        (Protocol::Tcp, BindKind::Localhost) => Some(BindWarning::LocalhostForwardingExposes),
        _ => None,
    };
    let is_missing = |address: &IpAddr| {
        let by = family(address);
        !sockets
            .iter()
            .any(|socket| is_reached(socket, by, From::Outside))
    };
    let missing = is_served && place.addresses.iter().any(is_missing);
    let missing = missing.then_some(BindWarning::FamilyMissing);
    [forwarding, missing].into_iter().flatten().collect()
}
