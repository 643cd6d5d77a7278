use std::{collections::BTreeMap, ffi::CStr};

use netlink_bindings::{
    nftables::{
        IterableChainAttrs, IterableRuleAttrs, IterableTableAttrs, Nfgenmsg, OpGetchainDo,
        OpGetchainDump, OpGetgenDo, OpGetruleDump, OpGettableDo, OpGettableDump, Request,
    },
    traits::NetlinkRequest as _,
};

use super::{
    Nftables,
    constants::{decode_comment, every_family, family_of, header, hook_of, kind_of},
    decode,
    leftovers::{self, Leftovers, Meaning, SeenChain, SeenRule},
    lift::lift,
    observed::{Observed, ObservedTable},
    op::Op,
};
use crate::{
    netlink::{KernelError, Socket, retry_on_race},
    rules::{
        Base, Chain, Policy, Rule, Table, TableFamily,
        ambient::{TABLES, count_uncaptured_udp},
    },
};

/// The maximum number of rules in a table that netconfig reads: more than any redirection has.
pub(crate) const MAX_RULES: u32 = 4096;

const IPTABLES_FAMILIES: [TableFamily; 2] = [TableFamily::Ip, TableFamily::Ip6];

/// The generation of a netns whose nf_tables were never modified (nf_tables_init_net in
/// net/netfilter/nf_tables_api.c).
const FIRST_GENERATION: u32 = 1;

/// Identifies a table and counts what is in it. Any transaction that creates the table again changes the handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableState {
    handle: u64,
    /// The number of chains, sets and other objects.
    pub(crate) objects: u32,
}

/// A table read by its name.
#[derive(Debug)]
pub(crate) struct NamedTable {
    pub(crate) state: TableState,
    pub(crate) comment: Option<String>,
    pub(crate) chains: Vec<Chain>,
}

impl Nftables {
    /// Reads inpod's tables in the order of [`TABLES`] and the foreign rules that inpod replaces, as a consistent
    /// snapshot.
    pub(crate) fn read(&mut self) -> Result<Observed, KernelError> {
        retry_on_race(|| read_once(&mut self.socket))
    }

    /// Returns the kernel's count of packet filter changes.
    pub(crate) fn generation(&mut self) -> Result<u32, KernelError> {
        generation(&mut self.socket)
    }

    /// Returns the state of a table, `None` if there is none.
    pub(crate) fn table_state(
        &mut self,
        family: TableFamily,
        name: &str,
    ) -> Result<Option<TableState>, KernelError> {
        let found = get_table(&mut self.socket, family, name)?;
        Ok(found.map(|payload| state_of(&OpGettableDo::decode_reply(&payload).1)))
    }

    /// Reads the table with the family and name of `wanted`: the chains that `wanted` has, and no elements of sets. The
    /// cost depends only on this table.
    pub(crate) fn read_by_name(
        &mut self,
        wanted: &Table,
    ) -> Result<Option<NamedTable>, KernelError> {
        let Some(payload) = get_table(&mut self.socket, wanted.family, &wanted.name)? else {
            return Ok(None);
        };
        let (_, attributes) = OpGettableDo::decode_reply(&payload);
        let mut found = NamedTable {
            state: state_of(&attributes),
            comment: attributes.get_userdata().ok().and_then(decode_comment),
            chains: Vec::new(),
        };
        for chain in &wanted.chains {
            found
                .chains
                .extend(read_chain(&mut self.socket, wanted, &chain.name)?);
        }
        Ok(Some(found))
    }

