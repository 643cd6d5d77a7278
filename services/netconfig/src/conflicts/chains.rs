//! Finds base chains of other programs that can translate or drop what inpod's rules redirect.

use super::{Finding, Kind, drops::DroppedTraffic, printable};
use crate::{
    nftables::{ChainOutline, TableOutline},
    rules::{
        Base, Hook, Kind as ChainKind, Policy, TableFamily,
        ambient::{MANGLE, NAT, NAT_PRIORITY, RAW},
    },
};

/// inpod's inet tables. A prefix would hide a table of the pod's own.
const OUR_TABLES: [&str; 3] = [NAT, MANGLE, RAW];

/// The prefix of the chains that release 0.1 made in the tables of iptables-nft.
const OUR_CHAINS: &str = "INPOD_";

/// The prefix of the inet tables of Istio's node agent (services/docs/facts/istio-ambient.md, 6.3), and a chain that
/// nothing else makes by iptables-nft (6.2).
const INCUMBENTS_TABLES: &str = "istio-ambient-";
const INCUMBENTS_CHAIN: &str = "ISTIO_PRERT";

pub(super) fn findings(tables: &[TableOutline], dropped: &[DroppedTraffic]) -> Vec<Finding> {
    let our_nat = tables
        .iter()
        .find(|table| is_ours(table) && table.name == NAT);
    let mut found = Vec::new();
    for table in tables.iter().filter(|table| !is_ours(table)) {
        if is_incumbents(table) {
            found.push(describe_incumbent(table));
            continue;
        }
        for (chain, base) in base_chains(table) {
            found.extend(check_nat_chain(table, chain, base, our_nat));
            found.extend(check_drop_policy(table, chain, base, dropped));
        }
    }
    found
}

/// Returns whether the table is one of those that this release writes.
pub(super) fn is_current(table: &TableOutline) -> bool {
    table.family == TableFamily::Inet && OUR_TABLES.contains(&table.name.as_str())
}

fn is_ours(table: &TableOutline) -> bool {
    if table.family == TableFamily::Inet {
        return is_current(table);
    }
    let mut chains = table.chains.iter();
    chains.any(|chain| chain.name.starts_with(OUR_CHAINS))
}

fn is_incumbents(table: &TableOutline) -> bool {
    if table.family == TableFamily::Inet {
        return table.name.starts_with(INCUMBENTS_TABLES);
    }
    table
        .chains
        .iter()
        .any(|chain| chain.name == INCUMBENTS_CHAIN)
}

fn describe_incumbent(table: &TableOutline) -> Finding {
    Finding {
        kind: Kind::Incumbent,
        subject: table_name(table),
        sentence: "Istio's node agent left rules here, which the next ApplyRules replaces."
            .to_owned(),
    }
}

fn base_chains(table: &TableOutline) -> impl Iterator<Item = (&ChainOutline, Base)> {
    let chains = table.chains.iter();
    chains.filter_map(|chain| Some((chain, chain.base?)))
}

/// With equal priorities, the chain that was registered last comes first (nf_nat_register_fn in
/// net/netfilter/nf_nat_core.c inserts before equals).
fn check_nat_chain(
    table: &TableOutline,
    chain: &ChainOutline,
    base: Base,
    our_nat: Option<&TableOutline>,
) -> Option<Finding> {
    let sees_connections = matches!(base.hook, Hook::Prerouting | Hook::Output);
    if base.kind != ChainKind::Nat || !sees_connections || chain.uses == 0 {
        return None;
    }
    let what = match our_nat {
        _ if base.priority > NAT_PRIORITY => return None,
        _ if base.priority < NAT_PRIORITY => {
            "comes before inpod's: connections that its rules translate do not go to ztunnel"
        }
        None => {
            "has the priority of inpod's, which is missing: once inpod's is created, it comes first until this chain \
             is created again"
        }
        Some(ours) if ours.handle < table.handle => {
            "has the priority of inpod's and was created later, so that it comes first: connections that its rules \
             translate do not go to ztunnel"
        }
        Some(_) => {
            "has the priority of inpod's and is in an older table, so that inpod's comes first; if this chain is \
             created again, it comes first, and connections that its rules translate do not go to ztunnel"
        }
    };
    Some(finding(Kind::NatChain, table, chain, base, what))
}

/// Redirection changes ports, so that rules that accept the application's ports are not enough.
fn check_drop_policy(
    table: &TableOutline,
    chain: &ChainOutline,
    base: Base,
    dropped: &[DroppedTraffic],
) -> Option<Finding> {
    let sees_redirected = matches!(base.hook, Hook::Prerouting | Hook::Input | Hook::Output);
    if base.policy != Policy::Drop || !sees_redirected {
        return None;
    }
    let what = "drops packets that its rules do not accept: they must accept the connections that inpod redirects, \
                which go to the TCP ports 15001, 15006, 15008 and 15053 and the UDP port 15053";
    let dropped = dropped.iter().find(|it| it.is_by(table, chain));
    Some(match dropped {
        Some(dropped) => {
            let what = format!("{what}; now {dropped} are dropped");
            finding(Kind::Drops, table, chain, base, &what)
        }
        None => finding(Kind::DropPolicy, table, chain, base, what),
    })
}

fn finding(
    kind: Kind,
    table: &TableOutline,
    chain: &ChainOutline,
    base: Base,
    what: &str,
) -> Finding {
    let (table, chain) = (table_name(table), printable(&chain.name));
    let Base { hook, priority, .. } = base;
    Finding {
        kind,
        sentence: format!("Chain {chain} of {table} (hook {hook}, priority {priority}) {what}."),
        subject: format!("{table}, chain {chain}"),
    }
}

pub(super) fn table_name(table: &TableOutline) -> String {
    format!("table {} {}", table.family, printable(&table.name))
}
