//! Deletes leftovers within a transaction.

use netlink_bindings::nftables::Request;

use super::{
    super::{change::push_delete, constants::header, observed::TableId},
    Leftovers,
};
use crate::{netlink::Batch, rules::TableFamily};

/// Deletes single rules of chains that stay, then the contents of the chains to delete, and these chains last: their
/// rules refer to each other, and the kernel refuses a transaction that deletes a referenced chain.
pub(in super::super) fn push_deletions(batch: &mut Batch, leftovers: &Leftovers) {
    let Leftovers {
        tables,
        chains,
        rules,
        migrates: _,
    } = leftovers;
    for rule in rules {
        push_rules(batch, &rule.table, &rule.chain, Some(rule.handle));
    }
    for chain in chains {
        push_rules(batch, &chain.table, &chain.name, None);
    }
    for chain in chains.iter().filter(|chain| !chain.is_referenced) {
        let (family, table) = &chain.table;
        let mut request = Request::new().op_delchain_do(&header(*family));
        let attributes = request.encode().push_table_bytes(table.as_bytes());
        drop(attributes.push_name_bytes(chain.name.as_bytes()));
        batch.push(&request);
    }
    for (_, name) in tables {
        push_delete(batch, TableFamily::Inet, name);
    }
}

/// Deletes one rule of a chain, or all rules.
fn push_rules(batch: &mut Batch, (family, table): &TableId, chain: &str, handle: Option<u64>) {
    let mut request = Request::new().op_delrule_do(&header(*family));
    let attributes = request.encode().push_table_bytes(table.as_bytes());
    let attributes = attributes.push_chain_bytes(chain.as_bytes());
    if let Some(handle) = handle {
        drop(attributes.push_handle(handle));
    } else {
        drop(attributes);
    }
    batch.push(&request);
}

/// Renders the deletions as lines for `nft -f`.
pub(in super::super) fn render_deletions(leftovers: &Leftovers) -> Vec<String> {
    let rules = leftovers.rules.iter().map(|rule| {
        let ((family, table), chain, handle) = (&rule.table, &rule.chain, rule.handle);
        format!("delete rule {family} {table} {chain} handle {handle}\n")
    });
    let chains = leftovers.chains.iter();
    let deleted = chains.clone().filter(|chain| !chain.is_referenced);
    let deleted = deleted.map(|chain| format!("delete chain {}\n", chain.describe()));
    let flushed = chains.map(|chain| format!("flush chain {}\n", chain.describe()));
    let tables = leftovers.tables.iter();
    let tables = tables.map(|(_, name)| format!("delete table {} {name}\n", TableFamily::Inet));
    rules.chain(flushed).chain(deleted).chain(tables).collect()
}
