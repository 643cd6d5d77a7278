//! Describes ambient mode, with the rules of Istio's node agent (services/docs/facts/istio-ambient.md, 6.1 to 6.3) in
//! inpod's own tables.

mod guard;
mod inbound;
mod outbound;

pub(crate) use outbound::count_uncaptured_udp;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{
    Ambient, Base, Chain, Expr, Hook, InterfaceName, Kind, Network, Policy, Rule, Ruleset, Table,
    TableFamily, Transport,
};
use crate::{
    family::Family,
    marks::{DNS_PORT, FROM_ZTUNNEL, TO_ZTUNNEL, ZTUNNEL_DNS_ZONE},
};

pub const NAT: &str = "inpod-nat";

/// The table that returns replies to ztunnel, and captures for a sidecar's proxy by TPROXY.
pub const MANGLE: &str = "inpod-mangle";

/// The table that separates ztunnel's DNS queries from the application's.
pub const RAW: &str = "inpod-raw";

/// The tables of any redirection, in evaluation order.
pub const TABLES: [&str; 3] = [RAW, MANGLE, NAT];

/// The conventional priority of DNAT (NF_IP_PRI_NAT_DST).
pub(crate) const NAT_PRIORITY: i32 = -100;

/// A priority before NAT takes effect (NF_IP_PRI_MANGLE).
pub(super) const MANGLE_PRIORITY: i32 = -150;

/// A priority before connection tracking (NF_IP_PRI_RAW).
pub(super) const RAW_PRIORITY: i32 = -300;

pub(crate) fn ruleset(settings: &Ambient) -> Ruleset {
    let mut tables = Vec::new();
    if settings.dns_capture {
        tables.push(raw(settings));
    }
    let mut mangle = mangle(settings);
    mangle.chains.push(guard::input(settings));
    tables.push(mangle);
    tables.push(nat(inbound::capture(settings), outbound::capture(settings)));
    Ruleset { tables }
}

/// Keeps captured connections of a pod being withdrawn, while new connections go direct. A rule in each nat chain
/// keeps connection tracking active; without such a rule, every captured connection would be reset
/// (services/docs/facts/kernel.md, 1).
pub(crate) fn drain() -> Ruleset {
    let idle = || vec![Rule(vec![Expr::NewConnection, Expr::Counter])];
    Ruleset {
        tables: vec![mangle(&Ambient::default()), nat(idle(), idle())],
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

fn mangle(settings: &Ambient) -> Table {
    table(
        MANGLE,
        |hook| base(Kind::Filter, hook, MANGLE_PRIORITY),
        // The output chain is a route chain, so that its mark affects routing.
        |hook| base(Kind::Route, hook, MANGLE_PRIORITY),
        vec![mark_ztunnel_connections(settings)],
        vec![return_replies_to_ztunnel(settings)],
    )
}

fn nat(prerouting: Vec<Rule>, output: Vec<Rule>) -> Table {
    let base = |hook| base(Kind::Nat, hook, NAT_PRIORITY);
    table(NAT, base, base, prerouting, output)
}

/// Marks connections from ztunnel to the application. Such connections come from the client's address, so their
/// replies look like packets of the application to the client.
fn mark_ztunnel_connections(settings: &Ambient) -> Rule {
    let packets = vec![Expr::Marked(FROM_ZTUNNEL)];
    either_family(settings, packets, Expr::MarkConnection(TO_ZTUNNEL))
}

/// Marks replies, which ip rule and route table deliver to ztunnel. The mark is a constant, because restoring the
/// complete connection mark, as Istio does, would overwrite foreign bits.
fn return_replies_to_ztunnel(settings: &Ambient) -> Rule {
    let packets = vec![Expr::ConnectionMarked(TO_ZTUNNEL)];
    either_family(settings, packets, Expr::Mark(TO_ZTUNNEL))
}

/// Returns one address per captured family, as in Istio. The rest of 127.0.0.0/8 is not captured either: packets to
/// the rest leave through `lo`, which rules accept first, and a connection that passed output does not enter
/// prerouting again.
fn loopbacks(settings: &Ambient) -> impl Iterator<Item = Network> {
    let loopback = |family: &Family| match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Family::V6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
    };
    let families = Family::captured(settings.ipv6).iter();
    families.map(loopback).map(Network::host)
}

fn either_family(settings: &Ambient, packets: Vec<Expr>, action: Expr) -> Rule {
    let version = only_family(settings).map(Expr::Version);
    let counted = [Expr::Counter, action];
    Rule(version.into_iter().chain(packets).chain(counted).collect())
}

/// Returns the only captured family, or `None` if both families are captured.
fn only_family(settings: &Ambient) -> Option<Family> {
    match Family::captured(settings.ipv6) {
        [only] => Some(*only),
        _ => None,
    }
}

/// Builds a rule whose first expression selects the family.
fn one_family(packets: Vec<Expr>, action: Expr) -> Rule {
    let counted = [Expr::Counter, action];
    Rule(packets.into_iter().chain(counted).collect())
}

fn only_syn(settings: &Ambient) -> Option<Expr> {
    settings.keep_existing_connections.then_some(Expr::TcpSyn)
}

fn is_captured(settings: &Ambient, network: Network) -> bool {
    Family::captured(settings.ipv6).contains(&Family::of_network(network))
}

pub(super) fn is_loopback(direction: fn(InterfaceName) -> Expr) -> Expr {
    direction(InterfaceName::loopback())
}

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