    /// Reads the tables of all programs that see IP packets, in the order of creation.
    pub(crate) fn read_outlines(&mut self) -> Result<Vec<TableOutline>, KernelError> {
        let request = Request::new().op_gettable_dump(&every_family());
        let payloads = retry_on_race(|| self.socket.dump("read the tables", &request))?;
        let mut tables = BTreeMap::new();
        for payload in &payloads {
            let (header, attributes) = OpGettableDump::decode_reply(payload);
            let (Some(family), Ok(name)) = (family_of(&header), attributes.get_name()) else {
                continue;
            };
            let table = TableOutline {
                family,
                name: text(name),
                handle: attributes.get_handle().unwrap_or(0),
                chains: Vec::new(),
            };
            tables.insert((family, table.name.clone()), table);
        }
        let request = Request::new().op_getchain_dump(&every_family());
        for payload in &retry_on_race(|| self.socket.dump("read the chains", &request))? {
            let (header, attributes) = OpGetchainDump::decode_reply(payload);
            let (Some(family), Ok(table)) = (family_of(&header), attributes.get_table()) else {
                continue;
            };
            let table = tables.get_mut(&(family, text(table)));
            if let (Some(table), Ok(name)) = (table, attributes.get_name()) {
                table.chains.push(ChainOutline {
                    name: text(name),
                    base: base(&attributes),
                    uses: attributes.get_use().unwrap_or(0),
                });
            }
        }
        let mut tables: Vec<_> = tables.into_values().collect();
        tables.sort_by_key(|table| table.handle);
        Ok(tables)
    }
}

impl Nftables {
    /// Reads the rules of a chain as expressions.
    pub(crate) fn read_expressions(
        &mut self,
        family: TableFamily,
        table: &str,
        chain: &str,
    ) -> Result<Vec<Vec<Op>>, KernelError> {
        let mut request = Request::new().op_getrule_dump(&header(family));
        let attributes = request.encode().push_table_bytes(table.as_bytes());
        drop(attributes.push_chain_bytes(chain.as_bytes()));
        let payloads = retry_on_race(|| self.socket.dump("read the rules of a chain", &request))?;
        let rule = |payload: &Vec<u8>| {
            let (_, attributes) = OpGetruleDump::decode_reply(payload);
            let expressions = attributes.get_expressions();
            expressions.map(decode::ops).unwrap_or_default()
        };
        Ok(payloads.iter().map(rule).collect())
    }
}

fn read_once(socket: &mut Socket) -> Result<Observed, KernelError> {
    let generation = generation(socket)?;
    if generation == FIRST_GENERATION {
        return Ok(Observed {
            generation,
            ..Observed::default()
        });
    }
    let found = read_tables(socket)?;
    let named = |name: &&str| found.iter().find(|found| found.table.name == **name);
    let mut tables: Vec<_> = TABLES.iter().filter_map(named).cloned().collect();
    let (chains, counts) = read_chains(socket, &mut tables)?;
    let rules = if chains.iter().any(|chain| leftovers::is_known(&chain.name)) {
        let [v4, v6] = IPTABLES_FAMILIES.map(|family| read_iptables_rules(socket, family));
        [v4?, v6?].concat()
    } else {
        Vec::new()
    };
    if !tables.is_empty() {
        let has_others = found.len() > tables.len();
        read_rules(socket, &mut tables, &counts, has_others)?;
    }
    let names = found.iter().map(|found| found.table.name.as_str());
    let leftovers = Leftovers::find(names, &chains, &rules);
    let is_empty = tables.is_empty() && leftovers.is_empty();
    if !is_empty && generation != self::generation(socket)? {
        return Err(KernelError::new("read the tables", nix::Error::EINTR));
    }
    for observed in &mut tables {
        let chains = u32::try_from(observed.table.chains.len()).unwrap_or(u32::MAX);
        observed.unknown_objects = observed.unknown_objects.saturating_sub(chains);
    }
    Ok(Observed {
        generation,
        tables,
        leftovers,
    })
}

fn generation(socket: &mut Socket) -> Result<u32, KernelError> {
    let act = "read the generation of the tables";
    let payload = socket.get(act, &Request::new().op_getgen_do(&Nfgenmsg::new()))?;
    let (_, attributes) = OpGetgenDo::decode_reply(&payload);
    attributes
        .get_id()
        .map_err(|error| KernelError::new(act, error))
}

/// A table that sees IP packets, with its chains but without their rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TableOutline {
    pub(crate) family: TableFamily,
    pub(crate) name: String,
    /// Increases with each created table.
    pub(crate) handle: u64,
    pub(crate) chains: Vec<ChainOutline>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChainOutline {
    pub(crate) name: String,
    pub(crate) base: Option<Base>,
    /// The number of rules in the chain, and of jumps to the chain.
    pub(crate) uses: u32,
}

