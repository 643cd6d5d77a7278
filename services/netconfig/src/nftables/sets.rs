use std::{collections::BTreeMap, net::IpAddr};

use netlink_bindings::{
    nftables::{
        IterableSetelemAttrs, OpGetsetelemDo, OpGetsetelemDump, PushSetelemAttrs, Request,
        SetelemListElemAttrs,
    },
    traits::{NetlinkRequest as _, Pusher},
};

use super::{
    Nftables, change,
    constants::{decode_comment, encode_comment, header},
    lift::ip,
    lower::bytes,
};
use crate::{
    family::Family,
    netlink::{Batch, KernelError},
    rules::{Table, TableFamily},
};

/// nft's numbers for ipv4_addr and ipv6_addr (enum datatypes in its include/datatype.h), and the lengths of both
/// types.
const TYPES: [(Family, u32, u32); 2] = [(Family::V4, 7, 4), (Family::V6, 8, 16)];

/// Limits the size of a message: an attribute holds at most 64 KiB, and an element with the longest comment takes
/// 300 bytes.
const ELEMENTS_PER_MESSAGE: usize = 128;

/// A set of addresses of one family, in an inet table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddressSet {
    pub(crate) table: &'static str,
    pub(crate) name: &'static str,
    pub(crate) family: Family,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Edit<'a> {
    /// Adds an address with a comment; the set must not contain the address.
    Add(AddressSet, IpAddr, &'a str),
    /// Deletes an address; the set must contain the address.
    Delete(AddressSet, IpAddr),
}

impl Nftables {
    /// Returns the comment of an address, possibly empty, or `None` if address, set or table is missing.
    pub(crate) fn comment_of(
        &mut self,
        set: AddressSet,
        address: IpAddr,
    ) -> Result<Option<String>, KernelError> {
        let mut request = Request::new().op_getsetelem_do(&header(TableFamily::Inet));
        let list = request.encode().push_table_bytes(set.table.as_bytes());
        let list = list.push_set_bytes(set.name.as_bytes());
        let elem = push_key(list.nested_elements().nested_elem(), address);
        drop(elem.end_nested().end_nested());
        match self
            .socket
            .get("read an element of the probe set", &request)
        {
            Err(error) if error.is(nix::Error::ENOENT) => Ok(None),
            Err(error) => Err(error),
            Ok(payload) => {
                let (_, list) = OpGetsetelemDo::decode_reply(&payload);
                let elements = list.get_elements().into_iter().flatten().flatten();
                let mut found = elements.filter_map(|SetelemListElemAttrs::Elem(elem)| {
                    (key(&elem, set.family)? == address).then(|| comment(&elem))
                });
                Ok(found.next())
            }
        }
    }

    pub(crate) fn elements(
        &mut self,
        set: AddressSet,
    ) -> Result<BTreeMap<IpAddr, String>, KernelError> {
        let mut request = Request::new().op_getsetelem_dump(&header(TableFamily::Inet));
        let list = request.encode().push_table_bytes(set.table.as_bytes());
        drop(list.push_set_bytes(set.name.as_bytes()));
        let mut found = BTreeMap::new();
        for payload in self.socket.dump("read the probe set", &request)? {
            let (_, list) = OpGetsetelemDump::decode_reply(&payload);
            let elements = list.get_elements().into_iter().flatten().flatten();
            found.extend(elements.filter_map(|SetelemListElemAttrs::Elem(elem)| {
                Some((key(&elem, set.family)?, comment(&elem)))
            }));
        }
        Ok(found)
    }

