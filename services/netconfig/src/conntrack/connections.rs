//! Deletes entries of TCP connections that must not outlive the rules under which the connections began.

use std::net::{IpAddr, SocketAddr};

use netlink_bindings::conntrack::{IterableConntrackAttrs, Nfgenmsg};

use super::{delete_matching, family_of};
use crate::{
    family::Family,
    inspect::Connections,
    marks::{FROM_PROXY, TO_ZTUNNEL, ZTUNNEL_DNS_PORT, ZTUNNEL_PORTS},
    netlink::{KernelError, Socket},
};

/// IPS_SRC_NAT and IPS_DST_NAT (linux/netfilter/nf_conntrack_common.h).
const TRANSLATED: u32 = 0x30;

const TCP: u8 = 6; // IPPROTO_TCP

/// IP_CT_TCP_FLAG_BE_LIBERAL (linux/netfilter/nf_conntrack_tcp.h). The kernel sets the flag for the sender of a
/// first packet that was not a SYN (tcp_new in net/netfilter/nf_conntrack_proto_tcp.c). The sysctl of the same name
/// does not set the flag.
const BE_LIBERAL: u8 = 0x08;

/// Deletes entries of families that no rules capture yet: remains of an earlier enrollment, which a new connection
/// with the same ports would match, connections tracked on behalf of others, and connections begun meanwhile.
/// Entries with foreign NAT, within the pod, and of ztunnel or a sidecar's proxy stay: rules would capture a
/// connection of the proxy if its other end sent the next packet.
pub(crate) fn flush_untranslated(
    socket: &mut Socket,
    families: &[Family],
    proxied: &Connections,
) -> Result<(), KernelError> {
    delete_matching(socket, |header, attributes| {
        is_of(header, families)
            && is_untranslated(attributes)
            && !is_loopback(attributes).unwrap_or(false)
            && !is_among(attributes, proxied)
    })
}

/// Deletes entries of connections older than the rules, so that the next packet counts as a first packet and meets
/// the rules. The endpoints in `unclosed` identify connections which connection tracking saw begin before the
/// rules. Connections of ztunnel and of a sidecar's proxy stay.
pub(crate) fn flush_existing(
    socket: &mut Socket,
    families: &[Family],
    unclosed: &Connections,
    proxied: &Connections,
) -> Result<(), KernelError> {
    delete_matching(socket, |header, attributes| {
        let bypasses = || is_untranslated(attributes) && !is_ztunnels(attributes);
        let is_unclosed = || is_among(attributes, unclosed) && bypasses();
        is_of(header, families)
            && (is_picked_up(attributes).unwrap_or(false) || is_unclosed())
            && !is_among(attributes, proxied)
    })
}

/// Deletes entries of connections that ztunnel or a sidecar's proxy accepted, or opened from a client's address.
/// The kernel keeps these entries for minutes, and would treat a new connection with the same ports alike.
pub(crate) fn flush_captured(socket: &mut Socket, families: &[Family]) -> Result<(), KernelError> {
    delete_matching(socket, |header, attributes| {
        is_of(header, families)
            && is_tcp(attributes)
            && (is_redirected(attributes).unwrap_or(false) || is_ztunnels(attributes))
    })
}

fn is_of(header: &Nfgenmsg, families: &[Family]) -> bool {
    family_of(header).is_some_and(|family| families.contains(&family))
}

/// Returns whether the first packet seen by conntrack was not a SYN, and `None` if the entry is not of TCP.
fn is_picked_up(attributes: &IterableConntrackAttrs<'_>) -> Option<bool> {
    let tcp = attributes.get_protoinfo().ok()?.get_protoinfo_tcp().ok()?;
    let first = tcp.get_tcp_flags_original().ok()?;
    Some(first.flags & BE_LIBERAL != 0)
}

fn is_tcp(attributes: &IterableConntrackAttrs<'_>) -> bool {
    let proto = attributes
        .get_tuple_orig()
        .and_then(|tuple| tuple.get_tuple_proto())
        .and_then(|proto| proto.get_proto_num());
    proto.is_ok_and(|found| found == TCP)
}

fn is_untranslated(attributes: &IterableConntrackAttrs<'_>) -> bool {
    let status = attributes.get_status();
    is_tcp(attributes) && status.is_ok_and(|status| status & TRANSLATED == 0)
}

fn is_among(attributes: &IterableConntrackAttrs<'_>, connections: &Connections) -> bool {
    ends(attributes).is_some_and(|(from, to)| connections.has(from, to))
}

/// Returns the source and the destination of the connection's first packet.
fn ends(attributes: &IterableConntrackAttrs<'_>) -> Option<(SocketAddr, SocketAddr)> {
    let asked = attributes.get_tuple_orig().ok()?;
    let (address, port) = (asked.get_tuple_ip().ok()?, asked.get_tuple_proto().ok()?);
    let from = address.get_ip_v4_src().map(IpAddr::V4);
    let from = from.or_else(|_| address.get_ip_v6_src().map(IpAddr::V6));
    let to = address.get_ip_v4_dst().map(IpAddr::V4);
    let to = to.or_else(|_| address.get_ip_v6_dst().map(IpAddr::V6));
    Some((
        SocketAddr::new(from.ok()?, port.get_proto_src_port().ok()?),
        SocketAddr::new(to.ok()?, port.get_proto_dst_port().ok()?),
    ))
}

fn is_loopback(attributes: &IterableConntrackAttrs<'_>) -> Option<bool> {
    ends(attributes).map(|(_, to)| to.ip().is_loopback())
}

/// Returns whether NAT changed the destination to a port of ztunnel.
fn is_redirected(attributes: &IterableConntrackAttrs<'_>) -> Option<bool> {
    let asked = attributes.get_tuple_orig().ok()?.get_tuple_proto().ok()?;
    let answers = attributes.get_tuple_reply().ok()?.get_tuple_proto().ok()?;
    let from = answers.get_proto_src_port().ok()?;
    let is_ztunnels = ZTUNNEL_PORTS.contains(&from) || from == ZTUNNEL_DNS_PORT;
    Some(is_ztunnels && asked.get_proto_dst_port().ok()? != from)
}

fn is_ztunnels(attributes: &IterableConntrackAttrs<'_>) -> bool {
    let mark = attributes.get_mark();
    let is_marked = |mark: u32| {
        let mut known = [TO_ZTUNNEL, FROM_PROXY].into_iter();
        known.any(|known| mark & known.mask() == known.value())
    };
    mark.is_ok_and(is_marked)
}
