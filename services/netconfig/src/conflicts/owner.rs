//! Whose a table or chain is, by its name.

use super::ruleset::{Family, Table};

/// How the names of our tables begin. They are of family inet.
const OUR_TABLES: &str = "inpod-";

/// How the names of our chains in the tables of iptables begin.
const OUR_CHAINS: &str = "INPOD_";

/// How the names of the tables of Istio's node agent begin, of family inet too (shared facts: services/docs/facts/istio-ambient.md, 6.3).
const INCUMBENTS_TABLES: &str = "istio-ambient-";

/// Its chains in the tables of iptables (6.2). The second one alone may be a sidecar's.
const INCUMBENTS_CHAINS: [&str; 2] = ["ISTIO_PRERT", "ISTIO_OUTPUT"];

pub(super) fn is_our_table(table: &Table) -> bool {
    table.family == Family::Inet && table.name.starts_with(OUR_TABLES)
}

pub(super) fn is_our_chain(name: &str) -> bool {
    name.starts_with(OUR_CHAINS)
}

pub(super) fn is_incumbents_table(table: &Table) -> bool {
    table.family == Family::Inet && table.name.starts_with(INCUMBENTS_TABLES)
}

pub(super) fn is_incumbents_chain(table: &Table, name: &str) -> bool {
    INCUMBENTS_CHAINS.contains(&name) && holds_incumbents_chains(table)
}

/// Whether Istio's node agent has chains in a table of iptables.
pub(super) fn holds_incumbents_chains(table: &Table) -> bool {
    matches!(table.family, Family::Ip | Family::Ip6) && table.chain(INCUMBENTS_CHAINS[0]).is_some()
}

/// A name for a sentence. Whoever may write rules in a netns chooses it: what is not printable is escaped, and it ends
/// after 64 characters.
pub(super) fn printable(name: &str) -> String {
    name.chars().take(64).flat_map(char::escape_debug).collect()
}

/// A table, for a sentence.
pub(super) fn table_name(table: &Table) -> String {
    format!("table {} {}", table.family.name(), printable(&table.name))
}
