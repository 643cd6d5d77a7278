//! Deletes conntrack entries that would keep a connection on its old path after rules change.

mod connections;

pub(crate) use connections::{flush_captured, flush_existing, flush_untranslated};

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{
    family::Family,
    marks::{DNS_PORT, ZTUNNEL_DNS_PORT},
    netlink::{KernelError, RawRequest, Socket, retry_on_race},
};
use netlink_bindings::{
    conntrack::{IterableConntrackAttrs, Nfgenmsg, OpGetDump, Request},
    traits::NetlinkRequest as _,
    utils::find_attr,
};

/// NFNL_SUBSYS_CTNETLINK with IPCTNL_MSG_CT_DELETE and IPCTNL_MSG_CT_GET_STATS (linux/netfilter/nfnetlink.h,
/// nfnetlink_conntrack.h).
const DELETE: u16 = (1 << 8) | 2;
const GET_STATS: u16 = (1 << 8) | 5;
/// CTA_STATS_GLOBAL_ENTRIES: the number of entries of the socket's netns (ctnetlink_stat_ct_fill_info).
const STATS_ENTRIES: u16 = 1;
/// The size of struct nfgenmsg.
const HEADER_BYTES: usize = 4;
/// CTA_TUPLE_ORIG: the endpoints of the first packet.
const TUPLE_ORIG: u16 = 1;
/// CTA_ID: distinguishes entries whose first packets had the same endpoints.
const ID: u16 = 12;
const ZONE: u16 = 18; // CTA_ZONE
const NESTED: u16 = 0x8000; // NLA_F_NESTED
const UDP: u8 = 17; // IPPROTO_UDP

/// Returns the source port by which answers in stale entries of DNS queries are recognised, given the families
/// whose queries go to ztunnel. Entries on the right path stay, because an outstanding answer needs its entry.
pub(crate) fn stale_reply_port(captured: &[Family], family: Family) -> u16 {
    if captured.contains(&family) {
        DNS_PORT
    } else {
        ZTUNNEL_DNS_PORT
    }
}

/// Deletes entries of UDP DNS queries on a stale path, in every zone.
pub(crate) fn flush_dns(socket: &mut Socket, captured: &[Family]) -> Result<(), KernelError> {
    delete_matching(socket, |header, attributes| {
        is_stale_query(header, attributes, captured).unwrap_or(false)
    })
}

/// Deletes the selected entries. Asks first whether the netns has entries at all: a dump takes the locks of the
/// whole node's table, 9 ms for an empty table, while the packet path waits for these locks (ctnetlink_dump_table
/// in net/netfilter/nf_conntrack_netlink.c).
fn delete_matching(
    socket: &mut Socket,
    is_selected: impl Fn(&Nfgenmsg, &IterableConntrackAttrs<'_>) -> bool,
) -> Result<(), KernelError> {
    if !has_entries(socket)? {
        return Ok(());
    }
    for entry in entries(socket, is_selected)? {
        match socket.execute("delete a connection tracking entry", &entry) {
            // The entry expired by itself.
            Err(error) if error.is(nix::Error::ENOENT) => {}
            result => result?,
        }
    }
    Ok(())
}

/// Returns whether the netns has entries, and `true` if the kernel's answer has no count.
fn has_entries(socket: &mut Socket) -> Result<bool, KernelError> {
    let request = RawRequest::new(GET_STATS, [0; HEADER_BYTES]);
    let answer = socket.get("count the connection tracking entries", &request)?;
    let count = answer.get(HEADER_BYTES..);
    let count = count.and_then(|attributes| find_attr(attributes, STATS_ENTRIES));
    Ok(count.is_none_or(|bytes| bytes.iter().any(|byte| *byte != 0)))
}

/// The number of dumps since the start, each of which walks the table of the whole node.
static DUMPS: AtomicU64 = AtomicU64::new(0);

pub(crate) fn dumps() -> u64 {
    DUMPS.load(Ordering::Relaxed)
}

/// Returns a request to delete each selected entry. Repeats a dump during which entries changed, because such a
/// dump may be incomplete.
fn entries(
    socket: &mut Socket,
    is_selected: impl Fn(&Nfgenmsg, &IterableConntrackAttrs<'_>) -> bool,
) -> Result<Vec<RawRequest>, KernelError> {
    let request = Request::new().op_get_dump(&Nfgenmsg::new());
    let entry = |payload: &[u8]| {
        let (header, attributes) = OpGetDump::decode_reply(payload);
        let is_selected = is_selected(&header, &attributes);
        is_selected.then(|| delete(&header, attributes.get_buf()))?
    };
    retry_on_race(|| {
        DUMPS.fetch_add(1, Ordering::Relaxed);
        socket.dump_some("read the connection tracking entries", &request, entry)
    })
}

fn family_of(header: &Nfgenmsg) -> Option<Family> {
    let mut families = Family::ALL.into_iter();
    families.find(|family| family.number() == header.nfgen_family)
}

/// Returns whether the entry is a DNS query on a stale path, and `None` if fields are missing.
fn is_stale_query(
    header: &Nfgenmsg,
    attributes: &IterableConntrackAttrs<'_>,
    captured: &[Family],
) -> Option<bool> {
    let proto = attributes.get_tuple_orig().ok()?.get_tuple_proto().ok()?;
    let is_question =
        proto.get_proto_num().ok()? == UDP && proto.get_proto_dst_port().ok()? == DNS_PORT;
    let family = family_of(header)?;
    let answers = attributes.get_tuple_reply().ok()?.get_tuple_proto().ok()?;
    let is_wrong = answers.get_proto_src_port().ok()? == stale_reply_port(captured, family);
    Some(is_question && is_wrong)
}

/// Builds the request to delete an entry, identified by first packet, zone and id, since the first two may have
/// been reused.
fn delete(header: &Nfgenmsg, attributes: &[u8]) -> Option<RawRequest> {
    let request = RawRequest::new(DELETE, [header.nfgen_family, 0, 0, 0]);
    let original = find_attr(attributes, TUPLE_ORIG)?;
    let request = request.push(TUPLE_ORIG | NESTED, original);
    let rest = [ZONE, ID].into_iter();
    let rest = rest.filter_map(|kind| Some((kind, find_attr(attributes, kind)?)));
    Some(rest.fold(request, |request, (kind, value)| request.push(kind, value)))
}
