//! Reads all nf_tables tables that process IP packets.

use netlink_bindings::{
    nftables::{
        IterableChainAttrs, IterableRuleAttrs, Nfgenmsg, OpGetchainDump, OpGetruleDump,
        OpGettableDump, Request,
    },
    traits::NetlinkRequest as _,
};

use super::{
    decode::decode,
    owner::table_name,
    ruleset::{Base, Chain, Family, Hook, Rule, Table},
};
use crate::{
    netlink::{KernelError, Socket},
    nftables,
};

const ATTEMPTS: usize = 8;

/// Larger tables are skipped: any process with NET_ADMIN in the netns can add rules, and must
/// not exhaust netconfig's memory.
const MAX_RULES: u32 = 10_000;

/// Reads a consistent snapshot. Empty on kernels without nf_tables.
pub(super) fn read(socket: &mut Socket) -> Result<Vec<Table>, KernelError> {
    let mut attempt = 1;
    loop {
        match read_once(socket) {
            Err(error) if error.is_race() && attempt < ATTEMPTS => attempt += 1,
            Err(error) if is_missing(&error) => return Ok(Vec::new()),
            result => return result,
        }
    }
}

/// Recognises nfnetlink without nf_tables (nfnetlink_rcv_msg in net/netfilter/nfnetlink.c).
fn is_missing(error: &KernelError) -> bool {
    error.is(nix::Error::EINVAL) || error.is(nix::Error::EOPNOTSUPP)
}

fn read_once(socket: &mut Socket) -> Result<Vec<Table>, KernelError> {
    let generation = nftables::generation(socket)?;
    let mut tables = read_tables(socket)?;
    let sizes = read_chains(socket, &mut tables)?;
    for (table, size) in tables.iter_mut().zip(sizes) {
        if size > MAX_RULES {
            tracing::warn!(
                table = table_name(table),
                "Skipping a table with too many rules"
            );
        } else if size > 0 {
            read_rules(socket, table)?;
        }
    }
    if generation == nftables::generation(socket)? {
        Ok(tables)
    } else {
        Err(KernelError::new("read the tables", nix::Error::EINTR))
    }
}

fn read_tables(socket: &mut Socket) -> Result<Vec<Table>, KernelError> {
    let request = Request::new().op_gettable_dump(&Nfgenmsg::new());
    let payloads = socket.dump("read the tables", &request)?;
    let tables = payloads.iter().filter_map(|payload| {
        let (header, attributes) = OpGettableDump::decode_reply(payload);
        Some(Table {
            family: Family::from_number(header.nfgen_family)?,
            name: text(attributes.get_name().ok()?),
            handle: attributes.get_handle().unwrap_or(0),
            chains: Vec::new(),
        })
    });
    Ok(tables.collect())
}

/// Returns the number of rules and jumps per table.
fn read_chains(socket: &mut Socket, tables: &mut [Table]) -> Result<Vec<u32>, KernelError> {
    let request = Request::new().op_getchain_dump(&Nfgenmsg::new());
    let mut sizes = vec![0_u32; tables.len()];
    for payload in &socket.dump("read the chains", &request)? {
        let (header, attributes) = OpGetchainDump::decode_reply(payload);
        let (family, name) = (
            Family::from_number(header.nfgen_family),
            table_of(&attributes),
        );
        let mut candidates = tables.iter_mut().zip(&mut sizes);
        let found = candidates.find(|(table, _)| {
            Some(table.family) == family && Some(table.name.as_str()) == name.as_deref()
        });
        if let Some((table, size)) = found {
            *size = size.saturating_add(attributes.get_use().unwrap_or(0));
            table.chains.extend(chain(table.family, &attributes));
        }
    }
    Ok(sizes)
}

fn table_of(attributes: &IterableChainAttrs<'_>) -> Option<String> {
    attributes.get_table().ok().map(text)
}

fn chain(family: Family, attributes: &IterableChainAttrs<'_>) -> Option<Chain> {
    Some(Chain {
        name: text(attributes.get_name().ok()?),
        base: base(family, attributes),
        rules: Vec::new(),
    })
}

fn base(family: Family, attributes: &IterableChainAttrs<'_>) -> Option<Base> {
    let hook = attributes.get_hook().ok()?;
    Some(Base {
        is_nat: attributes.get_type().is_ok_and(|kind| kind == c"nat"),
        hook: Hook::from_number(family, hook.get_num().ok()?)?,
        priority: hook.get_priority().ok()?,
        // The policy NF_DROP.
        drops: attributes.get_policy() == Ok(0),
    })
}

fn read_rules(socket: &mut Socket, table: &mut Table) -> Result<(), KernelError> {
    let header = Nfgenmsg {
        nfgen_family: table.family.number(),
        ..Nfgenmsg::new()
    };
    let mut request = Request::new().op_getrule_dump(&header);
    request.encode().push_table_bytes(table.name.as_bytes());
    for payload in &socket.dump("read the rules", &request)? {
        let (_, attributes) = OpGetruleDump::decode_reply(payload);
        let Ok(name) = attributes.get_chain().map(text) else {
            continue;
        };
        let chain = table.chains.iter_mut().find(|chain| chain.name == name);
        if let Some(chain) = chain {
            chain.rules.push(rule(&attributes));
        }
    }
    Ok(())
}

fn rule(attributes: &IterableRuleAttrs<'_>) -> Rule {
    attributes
        .get_expressions()
        .map_or_else(|_| Rule::default(), decode)
}

fn text(name: &std::ffi::CStr) -> String {
    name.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_nf_tables_has_no_tables_and_a_refusal_is_an_error() {
        let error = |errno| KernelError::new("read the tables", errno);
        assert!(is_missing(&error(nix::Error::EINVAL)));
        assert!(is_missing(&error(nix::Error::EOPNOTSUPP)));
        assert!(!is_missing(&error(nix::Error::EPERM)));
    }
}
