//! Finds rules of other programs that give packets ztunnel's mark, which inpod's rules take for ztunnel's own packets.

use super::{
    Finding, Kind,
    chains::{is_current, table_name},
    printable,
};
use crate::{
    marks::FROM_ZTUNNEL,
    netlink::KernelError,
    nftables::{Ct, MARK_TARGET, Meta, Nftables, Op, TableOutline},
};

/// Limits the chains that are read, and the rules of such a chain: any process with NET_ADMIN in the netns can add both.
const MAX_CHAINS: usize = 64;
const MAX_RULES: u32 = 256;

pub(super) fn findings(
    nftables: &mut Nftables,
    tables: &[TableOutline],
) -> Result<Vec<Finding>, KernelError> {
    let foreign = tables.iter().filter(|table| !is_current(table));
    let chains = foreign.flat_map(|table| table.chains.iter().map(move |chain| (table, chain)));
    let read = chains.filter(|(_, chain)| (1..=MAX_RULES).contains(&chain.uses));
    let mut found = Vec::new();
    for (table, chain) in read.take(MAX_CHAINS) {
        let rules = nftables.read_expressions(table.family, &table.name, &chain.name)?;
        if rules.iter().any(|rule| sets_mark(rule)) {
            let (table, chain) = (table_name(table), printable(&chain.name));
            found.push(Finding {
                kind: Kind::MarkingChain,
                sentence: format!(
                    "Chain {chain} of {table} gives packets ztunnel's mark: their connections bypass ztunnel."
                ),
                subject: format!("{table}, chain {chain}"),
            });
        }
    }
    Ok(found)
}

/// Returns whether a rule gives ztunnel's mark to a packet without a mark, or to a connection, from which other rules
/// can copy the mark to packets. Marks computed in other ways, such as maps, are not recognized.
fn sets_mark(rule: &[Op]) -> bool {
    let mut value = None;
    for op in rule {
        match op {
            Op::Immediate(data) => value = number(data),
            Op::Meta(Meta::Mark) | Op::Ct(Ct::Mark) => value = Some(0),
            Op::Bitwise { mask, xor } => {
                let parts = value.zip(number(mask)).zip(number(xor));
                value = parts.map(|((value, mask), xor)| value & mask ^ xor);
            }
            Op::SetMeta(Meta::Mark) | Op::SetCt(Ct::Mark) => {
                let is_ztunnels = |mark: u32| mark & FROM_ZTUNNEL.mask() == FROM_ZTUNNEL.value();
                if value.is_some_and(is_ztunnels) {
                    return true;
                }
            }
            Op::Unknown(name) if name == MARK_TARGET => return true,
            Op::Counter | Op::Cmp { .. } | Op::SetMeta(_) | Op::SetCt(_) => {}
            Op::Meta(_)
            | Op::Ct(_)
            | Op::Payload { .. }
            | Op::SocketMark
            | Op::Lookup(_)
            | Op::Accept
            | Op::Drop
            | Op::Reject(_)
            | Op::Redirect
            | Op::SourceNat(_)
            | Op::Tproxy(_)
            | Op::Unknown(_) => value = None,
        }
    }
    false
}

fn number(data: &[u8]) -> Option<u32> {
    data.try_into().ok().map(u32::from_ne_bytes)
}