fn get_table(
    socket: &mut Socket,
    family: TableFamily,
    name: &str,
) -> Result<Option<Vec<u8>>, KernelError> {
    let mut request = Request::new().op_gettable_do(&header(family));
    request.encode().push_name_bytes(name.as_bytes());
    unless_missing(socket.get("read a table", &request))
}

fn state_of(attributes: &IterableTableAttrs<'_>) -> TableState {
    TableState {
        handle: attributes.get_handle().unwrap_or(0),
        objects: attributes.get_use().unwrap_or(0),
    }
}

fn read_chain(
    socket: &mut Socket,
    table: &Table,
    name: &str,
) -> Result<Option<Chain>, KernelError> {
    let mut request = Request::new().op_getchain_do(&header(table.family));
    let attributes = request.encode().push_table_bytes(table.name.as_bytes());
    drop(attributes.push_name_bytes(name.as_bytes()));
    let Some(payload) = unless_missing(socket.get("read a chain", &request))? else {
        return Ok(None);
    };
    let mut request = Request::new().op_getrule_dump(&header(table.family));
    let attributes = request.encode().push_table_bytes(table.name.as_bytes());
    drop(attributes.push_chain_bytes(name.as_bytes()));
    let payloads = socket.dump("read the rules of a chain", &request)?;
    let rules = payloads
        .iter()
        .map(|payload| rule(&OpGetruleDump::decode_reply(payload).1));
    let found = chain(&OpGetchainDo::decode_reply(&payload).1);
    Ok(found.map(|found| Chain {
        rules: rules.collect(),
        ..found
    }))
}

fn unless_missing<T>(result: Result<T, KernelError>) -> Result<Option<T>, KernelError> {
    match result {
        Err(error) if error.is(nix::Error::ENOENT) => Ok(None),
        result => result.map(Some),
    }
}

/// Returns the tables of family inet, still without their contents.
fn read_tables(socket: &mut Socket) -> Result<Vec<ObservedTable>, KernelError> {
    let request = Request::new().op_gettable_dump(&header(TableFamily::Inet));
    let payloads = socket.dump("read the tables", &request)?;
    let tables = payloads
        .iter()
        .map(|payload| OpGettableDump::decode_reply(payload).1);
    Ok(tables.filter_map(|attributes| table(&attributes)).collect())
}

fn table(attributes: &IterableTableAttrs<'_>) -> Option<ObservedTable> {
    Some(ObservedTable {
        table: Table {
            family: TableFamily::Inet,
            name: text(attributes.get_name().ok()?),
            chains: Vec::new(),
        },
        comment: attributes.get_userdata().ok().and_then(decode_comment),
        unknown_objects: attributes.get_use().unwrap_or(0),
        unread_rules: None,
        uncaptured_udp_flows: 0,
    })
}

/// The numbers of rules, and of jumps to chains, by the names of inpod's tables.
type RuleCounts = BTreeMap<String, u32>;

/// Adds the chains of family inet to `tables`, and counts their rules. Returns the chains in families used by iptables-nft.
fn read_chains(
    socket: &mut Socket,
    tables: &mut [ObservedTable],
) -> Result<(Vec<SeenChain>, RuleCounts), KernelError> {
    let request = Request::new().op_getchain_dump(&every_family());
    let (mut iptables_chains, mut counts) = (Vec::new(), RuleCounts::new());
    for payload in &socket.dump("read the chains", &request)? {
        let (header, attributes) = OpGetchainDump::decode_reply(payload);
        match family_of(&header) {
            Some(family @ (TableFamily::Ip | TableFamily::Ip6)) => {
                iptables_chains.extend(iptables_chain(family, &attributes));
            }
            Some(TableFamily::Inet) => {
                let Ok(name) = attributes.get_table().map(text) else {
                    continue;
                };
                let found = tables.iter_mut().find(|found| found.table.name == name);
                if let (Some(found), Some(chain)) = (found, chain(&attributes)) {
                    found.table.chains.push(chain);
                    let count = counts.entry(name).or_default();
                    *count = attributes.get_use().unwrap_or(0).saturating_add(*count);
                }
            }
            Some(TableFamily::Bridge) | None => {}
        }
    }
    Ok((iptables_chains, counts))
}

