//! Classifies the sockets of a port by their reachability.

use std::net::IpAddr;

use inpod_proto::podevents::v1::{
    Bind, BindChange, BindKind, BindWarning, PortBinds, PortProtocol,
};

use super::{PodNetwork, Port, PortReferences, Protocol, Socket, Ztunnel};

/// The index of the loopback interface in every netns (`LOOPBACK_IFINDEX` in net/flow.h).
const LOOPBACK: u32 = 1;

/// ztunnel's ports in every enrolled pod (services/docs/facts/istio-ambient.md): outbound, inbound, HBONE.
const ZTUNNEL_PORTS: [u16; 3] = [15001, 15006, 15008];

const ZTUNNEL_DNS_PORT: u16 = 15053;

pub(super) fn is_ztunnel_port((protocol, port): Port) -> bool {
    port == ZTUNNEL_DNS_PORT || (protocol == Protocol::Tcp && ZTUNNEL_PORTS.contains(&port))
}

pub(super) fn unclassified((protocol, port): Port, references: PortReferences) -> PortBinds {
    let protocol = match protocol {
        Protocol::Tcp => PortProtocol::Tcp,
        Protocol::Udp => PortProtocol::Udp,
    };
    PortBinds {
        protocol: protocol.into(),
        port: port.into(),
        declared: references.declared,
        names: references.names.into_iter().collect(),
        services: references.services.into_iter().collect(),
        ..PortBinds::default()
    }
}

pub(super) fn classify_port(
    port: Port,
    references: PortReferences,
    sockets: &[Socket],
    network: &PodNetwork,
) -> PortBinds {
    let is_referenced = references != PortReferences::default();
    let mut sockets: Vec<_> = sockets.iter().collect();
    sockets.sort_by_key(|socket| (socket.address, socket.interface));
    let kinds = sockets.iter().map(|socket| kind(socket, network));
    let widest = kinds.min_by_key(|kind| i32::from(*kind));
    let widest = widest.unwrap_or(BindKind::NotFound);
    let changes = changes(port, &sockets, network).into_iter();
    let warnings = if is_referenced {
        warnings(port.0, widest, &sockets, network)
    } else {
        Vec::new()
    };
    PortBinds {
        kind: widest.into(),
        binds: sockets.iter().map(|socket| bind(socket, network)).collect(),
        changes: changes.map(i32::from).collect(),
        warnings: warnings.into_iter().map(i32::from).collect(),
        ..unclassified(port, references)
    }
}

fn bind(socket: &Socket, network: &PodNetwork) -> Bind {
    Bind {
        kind: kind(socket, network).into(),
        address: socket.address.to_string(),
        ipv4: takes(socket, Family::V4),
        ipv6: takes(socket, Family::V6),
        uid: socket.uid,
        interface_index: socket.interface.unwrap_or_default(),
    }
}

/// Classifies a bind. Kinds with greater numbers are reachable by fewer clients.
fn kind(socket: &Socket, network: &PodNetwork) -> BindKind {
    let address = socket.address;
    if is_local(socket) {
        BindKind::Localhost
    } else if address.is_unspecified() {
        BindKind::Wildcard
    } else if network.addresses.contains(&address) {
        BindKind::PodIp
    } else {
        BindKind::Other
    }
}

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

fn takes(socket: &Socket, by: Family) -> bool {
    family(&socket.address) == by || (by == Family::V4 && socket.dual_stack)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    /// Another host or pod, through the pod's interface.
    Outside,
    /// ztunnel in the pod, through loopback, with the client's source address: a socket bound to an interface, even
    /// to loopback, has no route back to it (measured).
    Ztunnel,
}

fn is_reached(socket: &Socket, by: Family, from: From) -> bool {
    let is_deliverable = socket.interface.is_none() || from == From::Outside;
    takes(socket, by) && is_deliverable && !is_local(socket)
}

fn changes(port: Port, sockets: &[&Socket], network: &PodNetwork) -> Vec<BindChange> {
    if port.0 == Protocol::Udp || sockets.is_empty() {
        return Vec::new();
    }
    if network.ztunnel == Ztunnel::Needs && is_ztunnel_port(port) && port.1 != ZTUNNEL_DNS_PORT {
        return vec![BindChange::PortTaken];
    }
    let is_reached = |by, from| sockets.iter().any(|socket| is_reached(socket, by, from));
    let is_lost = |by| is_reached(by, From::Outside) && !is_reached(by, From::Ztunnel);
    let is_lost = [Family::V4, Family::V6].into_iter().any(is_lost);
    is_lost.then_some(BindChange::Lost).into_iter().collect()
}

fn warnings(
    protocol: Protocol,
    widest: BindKind,
    sockets: &[&Socket],
    network: &PodNetwork,
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
    let missing = is_served && network.addresses.iter().any(is_missing);
    let missing = missing.then_some(BindWarning::FamilyMissing);
    [forwarding, missing].into_iter().flatten().collect()
}