    /// Edits sets in one transaction, which the kernel rejects if the generation has changed, an address to add
    /// exists, or an address to delete does not.
    pub(crate) fn edit(&mut self, generation: u32, edits: &[Edit<'_>]) -> Result<(), KernelError> {
        let mut batch = change::begin(&self.socket, generation);
        for edit in edits {
            match *edit {
                Edit::Add(set, address, comment) => {
                    push_elements(&mut batch, set, &[(address, comment)]);
                }
                Edit::Delete(set, address) => push_deletion(&mut batch, set, address),
            }
        }
        change::commit(&mut self.socket, "change the probe set", batch)
    }

    /// Creates or replaces tables, and the sets of the table of family inet, in one transaction.
    pub(crate) fn replace_tables(
        &mut self,
        tables: &[Table],
        comment: &str,
        sets: &[(AddressSet, Vec<(IpAddr, &str)>)],
    ) -> Result<(), KernelError> {
        let generation = self.generation()?;
        let existing = self.existing(tables)?;
        let mut batch = change::begin(&self.socket, generation);
        for table in existing {
            change::push_delete(&mut batch, table.family, &table.name);
        }
        for table in tables {
            change::push_table(&mut batch, table, comment);
            if table.family == TableFamily::Inet {
                push_sets(&mut batch, sets);
            }
            change::push_chains(&mut batch, table);
        }
        change::commit(&mut self.socket, "write the probe tables", batch)
    }

    /// Deletes tables. Returns whether any existed.
    pub(crate) fn delete_tables(&mut self, tables: &[Table]) -> Result<bool, KernelError> {
        let generation = self.generation()?;
        let existing = self.existing(tables)?;
        if existing.is_empty() {
            return Ok(false);
        }
        let mut batch = change::begin(&self.socket, generation);
        for table in existing {
            change::push_delete(&mut batch, table.family, &table.name);
        }
        change::commit(&mut self.socket, "delete the probe tables", batch)?;
        Ok(true)
    }

    fn existing<'a>(&mut self, tables: &'a [Table]) -> Result<Vec<&'a Table>, KernelError> {
        let mut existing = Vec::new();
        for table in tables {
            let found = self.table_state(table.family, &table.name)?;
            existing.extend(found.map(|_| table));
        }
        Ok(existing)
    }
}

fn push_sets(batch: &mut Batch, sets: &[(AddressSet, Vec<(IpAddr, &str)>)]) {
    for (id, (set, elements)) in (1..).zip(sets) {
        push_set(batch, *set, id);
        for some in elements.chunks(ELEMENTS_PER_MESSAGE) {
            push_elements(batch, *set, some);
        }
    }
}

/// Adds a set, whose id is valid within the transaction.
fn push_set(batch: &mut Batch, set: AddressSet, id: u32) {
    let mut types = TYPES.into_iter();
    let Some((_, kind, length)) = types.find(|(family, ..)| *family == set.family) else {
        return;
    };
    let request = Request::new().set_create().set_excl();
    let mut request = request.op_newset_do(&header(TableFamily::Inet));
    let attributes = request.encode().push_table_bytes(set.table.as_bytes());
    let attributes = attributes.push_name_bytes(set.name.as_bytes()).push_id(id);
    drop(attributes.push_key_type(kind).push_key_len(length));
    batch.push(&request);
}

fn push_elements(batch: &mut Batch, set: AddressSet, elements: &[(IpAddr, &str)]) {
    let request = Request::new().set_create().set_excl();
    let mut request = request.op_newsetelem_do(&header(TableFamily::Inet));
    let list = request.encode().push_table_bytes(set.table.as_bytes());
    let mut list = list.push_set_bytes(set.name.as_bytes()).nested_elements();
    for (address, comment) in elements {
        let elem = push_key(list.nested_elem(), *address);
        list = elem.push_userdata(&encode_comment(comment)).end_nested();
    }
    drop(list.end_nested());
    batch.push(&request);
}

fn push_deletion(batch: &mut Batch, set: AddressSet, address: IpAddr) {
    let mut request = Request::new().op_delsetelem_do(&header(TableFamily::Inet));
    let list = request.encode().push_table_bytes(set.table.as_bytes());
    let list = list.push_set_bytes(set.name.as_bytes()).nested_elements();
    drop(push_key(list.nested_elem(), address).end_nested());
    batch.push(&request);
}

fn push_key<P: Pusher>(elem: PushSetelemAttrs<P>, address: IpAddr) -> PushSetelemAttrs<P> {
    elem.nested_key().push_value(&bytes(address)).end_nested()
}

fn key(elem: &IterableSetelemAttrs<'_>, family: Family) -> Option<IpAddr> {
    ip(family, elem.get_key().ok()?.get_value().ok()?)
}

/// Decodes the comment of an element like a table's comment (NFTNL_UDATA_SET_ELEM_COMMENT is 0 as well).
fn comment(elem: &IterableSetelemAttrs<'_>) -> String {
    let comment = elem.get_userdata().ok().and_then(decode_comment);
    comment.unwrap_or_default()
}
