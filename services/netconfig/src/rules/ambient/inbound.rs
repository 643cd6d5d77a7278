use super::{
    either_family, is_captured, is_loopback, loopbacks, one_family, only_family, only_syn,
};
use crate::{
    marks::{FROM_ZTUNNEL, INBOUND_HBONE_PORT, INBOUND_PLAINTEXT_PORT, OUTBOUND_PORT, TO_ZTUNNEL},
    rules::{Ambient, Expr, InboundCapture, Network, Rule, Transport},
};

const TCP: Expr = Expr::Protocol(Transport::Tcp);

/// Redirects TCP from virtual machines, and inbound TCP neither to nor from ztunnel, in the nat table.
pub(super) fn by_redirect(settings: &Ambient) -> Vec<Rule> {
    let mut rules = from_virtual_machines(settings, &Expr::Redirect(OUTBOUND_PORT));
    if is_captured_by(settings, InboundCapture::Redirect) {
        rules.extend(bypass(settings));
        rules.extend(loopbacks(settings).map(|loopback| {
            let mut packets = vec![
                Expr::DestinationNot(loopback),
                TCP,
                Expr::PortNot(INBOUND_HBONE_PORT),
            ];
            packets.extend(only_syn(settings));
            packets.push(Expr::NotMarked(FROM_ZTUNNEL));
            one_family(packets, Expr::Redirect(INBOUND_PLAINTEXT_PORT))
        }));
    }
    rules
}

/// Captures inbound TCP by TPROXY in the mangle table, in the order of Istio 1.21.
pub(super) fn by_tproxy(settings: &Ambient) -> Vec<Rule> {
    if !is_captured_by(settings, InboundCapture::Tproxy) {
        return Vec::new();
    }
    // The nat table redirects TCP of virtual machines.
    let mut rules = from_virtual_machines(settings, &Expr::Accept);
    rules.extend(loopbacks(settings).map(bypass_own_addresses));
    rules.extend(to_port(
        settings,
        vec![TCP, Expr::Port(INBOUND_HBONE_PORT)],
        INBOUND_HBONE_PORT,
    ));
    rules.extend(bypass(settings));
    // Rules that keep existing connections never capture established connections anyway.
    if !settings.keep_existing_connections {
        let known = vec![TCP, Expr::KnownConnection];
        rules.push(either_family(settings, known, Expr::Accept));
    }
    for loopback in loopbacks(settings) {
        let packets = vec![Expr::DestinationNot(loopback), TCP];
        rules.extend(to_port(settings, packets, INBOUND_PLAINTEXT_PORT));
    }
    rules
}

fn is_captured_by(settings: &Ambient, capture: InboundCapture) -> bool {
    !settings.bypass_inbound_capture && settings.inbound_capture == capture
}

/// Delivers packets or drops them, because a packet without a listening socket would reach the application.
fn to_port(settings: &Ambient, mut packets: Vec<Expr>, port: u16) -> [Rule; 2] {
    packets.extend(only_syn(settings));
    packets.push(Expr::NotMarked(FROM_ZTUNNEL));
    let of_packets = packets.iter().find_map(Expr::family);
    let family = of_packets.or_else(|| only_family(settings));
    [Expr::Tproxy(family, port, TO_ZTUNNEL), Expr::Drop].map(|action| {
        let packets = packets.clone();
        if of_packets.is_some() {
            one_family(packets, action)
        } else {
            either_family(settings, packets, action)
        }
    })
}

/// Treats TCP from interfaces of virtual machines as outbound.
fn from_virtual_machines(settings: &Ambient, action: &Expr) -> Vec<Rule> {
    let interfaces = settings.virtual_interfaces.iter().cloned();
    let rule = |interface| {
        let mut packets = vec![Expr::ArrivesBy(interface), TCP];
        packets.extend(only_syn(settings));
        either_family(settings, packets, action.clone())
    };
    interfaces.map(rule).collect()
}

/// Exempts connections of a pod to its own address.
fn bypass_own_addresses(loopback: Network) -> Rule {
    let packets = vec![
        Expr::DestinationNot(loopback),
        is_loopback(Expr::ArrivesBy),
        TCP,
    ];
    one_family(packets, Expr::Accept)
}

/// Exempts kubelet probes and excluded networks and ports.
fn bypass(settings: &Ambient) -> Vec<Rule> {
    let probes = settings.probe_sources.iter().copied().map(Network::host);
    let networks = settings.exclusions.inbound_networks.iter().copied();
    let networks = probes
        .chain(networks)
        .filter(|network| is_captured(settings, *network));
    let from = |network| one_family(vec![Expr::Source(network), TCP], Expr::Accept);
    let ports = settings.exclusions.inbound_ports.iter();
    let to = |port| either_family(settings, vec![TCP, Expr::Port(port)], Expr::Accept);
    networks
        .map(from)
        .chain(ports.map(|port| to(port.get())))
        .collect()
}
