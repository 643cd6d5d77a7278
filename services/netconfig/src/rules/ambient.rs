//! The redirection of ambient mesh, as Istio's node agent writes it (shared facts: services/docs/facts/istio-ambient.md, 6.1 to 6.3; for
//! TPROXY the rules of Istio 1.21), in tables of our own.

mod inbound;
mod outbound;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{
    Ambient, Base, Chain, Expr, Hook, InterfaceName, Kind, Network, Policy, Rule, Ruleset, Table,
    TableFamily, Transport,
};
use crate::{
    family::Family,
    marks::{DNS_PORT, FROM_ZTUNNEL, TO_ZTUNNEL, ZTUNNEL_DNS_ZONE},
};

/// The table that redirects.
pub const NAT: &str = "inpod-nat";

/// The table that brings replies back to ztunnel, and captures by TPROXY.
pub const MANGLE: &str = "inpod-mangle";

/// The table that keeps ztunnel's own name resolution apart.
pub const RAW: &str = "inpod-raw";

/// Every table that is ours, whatever the redirection, in the order in which they take effect.
pub const TABLES: [&str; 3] = [RAW, MANGLE, NAT];

/// Where every NAT is by convention (NF_IP_PRI_NAT_DST).
pub(super) const NAT_PRIORITY: i32 = -100;

/// Before NAT (NF_IP_PRI_MANGLE).
pub(super) const MANGLE_PRIORITY: i32 = -150;

/// Before connections are tracked (NF_IP_PRI_RAW).
pub(super) const RAW_PRIORITY: i32 = -300;

/// All of it.
pub(crate) fn ruleset(settings: &Ambient) -> Ruleset {
    let mut tables = Vec::new();
    if settings.dns_capture {
        tables.push(raw(settings));
    }
    tables.push(mangle(settings, inbound::by_tproxy(settings)));
    let output = outbound::capture(settings);
    tables.push(nat(inbound::by_redirect(settings), output));
    Ruleset { tables }
}

/// What takes its place while a pod is withdrawn: no new connection is captured, and what is captured lives on. The
/// one rule in each chain of the nat table keeps the netns's connection tracking alive, without which every captured
/// connection would be reset (services/docs/facts/kernel.md, 1).
pub(crate) fn drain() -> Ruleset {
    let idle = || vec![Rule(vec![Expr::NewConnection, Expr::Counter])];
    Ruleset {
        tables: vec![mangle(&Ambient::default(), Vec::new()), nat(idle(), idle())],
    }
}

fn raw(settings: &Ambient) -> Table {
    let base = |hook| base(Kind::Filter, hook, RAW_PRIORITY);
    let of_ztunnel = vec![
        Expr::Protocol(Transport::Udp),
        Expr::Port(DNS_PORT),
        Expr::Marked(FROM_ZTUNNEL),
    ];
    let to_ztunnel = vec![
        Expr::Protocol(Transport::Udp),
        Expr::SourcePort(DNS_PORT),
        Expr::NotMarked(FROM_ZTUNNEL),
    ];
    let separate = |packets| either_family(settings, packets, Expr::Zone(ZTUNNEL_DNS_ZONE));
    table(
        RAW,
        base,
        base,
        vec![separate(to_ztunnel)],
        vec![separate(of_ztunnel)],
    )
}

fn mangle(settings: &Ambient, capture: Vec<Rule>) -> Table {
    let mut prerouting = vec![mark_ztunnel_connections(settings)];
    prerouting.extend(capture);
    table(
        MANGLE,
        |hook| base(Kind::Filter, hook, MANGLE_PRIORITY),
        // Of type route: the mark that it sets decides on the way of the packet.
        |hook| base(Kind::Route, hook, MANGLE_PRIORITY),
        prerouting,
        vec![return_replies_to_ztunnel(settings)],
    )
}

fn nat(prerouting: Vec<Rule>, output: Vec<Rule>) -> Table {
    let base = |hook| base(Kind::Nat, hook, NAT_PRIORITY);
    table(NAT, base, base, prerouting, output)
}

/// A connection that ztunnel opens to the application bears the client's address. It is remembered, so that
/// the replies, which go to the client's address, can be told from what the application says on its own.
fn mark_ztunnel_connections(settings: &Ambient) -> Rule {
    let packets = vec![Expr::Marked(FROM_ZTUNNEL)];
    either_family(settings, packets, Expr::MarkConnection(TO_ZTUNNEL))
}

/// The mark leads the replies, by ip rule and route table, to ztunnel's socket instead of out of the pod. It is a
/// constant here, since the connection was just seen to bear it: restoring the whole of the connection's mark, as
/// Istio does, would overwrite the bits of others.
fn return_replies_to_ztunnel(settings: &Ambient) -> Rule {
    let packets = vec![Expr::ConnectionMarked(TO_ZTUNNEL)];
    either_family(settings, packets, Expr::Mark(TO_ZTUNNEL))
}

/// One address of each family that is captured, as with Istio. The rest of 127.0.0.0/8 is not captured either: what
/// goes there leaves by `lo`, which is accepted first, and a connection that passed the output chain does not enter
/// the prerouting one again.
fn loopbacks(settings: &Ambient) -> impl Iterator<Item = Network> {
    let loopback = |family: &Family| match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Family::V6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
    };
    let families = settings.families().iter();
    families.map(loopback).map(Network::host)
}

/// A rule for every family that is captured.
fn either_family(settings: &Ambient, packets: Vec<Expr>, action: Expr) -> Rule {
    let version = only_family(settings).map(Expr::Version);
    let counted = [Expr::Counter, action];
    Rule(version.into_iter().chain(packets).chain(counted).collect())
}

/// The family that is captured, if that is one.
fn only_family(settings: &Ambient) -> Option<Family> {
    match settings.families() {
        [only] => Some(*only),
        _ => None,
    }
}

/// A rule of the family that its first expression demands.
fn one_family(packets: Vec<Expr>, action: Expr) -> Rule {
    let counted = [Expr::Counter, action];
    Rule(packets.into_iter().chain(counted).collect())
}

/// What is captured only where it begins, if that is wished.
fn only_syn(settings: &Ambient) -> Option<Expr> {
    settings.keep_existing_connections.then_some(Expr::TcpSyn)
}

/// Whether a network's family is captured at all.
fn is_captured(settings: &Ambient, network: Network) -> bool {
    settings.families().contains(&network.family())
}

pub(super) fn is_loopback(direction: fn(InterfaceName) -> Expr) -> Expr {
    direction(InterfaceName::loopback())
}

/// A table whose two chains see what arrives and what is sent.
pub(super) fn table(
    name: &str,
    prerouting_base: impl Fn(Hook) -> Base,
    output_base: impl Fn(Hook) -> Base,
    prerouting: Vec<Rule>,
    output: Vec<Rule>,
) -> Table {
    let chain = |name: &str, base: Base, rules| Chain {
        name: name.to_owned(),
        base: Some(base),
        rules,
    };
    Table {
        family: TableFamily::Inet,
        name: name.to_owned(),
        chains: vec![
            chain("prerouting", prerouting_base(Hook::Prerouting), prerouting),
            chain("output", output_base(Hook::Output), output),
        ],
    }
}

pub(super) fn base(kind: Kind, hook: Hook, priority: i32) -> Base {
    Base {
        kind,
        hook,
        priority,
        policy: Policy::Accept,
    }
}