fn iptables_chain(family: TableFamily, attributes: &IterableChainAttrs<'_>) -> Option<SeenChain> {
    Some(SeenChain {
        table: (family, text(attributes.get_table().ok()?)),
        name: text(attributes.get_name().ok()?),
        uses: attributes.get_use().ok()?,
    })
}

fn chain(attributes: &IterableChainAttrs<'_>) -> Option<Chain> {
    Some(Chain {
        name: text(attributes.get_name().ok()?),
        base: base(attributes),
        rules: Vec::new(),
    })
}

fn base(attributes: &IterableChainAttrs<'_>) -> Option<Base> {
    let hook = attributes.get_hook().ok()?;
    Some(Base {
        kind: kind_of(attributes.get_type().ok()?)?,
        hook: hook_of(hook.get_num().ok()?)?,
        priority: hook.get_priority().ok()?,
        policy: match attributes.get_policy().ok()? {
            0 => Policy::Drop,
            _ => Policy::Accept,
        },
    })
}

/// Requests the rules of all tables at once if all tables are inpod's, because a request costs more than reading a
/// table. Beside foreign tables, requests each of inpod's tables alone, so that the size of the answer does not depend on
/// the foreign ones. Does not read a table that is too large to be inpod's.
fn read_rules(
    socket: &mut Socket,
    tables: &mut [ObservedTable],
    counts: &RuleCounts,
    has_others: bool,
) -> Result<(), KernelError> {
    let is_small = |count: &u32| *count <= MAX_RULES;
    if !has_others && counts.values().all(is_small) {
        let request = Request::new().op_getrule_dump(&header(TableFamily::Inet));
        match read_rules_of(socket, tables, &request) {
            Err(error) if error.is_too_large() => {}
            result => return result,
        }
    }
    for found in tables {
        let count = counts.get(&found.table.name).copied().unwrap_or(0);
        if is_small(&count) {
            let mut request = Request::new().op_getrule_dump(&header(TableFamily::Inet));
            request
                .encode()
                .push_table_bytes(found.table.name.as_bytes());
            match read_rules_of(socket, std::slice::from_mut(found), &request) {
                Err(error) if error.is_too_large() => {}
                result => {
                    result?;
                    continue;
                }
            }
        }
        found.unread_rules = Some(count);
    }
    Ok(())
}

fn read_rules_of(
    socket: &mut Socket,
    tables: &mut [ObservedTable],
    request: &OpGetruleDump<'_>,
) -> Result<(), KernelError> {
    let counting = count_uncaptured_udp();
    for payload in &socket.dump("read the rules", request)? {
        let (_, attributes) = OpGetruleDump::decode_reply(payload);
        let (Ok(table), Ok(chain)) = (attributes.get_table(), attributes.get_chain()) else {
            continue;
        };
        let (table, chain) = (text(table), text(chain));
        let Some(found) = tables.iter_mut().find(|found| found.table.name == table) else {
            continue;
        };
        let mut chains = found.table.chains.iter_mut();
        if let Some(chain) = chains.find(|found| found.name == chain) {
            let rule = rule(&attributes);
            if rule == counting {
                let counted = attributes.get_expressions().ok();
                let counted = counted.and_then(decode::counted_packets);
                found.uncaptured_udp_flows = counted.unwrap_or_default();
            }
            chain.rules.push(rule);
        }
    }
    Ok(())
}

fn read_iptables_rules(
    socket: &mut Socket,
    family: TableFamily,
) -> Result<Vec<SeenRule>, KernelError> {
    let request = Request::new().op_getrule_dump(&header(family));
    let payloads = socket.dump("read the rules", &request)?;
    let rule = |payload: &Vec<u8>| {
        let (_, attributes) = OpGetruleDump::decode_reply(payload);
        Some(SeenRule {
            table: (family, text(attributes.get_table().ok()?)),
            chain: text(attributes.get_chain().ok()?),
            handle: attributes.get_handle().ok()?,
            meaning: Meaning::of(&attributes),
        })
    };
    Ok(payloads.iter().filter_map(rule).collect())
}

fn rule(attributes: &IterableRuleAttrs<'_>) -> Rule {
    let expressions = attributes.get_expressions();
    expressions.map_or_else(|_| Rule(Vec::new()), |list| lift(&decode::ops(list)))
}

fn text(name: &CStr) -> String {
    name.to_string_lossy().into_owned()
}
