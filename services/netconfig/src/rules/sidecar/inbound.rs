use std::num::NonZeroU16;

use super::{
    Selection, Sidecar, TCP, by_excluded_interfaces, from_passthrough, not_loopback, only_syn,
    proxy_groups, rule,
};
use crate::{
    family::Family,
    marks::{
        FROM_PROXY, INBOUND_HBONE_PORT, INBOUND_PLAINTEXT_PORT, OUTBOUND_PORT, PROXY_TO_POD,
        TO_PROXY,
    },
    rules::{Expr, InboundCapture, Network, Rule, ambient::is_loopback},
};

/// Redirects TCP from virtual machines, which is outbound, then inbound TCP, in the nat table.
pub(super) fn by_redirect(settings: &Sidecar) -> Vec<Rule> {
    let mut rules = from_virtual_machines(settings);
    if settings.captures_inbound() && settings.inbound_capture == InboundCapture::Redirect {
        if settings.outbound_networks != Selection::All {
            // If all networks are captured, TCP from virtual machines is redirected already.
            rules.extend(bypass_virtual_machines(settings));
        }
        rules.extend(by_excluded_interfaces(settings, Expr::ArrivesBy));
        rules.extend(bypass_ports(settings));
        rules.extend(ports(settings).map(|port| {
            let mut packets = vec![TCP];
            packets.extend(port);
            packets.extend(only_syn(settings));
            let to = Expr::Redirect(INBOUND_PLAINTEXT_PORT);
            rule(Family::captured(settings.ipv6), packets, to)
        }));
    }
    rules
}

/// Captures inbound TCP by TPROXY in the mangle table, in Istio's order.
pub(super) fn by_tproxy(settings: &Sidecar) -> Vec<Rule> {
    let families = Family::captured(settings.ipv6);
    let accept = |packets| rule(families, packets, Expr::Accept);
    let mut rules: Vec<_> = by_excluded_interfaces(settings, Expr::ArrivesBy).collect();
    // The nat table redirects TCP from virtual machines. Istio's rules capture such TCP in the mangle table first.
    rules.extend(bypass_virtual_machines(settings));
    let by_loopback = || is_loopback(Expr::ArrivesBy);
    // The rule matches by loopback only, because the pod's proxy did not set the mark of other packets.
    let in_a_clients_name = vec![by_loopback(), TCP, Expr::Marked(FROM_PROXY)];
    let remember = Expr::MarkConnection(FROM_PROXY);
    rules.push(rule(families, in_a_clients_name, remember));
    rules.extend(from_passthrough(settings).map(|from| accept(vec![from, by_loopback(), TCP])));
    rules.push(accept(vec![
        by_loopback(),
        TCP,
        Expr::NotMarked(PROXY_TO_POD),
    ]));
    rules.extend(bypass_ports(settings));
    rules.extend(divert(settings));
    for port in ports(settings) {
        rules.extend(not_loopback(settings).flat_map(|to| {
            let packets = [to, TCP].into_iter().chain(port.clone());
            to_proxy(settings, packets.collect())
        }));
    }
    rules
}

/// Routes packets of established connections locally, like the first packet, without another socket lookup: either
/// TPROXY delivered the first packet to the proxy, or the packet answers the pod.
fn divert(settings: &Sidecar) -> Vec<Rule> {
    let families = Family::captured(settings.ipv6);
    let mut rules: Vec<_> = ports(settings)
        .map(|port| {
            let mut packets = vec![TCP];
            packets.extend(port);
            packets.push(Expr::KnownConnection);
            rule(families, packets, Expr::Mark(TO_PROXY))
        })
        .collect();
    let marked = vec![TCP, Expr::Marked(TO_PROXY)];
    rules.push(rule(families, marked, Expr::Accept));
    rules
}

