//! Entries of TCP connections that must not outlive the rules that they were made under.

use std::net::IpAddr;

use netlink_bindings::conntrack::IterableConntrackAttrs;

use super::{family_of, forget};
use crate::{
    family::Family,
    marks::{OF_PROXY, TO_ZTUNNEL, ZTUNNEL_DNS_PORT, ZTUNNEL_PORTS},
    netlink::{KernelError, Socket},
};

/// IPS_SRC_NAT and IPS_DST_NAT (linux/netfilter/nf_conntrack_common.h).
const TRANSLATED: u32 = 0x30;

/// IPPROTO_TCP.
const TCP: u8 = 6;

/// IP_CT_TCP_FLAG_BE_LIBERAL (linux/netfilter/nf_conntrack_tcp.h): given to whoever sent the first packet that was seen
/// where that was no SYN (tcp_new in net/netfilter/nf_conntrack_proto_tcp.c). The sysctl of that name does not set it.
const BE_LIBERAL: u8 = 0x08;

/// Deletes what is known of connections of families that no rules of ours are there for: what is left of an earlier
/// enrollment, and would pass for it a new connection of the same ports, or what others have tracked. Not what others
/// translate, nor what the pod says to itself.
pub(crate) fn forget_strangers(
    socket: &mut Socket,
    families: &[Family],
) -> Result<(), KernelError> {
    forget(socket, |header, attributes| {
        let status = attributes.get_status();
        family_of(header).is_some_and(|family| families.contains(&family))
            && is_tcp(attributes)
            && status.is_ok_and(|status| status & TRANSLATED == 0)
            && !is_loopback(attributes).unwrap_or(false)
    })
}

/// Deletes the entries of connections that were there before connection tracking was: their next packet is once more
/// the first that is seen, and meets the rules.
pub(crate) fn forget_from_before(socket: &mut Socket) -> Result<(), KernelError> {
    forget(socket, |_, attributes| {
        is_from_before(attributes).unwrap_or(false)
    })
}

/// Deletes what is known of connections that ztunnel or a sidecar's proxy took on, or opened in the name of a client. The kernel remembers
/// them for minutes after their rules are gone, and would do with a later connection of the same ports as with them.
pub(crate) fn forget_captured(socket: &mut Socket) -> Result<(), KernelError> {
    forget(socket, |_, attributes| {
        is_tcp(attributes) && (is_led(attributes).unwrap_or(false) || is_ztunnels(attributes))
    })
}

/// `None` for what is no TCP connection.
fn is_from_before(attributes: &IterableConntrackAttrs<'_>) -> Option<bool> {
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

fn is_loopback(attributes: &IterableConntrackAttrs<'_>) -> Option<bool> {
    let asked = attributes.get_tuple_orig().ok()?.get_tuple_ip().ok()?;
    let v4 = asked.get_ip_v4_dst().map(IpAddr::V4);
    let to = v4.or_else(|_| asked.get_ip_v6_dst().map(IpAddr::V6));
    to.ok().map(|to| to.is_loopback())
}

/// Whether answers come from another port than was addressed, and that one is ztunnel's.
fn is_led(attributes: &IterableConntrackAttrs<'_>) -> Option<bool> {
    let asked = attributes.get_tuple_orig().ok()?.get_tuple_proto().ok()?;
    let answers = attributes.get_tuple_reply().ok()?.get_tuple_proto().ok()?;
    let from = answers.get_proto_src_port().ok()?;
    let is_ztunnels = ZTUNNEL_PORTS.contains(&from) || from == ZTUNNEL_DNS_PORT;
    Some(is_ztunnels && asked.get_proto_dst_port().ok()? != from)
}

fn is_ztunnels(attributes: &IterableConntrackAttrs<'_>) -> bool {
    let mark = attributes.get_mark();
    let is_marked = |mark: u32| {
        let mut known = [TO_ZTUNNEL, OF_PROXY].into_iter();
        known.any(|known| mark & known.mask() == known.value())
    };
    mark.is_ok_and(is_marked)
}
