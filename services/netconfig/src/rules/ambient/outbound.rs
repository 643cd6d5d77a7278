//! Builds the rules for the pod's outgoing traffic, in the nat table. Replies to probes need no rule, because nat chains
//! see only the first packet of a connection; Istio has one, by which a pod reaches that address past ztunnel.

use super::{either_family, is_captured, is_loopback, loopbacks, one_family, only_syn};
use crate::{
    marks::{DNS_PORT, FROM_ZTUNNEL, OUTBOUND_PORT, TO_ZTUNNEL, ZTUNNEL_DNS_PORT},
    rules::{Ambient, Expr, Network, Rule, Transport},
};

const TCP: Expr = Expr::Protocol(Transport::Tcp);

/// Redirects DNS if requested, then other TCP unless bypassed, and counts the UDP flows left.
pub(super) fn capture(settings: &Ambient) -> Vec<Rule> {
    let mut rules = Vec::new();
    if settings.dns_capture {
        rules.push(redirect_udp_queries(settings));
        rules.extend(loopbacks(settings).map(|loopback| {
            let packets = vec![Expr::DestinationNot(loopback), TCP, Expr::Port(DNS_PORT)];
            redirect(settings, packets, ZTUNNEL_DNS_PORT)
        }));
    }
    rules.push(bypass_ztunnel_replies(settings));
    rules.extend(loopbacks(settings).map(bypass_own_addresses));
    rules.extend(bypass_exclusions(settings));
    rules.extend(loopbacks(settings).map(|loopback| {
        let packets = vec![Expr::DestinationNot(loopback), TCP];
        redirect(settings, packets, OUTBOUND_PORT)
    }));
    rules.push(count_uncaptured_udp());
    rules
}

/// Counts the UDP flows that the preceding rules leave alone. The nat chain sees only the first packet of a flow. The
/// rule has no family, because a pod without capture of IPv6 sends UDP by IPv6 past capture as well.
pub(crate) fn count_uncaptured_udp() -> Rule {
    Rule(vec![
        is_loopback(Expr::NotLeavesBy),
        Expr::Protocol(Transport::Udp),
        Expr::NotMarked(FROM_ZTUNNEL),
        Expr::Counter,
    ])
}

fn redirect(settings: &Ambient, mut packets: Vec<Expr>, port: u16) -> Rule {
    packets.extend(only_syn(settings));
    packets.push(Expr::NotMarked(FROM_ZTUNNEL));
    one_family(packets, Expr::Redirect(port))
}

fn redirect_udp_queries(settings: &Ambient) -> Rule {
    let packets = vec![
        is_loopback(Expr::NotLeavesBy),
        Expr::Protocol(Transport::Udp),
        Expr::Port(DNS_PORT),
        Expr::NotMarked(FROM_ZTUNNEL),
    ];
    either_family(settings, packets, Expr::Redirect(ZTUNNEL_DNS_PORT))
}

/// Accepts replies to ztunnel, which are not outbound traffic.
fn bypass_ztunnel_replies(settings: &Ambient) -> Rule {
    let packets = vec![TCP, Expr::Marked(TO_ZTUNNEL)];
    either_family(settings, packets, Expr::Accept)
}

/// Exempts connections of a pod to its own address.
fn bypass_own_addresses(loopback: Network) -> Rule {
    let packets = vec![Expr::DestinationNot(loopback), is_loopback(Expr::LeavesBy)];
    one_family(packets, Expr::Accept)
}

fn bypass_exclusions(settings: &Ambient) -> Vec<Rule> {
    let networks = settings.exclusions.outbound_cidrs.iter().copied();
    let networks = networks.filter(|network| is_captured(settings, *network));
    let to = |network| one_family(vec![Expr::Destination(network), TCP], Expr::Accept);
    let mut rules: Vec<_> = networks.map(to).collect();
    let ports = settings.exclusions.outbound_ports.iter();
    rules.extend(ports.map(|port| {
        let packets = vec![TCP, Expr::Port(port.get())];
        either_family(settings, packets, Expr::Accept)
    }));
    rules
}
