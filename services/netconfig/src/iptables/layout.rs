//! inpod's rules in iptables: chains in the built-in tables, each with one jump from a built-in chain.

use std::{fmt, str::FromStr};

use crate::{
    family::Family,
    rules::{
        Base, Hook, Kind, Policy, TableFamily,
        ambient::{MANGLE, NAT, RAW},
    },
};

pub(super) const PREFIX: &str = "INPOD_";

/// Built-in tables in evaluation order, and inpod's name for its chains in each.
pub(super) const TABLES: [(&str, &str); 3] = [("raw", RAW), ("mangle", MANGLE), ("nat", NAT)];

/// inpod's chains: name in iptables, name in a [`crate::rules::Table`], built-in chain with the jump, its hook.
const CHAINS: [(&str, &str, &str, Hook); 2] = [
    (
        "INPOD_PREROUTING",
        "prerouting",
        "PREROUTING",
        Hook::Prerouting,
    ),
    ("INPOD_OUTPUT", "output", "OUTPUT", Hook::Output),
];

/// Istio's node agent (services/docs/facts/istio-ambient.md, 1.8).
pub(super) const INCUMBENT_CHAINS: [&str; 2] = ["ISTIO_PRERT", "ISTIO_OUTPUT"];

/// Always in the nat table of Istio's sidecar. With it, `ISTIO_OUTPUT` is the sidecar's, too, not the
/// node agent's (services/docs/facts/istio-sidecar.md, 4.3).
pub(super) const SIDECAR_CHAIN: &str = "ISTIO_REDIRECT";

pub(super) fn iptables_table(ours: &str) -> Option<&'static str> {
    let mut tables = TABLES.into_iter();
    tables
        .find(|(_, name)| *name == ours)
        .map(|(table, _)| table)
}

/// Unknown chains keep their name.
pub(super) fn to_iptables_chain(name: &str) -> &str {
    let mut chains = CHAINS.iter();
    let known = chains.find(|(_, ours, _, _)| *ours == name);
    known.map_or(name, |(chain, _, _, _)| chain)
}

pub(super) fn from_iptables_chain(chain: &str) -> &str {
    let mut chains = CHAINS.iter();
    let known = chains.find(|(known, _, _, _)| *known == chain);
    known.map_or(chain, |(_, ours, _, _)| ours)
}

pub(super) fn chain_order(name: &str) -> usize {
    let mut chains = CHAINS.iter();
    let position = chains.position(|(_, ours, _, _)| *ours == name);
    position.unwrap_or(CHAINS.len())
}

pub(super) fn parent_chain(name: &str) -> Option<&'static str> {
    let mut chains = CHAINS.into_iter();
    let known = chains.find(|(_, ours, _, _)| *ours == name);
    known.map(|(_, _, origin, _)| origin)
}

/// Returns hook, type and priority of the built-in chain that jumps to it (xt_table's priority in
/// net/ipv4/netfilter/iptable_{raw,mangle,nat}.c, and `nft_xt_builtin` of iptables).
pub(super) fn base_of(ours: &str, chain: &str) -> Option<Base> {
    let (_, _, _, hook) = CHAINS.into_iter().find(|(_, name, _, _)| *name == chain)?;
    let (kind, priority) = match (ours, hook) {
        (RAW, _) => (Kind::Filter, -300),
        (MANGLE, Hook::Output) => (Kind::Route, -150),
        (MANGLE, _) => (Kind::Filter, -150),
        (NAT, _) => (Kind::Nat, -100),
        _ => return None,
    };
    Some(Base {
        kind,
        hook,
        priority,
        policy: Policy::Accept,
    })
}

pub(super) fn table_family(family: Family) -> TableFamily {
    match family {
        Family::V4 => TableFamily::Ip,
        Family::V6 => TableFamily::Ip6,
    }
}

/// A chain with its name in [`crate::backend::Observed`] as its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IstioChain {
    pub(super) family: TableFamily,
    pub(super) table: String,
    pub(super) chain: String,
}

impl fmt::Display for IstioChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            family,
            table,
            chain,
        } = self;
        write!(f, "{family} {table} {chain}")
    }
}

impl FromStr for IstioChain {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let parts: Vec<_> = text.split(' ').collect();
        let [family, table, chain] = parts.as_slice() else {
            return Err(());
        };
        let mut families = [TableFamily::Ip, TableFamily::Ip6].into_iter();
        let family = families.find(|known| known.to_string() == *family);
        Ok(Self {
            family: family.ok_or(())?,
            table: (*table).to_owned(),
            chain: (*chain).to_owned(),
        })
    }
}
