//! Encodes tables, chains and rules as netlink messages.

use netlink_bindings::nftables::{Nfgenmsg, Request};

use super::{
    constants::{encode_comment, header, hook_number, kind_name, policy_number},
    encode,
    leftovers::push_deletions,
    lower::lower,
    observed::Change,
};
use crate::{
    netlink::{Batch, KernelError, Socket},
    rules::{Chain, Rule, Table, TableFamily},
};

/// NFNL_SUBSYS_NFTABLES (linux/netfilter/nfnetlink.h).
const SUBSYSTEM: u16 = 10;

/// Applies a change in one transaction, which the kernel rejects as a whole if the generation has changed or any
/// part is refused.
pub(super) fn change(
    socket: &mut Socket,
    generation: u32,
    change: &Change,
) -> Result<(), KernelError> {
    if change.is_empty() {
        return Ok(());
    }
    let mut batch = begin(socket, generation);
    for (family, name) in &change.delete {
        push_delete(&mut batch, *family, name);
    }
    push_deletions(&mut batch, &change.leftovers);
    for new in &change.create {
        push_table(&mut batch, &new.table, &new.comment);
        push_chains(&mut batch, &new.table);
    }
    commit(socket, "change the tables", batch)
}

/// Begins a transaction, which the kernel rejects if the generation has changed.
pub(super) fn begin(socket: &Socket, generation: u32) -> Batch {
    let mut batch = socket.batch();
    let mut begin = Request::new().op_batch_begin_do(&batch_header());
    begin.encode().push_genid(generation);
    batch.push(&begin);
    batch
}

pub(super) fn commit(socket: &mut Socket, act: &str, mut batch: Batch) -> Result<(), KernelError> {
    batch.acknowledge_last();
    batch.push(&Request::new().op_batch_end_do(&batch_header()));
    socket.transact_change(act, &batch)
}

pub(super) fn push_delete(batch: &mut Batch, family: TableFamily, name: &str) {
    let mut request = Request::new().op_deltable_do(&header(family));
    request.encode().push_name_bytes(name.as_bytes());
    batch.push(&request);
}

pub(super) fn push_table(batch: &mut Batch, table: &Table, comment: &str) {
    let mut request = Request::new()
        .set_create()
        .set_excl()
        .op_newtable_do(&header(table.family));
    let attributes = request.encode().push_name_bytes(table.name.as_bytes());
    drop(attributes.push_userdata(&encode_comment(comment)));
    batch.push(&request);
}

/// Adds the chains and rules of a table, whose sets must exist already.
pub(super) fn push_chains(batch: &mut Batch, table: &Table) {
    for chain in &table.chains {
        push_chain(batch, table, chain);
    }
}

fn push_chain(batch: &mut Batch, table: &Table, chain: &Chain) {
    let mut request = Request::new()
        .set_create()
        .set_excl()
        .op_newchain_do(&header(table.family));
    let attributes = request.encode().push_table_bytes(table.name.as_bytes());
    let attributes = attributes.push_name_bytes(chain.name.as_bytes());
    if let Some(base) = &chain.base {
        let hook = attributes.nested_hook().push_num(hook_number(base.hook));
        let attributes = hook.push_priority(base.priority).end_nested();
        let attributes = attributes.push_policy(policy_number(base.policy));
        drop(attributes.push_type(kind_name(base.kind)));
    } else {
        drop(attributes);
    }
    batch.push(&request);
    for rule in &chain.rules {
        push_rule(batch, table, chain, rule);
    }
}

fn push_rule(batch: &mut Batch, table: &Table, chain: &Chain, rule: &Rule) {
    let mut request = Request::new()
        .set_create()
        .set_append()
        .op_newrule_do(&header(table.family));
    let attributes = request.encode().push_table_bytes(table.name.as_bytes());
    let attributes = attributes.push_chain_bytes(chain.name.as_bytes());
    let mut list = attributes.nested_expressions();
    for op in lower(rule) {
        list = encode::push(list, &op);
    }
    drop(list.end_nested());
    batch.push(&request);
}

fn batch_header() -> Nfgenmsg {
    let mut header = Nfgenmsg::new();
    header.set_res_id(SUBSYSTEM);
    header
}