/// Delivers packets or drops them, because a packet without a listening socket would reach the application.
fn to_proxy(settings: &Sidecar, mut packets: Vec<Expr>) -> [Rule; 2] {
    packets.extend(only_syn(settings));
    let family = packets.iter().find_map(Expr::family);
    [
        Expr::Tproxy(family, INBOUND_PLAINTEXT_PORT, TO_PROXY),
        Expr::Drop,
    ]
    .map(|action| rule(Family::captured(settings.ipv6), packets.clone(), action))
}

/// Returns to the proxy, in the output chain of the mangle table, the packets that the proxy sends to the pod from
/// its own address. Covers only the proxy's groups, since the nat table redirects packets of its users. The last
/// rule returns the application's replies to a proxy that connected from a client's address.
pub(super) fn back_to_proxy(settings: &Sidecar) -> Vec<Rule> {
    let families = Family::captured(settings.ipv6);
    let mut rules = Vec::new();
    for group in proxy_groups(settings) {
        rules.extend(not_loopback(settings).map(|to| {
            let packets = vec![
                to,
                is_loopback(Expr::LeavesBy),
                TCP,
                Expr::NotMarked(FROM_PROXY),
                group.clone(),
            ];
            rule(families, packets, Expr::Mark(PROXY_TO_POD))
        }));
    }
    // A constant mark, unlike the connection's mark, keeps foreign bits.
    let packets = vec![TCP, Expr::ConnectionMarked(FROM_PROXY)];
    rules.push(rule(families, packets, Expr::Mark(TO_PROXY)));
    rules
}

/// Returns conditions for the captured ports, with `None` for all ports, and never includes 15008.
fn ports(settings: &Sidecar) -> impl Iterator<Item = Option<Expr>> + use<> {
    let conditions: Vec<_> = match &settings.inbound_ports {
        Selection::All => vec![None],
        Selection::These(ports) => {
            let ports = ports.iter().map(|port| port.get());
            let ports = ports.filter(|port| *port != INBOUND_HBONE_PORT);
            ports.map(|port| Some(Expr::Port(port))).collect()
        }
    };
    conditions.into_iter()
}

/// Exempts port 15008 and excluded ports, which is necessary only if all ports are captured.
fn bypass_ports(settings: &Sidecar) -> Vec<Rule> {
    if settings.inbound_ports != Selection::All {
        return Vec::new();
    }
    let excluded = settings.excluded_inbound_ports.iter();
    let excluded = excluded.copied().map(NonZeroU16::get);
    let excluded = excluded.filter(|port| *port != INBOUND_HBONE_PORT);
    let ports = [INBOUND_HBONE_PORT].into_iter().chain(excluded);
    let accept = |port| {
        let packets = vec![TCP, Expr::Port(port)];
        rule(Family::captured(settings.ipv6), packets, Expr::Accept)
    };
    ports.map(accept).collect()
}

/// Redirects TCP from virtual machines, to captured networks only.
fn from_virtual_machines(settings: &Sidecar) -> Vec<Rule> {
    let families = Family::captured(settings.ipv6);
    let is_captured = |network: &&Network| families.contains(&Family::of_network(**network));
    let to: Vec<_> = match &settings.outbound_networks {
        Selection::All => vec![None],
        Selection::These(networks) => {
            let networks = networks.iter().filter(is_captured);
            networks.map(|to| Some(Expr::Destination(*to))).collect()
        }
    };
    let interfaces = settings.virtual_interfaces.iter();
    let rules = interfaces.flat_map(|name| {
        to.iter().map(move |to| {
            let mut packets: Vec<_> = to.iter().cloned().collect();
            packets.extend([Expr::ArrivesBy(name.clone()), TCP]);
            packets.extend(only_syn(settings));
            rule(families, packets, Expr::Redirect(OUTBOUND_PORT))
        })
    });
    rules.collect()
}

fn bypass_virtual_machines(settings: &Sidecar) -> impl Iterator<Item = Rule> {
    let interfaces = settings.virtual_interfaces.iter().cloned();
    let families = Family::captured(settings.ipv6);
    interfaces.map(move |name| {
        let packets = vec![Expr::ArrivesBy(name), TCP];
        rule(families, packets, Expr::Accept)
    })
}
