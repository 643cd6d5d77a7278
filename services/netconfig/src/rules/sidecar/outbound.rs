//! Builds the rules for the pod's outgoing traffic, in the nat table, in Istio's order except where noted.

use super::{
    Selection, Sidecar, TCP, UDP, by_excluded_interfaces, bypassed_groups, captures_outbound,
    dns_families, from_passthrough, loopback, not_loopback, only_syn, proxies, rule, servers,
};
use crate::{
    family::Family,
    marks::{
        DNS_PORT, FROM_PROXY, INBOUND_HBONE_PORT, INBOUND_PLAINTEXT_PORT, OUTBOUND_PORT,
        ZTUNNEL_DNS_PORT,
    },
    rules::{Expr, InboundCapture, Network, Rule, ambient::is_loopback},
};

/// Redirects the proxy's calls to the pod, DNS if requested, then outbound TCP unless bypassed.
pub(super) fn capture(settings: &Sidecar) -> Vec<Rule> {
    let mut rules: Vec<_> = by_excluded_interfaces(settings, Expr::LeavesBy).collect();
    rules.extend(bypass_ports(settings));
    rules.extend(from_passthrough(settings).map(|from| {
        let packets = vec![from, is_loopback(Expr::LeavesBy)];
        rule(Family::captured(settings.ipv6), packets, Expr::Accept)
    }));
    rules.extend(proxy_to_pod(settings));
    if !captures_outbound(settings) {
        return rules;
    }
    // The rules accept all traffic of the proxy before the loopback rules for other processes. Istio treats traffic
    // from a proxy's second user to the pod like traffic of other processes.
    rules.extend(proxies(settings).map(|proxy| accept(settings, vec![proxy])));
    rules.extend(bypass_groups(settings));
    rules.extend(redirect_dns(settings));
    rules.extend(bypass_pod_internal(settings));
    rules.extend(bypass_networks(settings));
    rules.extend(redirect_outbound(settings));
    rules
}

fn accept(settings: &Sidecar, packets: Vec<Expr>) -> Rule {
    rule(Family::captured(settings.ipv6), packets, Expr::Accept)
}

/// Exempts only TCP, because UDP is captured for DNS at most, and not at all if port 53 is excluded.
fn bypass_ports(settings: &Sidecar) -> impl Iterator<Item = Rule> {
    let ports = settings.excluded_outbound_ports.iter();
    ports.map(|port| accept(settings, vec![TCP, Expr::Port(port.get())]))
}

/// Redirects the proxy's connections to the pod's addresses to its inbound listener, as if from outside.
///
/// With TPROXY, redirects only for the proxy's users, and not from a client's address, which would loop;
/// [`super::inbound::back_to_proxy`] covers the proxy's groups.
fn proxy_to_pod(settings: &Sidecar) -> Vec<Rule> {
    let by_tproxy = settings.inbound_capture == InboundCapture::Tproxy;
    let is_led = |proxy: &Expr| !by_tproxy || matches!(proxy, Expr::FromUser(_));
    let led: Vec<_> = proxies(settings).filter(is_led).collect();
    let mut rules = Vec::new();
    if !dns_families(settings).is_empty() {
        // The rule accepts queries to a resolver in the pod.
        let own = |proxy| {
            let to = vec![
                is_loopback(Expr::LeavesBy),
                TCP,
                Expr::Port(DNS_PORT),
                proxy,
            ];
            rule(&dns_families(settings), to, Expr::Accept)
        };
        rules.extend(led.iter().cloned().map(own));
    }
    for proxy in led {
        rules.extend(not_loopback(settings).map(|to| {
            let mut packets = vec![
                to,
                is_loopback(Expr::LeavesBy),
                TCP,
                Expr::PortNot(INBOUND_HBONE_PORT),
            ];
            packets.extend(only_syn(settings));
            packets.extend(by_tproxy.then_some(Expr::NotMarked(FROM_PROXY)));
            packets.push(proxy.clone());
            let to = Expr::Redirect(INBOUND_PLAINTEXT_PORT);
            rule(Family::captured(settings.ipv6), packets, to)
        }));
    }
    rules
}

fn bypass_groups(settings: &Sidecar) -> impl Iterator<Item = Rule> {
    let groups = bypassed_groups(settings).into_iter();
    groups.map(|conditions| accept(settings, conditions))
}

fn redirect_dns(settings: &Sidecar) -> Vec<Rule> {
    let families = dns_families(settings);
    if families.is_empty() {
        return Vec::new();
    }
    let mut rules = Vec::new();
    for to in servers(settings, &families, Expr::Destination) {
        for transport in [TCP, UDP] {
            let is_tcp = transport == TCP;
            let mut packets: Vec<_> = to.iter().cloned().collect();
            packets.extend([transport, Expr::Port(DNS_PORT)]);
            packets.extend(only_syn(settings).filter(|_| is_tcp));
            rules.push(rule(&families, packets, Expr::Redirect(ZTUNNEL_DNS_PORT)));
        }
    }
    rules
}

/// Accepts traffic within the pod; if loopback networks are captured, accepts only traffic to the pod's own
/// loopback network. The rules follow the DNS rules, because DNS queries may go to a resolver in the pod. Istio's
/// rules come before the DNS rules and exclude port 53, which captures traffic to port 53 of processes other than
/// DNS servers as outbound.
fn bypass_pod_internal(settings: &Sidecar) -> Vec<Rule> {
    let includes_loopback = match &settings.outbound_networks {
        Selection::All => false,
        Selection::These(networks) => networks
            .iter()
            .any(|network| network.address().is_loopback()),
    };
    if includes_loopback {
        let families = Family::captured(settings.ipv6).iter();
        let own = families.map(|family| Expr::Destination(loopback(settings, *family)));
        own.map(|to| accept(settings, vec![to])).collect()
    } else {
        vec![accept(settings, vec![is_loopback(Expr::LeavesBy)])]
    }
}

fn bypass_networks(settings: &Sidecar) -> impl Iterator<Item = Rule> {
    let networks = settings.excluded_outbound_networks.iter().copied();
    let networks = networks.filter(|network| is_captured(settings, *network));
    networks.map(|network| accept(settings, vec![Expr::Destination(network)]))
}

fn is_captured(settings: &Sidecar, network: Network) -> bool {
    Family::captured(settings.ipv6).contains(&Family::of_network(network))
}

/// Redirects captured ports, then captured networks; a capture of all networks includes the ports.
fn redirect_outbound(settings: &Sidecar) -> Vec<Rule> {
    let redirect = |mut packets: Vec<Expr>| {
        packets.extend(only_syn(settings));
        rule(
            Family::captured(settings.ipv6),
            packets,
            Expr::Redirect(OUTBOUND_PORT),
        )
    };
    match &settings.outbound_networks {
        Selection::All => vec![redirect(vec![TCP])],
        Selection::These(networks) => {
            let ports = settings.outbound_ports.iter();
            let ports = ports.map(|port| vec![TCP, Expr::Port(port.get())]);
            let networks = networks.iter().copied();
            let networks = networks.filter(|network| is_captured(settings, *network));
            let networks = networks.map(|network| vec![Expr::Destination(network), TCP]);
            ports.chain(networks).map(redirect).collect()
        }
    }
}
