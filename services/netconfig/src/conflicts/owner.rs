use super::ruleset::{Family, Table};

/// inpod's tables are inet tables.
const OUR_TABLES: &str = "inpod-";

/// inpod's prefix in iptables' tables.
const OUR_CHAINS: &str = "INPOD_";

/// The node agent's tables, inet too (services/docs/facts/istio-ambient.md, 6.3).
const INCUMBENTS_TABLES: &str = "istio-ambient-";

/// The node agent's in iptables' tables (services/docs/facts/istio-ambient.md, 6.2). The second one alone
/// may be a sidecar's.
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

pub(super) fn holds_incumbents_chains(table: &Table) -> bool {
    matches!(table.family, Family::Ip | Family::Ip6) && table.chain(INCUMBENTS_CHAINS[0]).is_some()
}

/// Escapes unprintable characters and cuts after 64: any process with NET_ADMIN in the netns can choose names.
pub(super) fn printable(name: &str) -> String {
    name.chars().take(64).flat_map(char::escape_debug).collect()
}

pub(super) fn table_name(table: &Table) -> String {
    format!("table {} {}", table.family.name(), printable(&table.name))
}
