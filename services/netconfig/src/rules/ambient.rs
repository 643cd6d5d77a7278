//! The redirection of ambient mesh, as Istio's node agent writes it (shared facts: istio-ambient.md, 6.1 to 6.3), in
//! tables of our own.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Base, Chain, Expr, Hook, Kind, Policy, Rule, Ruleset, Table};
use crate::marks::{
    FROM_ZTUNNEL, INBOUND_HBONE_PORT, INBOUND_PLAINTEXT_PORT, OUTBOUND_PORT, TO_ZTUNNEL,
};

/// The table that redirects.
pub const NAT: &str = "inpod-nat";

/// The table that brings replies back to ztunnel.
pub const MANGLE: &str = "inpod-mangle";

/// Every table that is ours, whatever the redirection.
pub const TABLES: [&str; 2] = [MANGLE, NAT];

/// Where every NAT is by convention (NF_IP_PRI_NAT_DST).
const NAT_PRIORITY: i32 = -100;

/// Before NAT (NF_IP_PRI_MANGLE).
const MANGLE_PRIORITY: i32 = -150;

/// One address each, as with Istio. The rest of 127.0.0.0/8 is not captured either: what goes there leaves by `lo`,
/// which is accepted first, and a connection that passed the output chain does not enter the prerouting one again.
const LOOPBACK: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

/// All of it: both families, since rules of a family that a netns does not have match nothing.
pub(crate) fn ruleset() -> Ruleset {
    Ruleset {
        tables: vec![mangle(), nat(capture_inbound(), capture_outbound())],
    }
}

/// What takes the place of the nat table while a pod is withdrawn: no new connection is captured. The one rule in
/// each chain keeps the netns's connection tracking alive, without which every captured connection would be reset
/// (kernel-facts.md, 1).
pub(crate) fn drain() -> Ruleset {
    let idle = || vec![rule([Expr::NewConnection, Expr::Counter])];
    Ruleset {
        tables: vec![nat(idle(), idle())],
    }
}

fn nat(prerouting: Vec<Rule>, output: Vec<Rule>) -> Table {
    let base = |hook| base(Kind::Nat, hook, NAT_PRIORITY);
    table(NAT, base, base, prerouting, output)
}

fn mangle() -> Table {
    table(
        MANGLE,
        |hook| base(Kind::Filter, hook, MANGLE_PRIORITY),
        // Of type route: the mark that it sets decides on the way of the packet.
        |hook| base(Kind::Route, hook, MANGLE_PRIORITY),
        vec![tag_ztunnels_connections()],
        vec![return_replies_to_ztunnel()],
    )
}

/// Inbound TCP goes to ztunnel, but for what is to ztunnel already, or from it.
fn capture_inbound() -> Vec<Rule> {
    let capture = |loopback| {
        rule([
            Expr::DestinationNot(loopback),
            Expr::Tcp,
            Expr::PortNot(INBOUND_HBONE_PORT),
            Expr::NotMarked(FROM_ZTUNNEL),
            Expr::Counter,
            Expr::Redirect(INBOUND_PLAINTEXT_PORT),
        ])
    };
    LOOPBACK.map(capture).into()
}

fn capture_outbound() -> Vec<Rule> {
    let mut rules = vec![spare_replies_to_ztunnel()];
    rules.extend(LOOPBACK.map(spare_own_addresses));
    rules.extend(LOOPBACK.map(|loopback| {
        rule([
            Expr::DestinationNot(loopback),
            Expr::Tcp,
            Expr::NotMarked(FROM_ZTUNNEL),
            Expr::Counter,
            Expr::Redirect(OUTBOUND_PORT),
        ])
    }));
    rules
}

/// Replies on the way back to ztunnel are no outbound connections.
fn spare_replies_to_ztunnel() -> Rule {
    rule([
        Expr::Tcp,
        Expr::Marked(TO_ZTUNNEL),
        Expr::Counter,
        Expr::Accept,
    ])
}

/// A pod that calls itself by its own address is not captured.
fn spare_own_addresses(loopback: IpAddr) -> Rule {
    rule([
        Expr::LeavesBy("lo".to_owned()),
        Expr::DestinationNot(loopback),
        Expr::Counter,
        Expr::Accept,
    ])
}

/// A connection that ztunnel opens to the application bears the client's address. It is remembered, so that
/// the replies, which go to the client's address, can be told from what the application says on its own.
fn tag_ztunnels_connections() -> Rule {
    rule([
        Expr::Marked(FROM_ZTUNNEL),
        Expr::Counter,
        Expr::MarkConnection(TO_ZTUNNEL),
    ])
}

/// The mark leads the replies, by ip rule and route table, to ztunnel's socket instead of out of the pod. It is a
/// constant here, since the connection was just seen to bear it: restoring the whole of the connection's mark, as
/// Istio does, would overwrite the bits of others.
fn return_replies_to_ztunnel() -> Rule {
    rule([
        Expr::ConnectionMarked(TO_ZTUNNEL),
        Expr::Counter,
        Expr::Mark(TO_ZTUNNEL),
    ])
}

fn table(
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
        name: name.to_owned(),
        chains: vec![
            chain("prerouting", prerouting_base(Hook::Prerouting), prerouting),
            chain("output", output_base(Hook::Output), output),
        ],
    }
}

fn base(kind: Kind, hook: Hook, priority: i32) -> Base {
    Base {
        kind,
        hook,
        priority,
        policy: Policy::Accept,
    }
}

fn rule<const N: usize>(exprs: [Expr; N]) -> Rule {
    Rule(exprs.into())
}
