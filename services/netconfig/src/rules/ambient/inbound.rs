use super::{either_family, is_captured, loopbacks, one_family, only_syn};
use crate::{
    marks::{FROM_ZTUNNEL, INBOUND_HBONE_PORT, INBOUND_PLAINTEXT_PORT, OUTBOUND_PORT},
    rules::{Ambient, Expr, Network, Rule, Transport},
};

const TCP: Expr = Expr::Protocol(Transport::Tcp);

/// Redirects TCP from virtual machines, and inbound TCP neither to nor from ztunnel.
pub(super) fn capture(settings: &Ambient) -> Vec<Rule> {
    let mut rules = from_virtual_machines(settings);
    if !settings.bypass_inbound_capture {
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

/// Treats TCP from interfaces of virtual machines as outbound.
fn from_virtual_machines(settings: &Ambient) -> Vec<Rule> {
    let interfaces = settings.virtual_interfaces.iter().cloned();
    let rule = |interface| {
        let mut packets = vec![Expr::ArrivesBy(interface), TCP];
        packets.extend(only_syn(settings));
        either_family(settings, packets, Expr::Redirect(OUTBOUND_PORT))
    };
    interfaces.map(rule).collect()
}

/// Exempts kubelet probes and excluded networks and ports.
fn bypass(settings: &Ambient) -> Vec<Rule> {
    let networks = settings.exclusions.inbound_cidrs.iter().copied();
    let networks = networks.filter(|network| is_captured(settings, *network));
    let from = |network| one_family(vec![Expr::Source(network), TCP], Expr::Accept);
    let ports = settings.exclusions.inbound_ports.iter();
    let to = |port| either_family(settings, vec![TCP, Expr::Port(port)], Expr::Accept);
    probes(settings)
        .into_iter()
        .chain(networks.map(from))
        .chain(ports.map(|port| to(port.get())))
        .collect()
}

/// Exempts the kubelet's probes of the pod's own ports. A probe of another pod may name any address and port, and would
/// be a way past ztunnel for the other pod's author (decision 98).
fn probes(settings: &Ambient) -> Vec<Rule> {
    let sources = settings.probe_sources.iter().copied().map(Network::host);
    let sources = sources.filter(|source| is_captured(settings, *source));
    let ports = match &settings.probe_ports {
        None => vec![None],
        Some(ports) => ports
            .iter()
            .map(|port| Some(Expr::Port(port.get())))
            .collect(),
    };
    let rule = |source, port: &Option<Expr>| {
        let mut packets = vec![Expr::Source(source), TCP];
        packets.extend(port.clone());
        one_family(packets, Expr::Accept)
    };
    sources
        .flat_map(|source| ports.iter().map(move |port| rule(source, port)))
        .collect()
}
