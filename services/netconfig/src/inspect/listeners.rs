use std::net::{IpAddr, SocketAddr};

use inpod_linux::Netns;
use netlink_bindings::{
    inet_diag::{IterableReplyAttrs, Msg},
    utils::find_attr,
};

use super::diag::{self, AF_INET, AF_INET6, CLOSE, LISTEN, TCP, UDP};
use crate::{
    inspect::InspectError,
    netlink::{KernelError, Socket},
};

/// INET_DIAG_SKV6ONLY (linux/inet_diag.h): one byte, only on IPv6 sockets.
const ONLY_IPV6: u16 = 11;

/// A socket that accepts connections or datagrams.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Listener {
    pub protocol: Protocol,
    pub port: u16,
    /// The local address; the unspecified address stands for all addresses.
    pub address: IpAddr,
    /// True if an IPv6 socket accepts IPv4 as well.
    pub dual_stack: bool,
    /// The user id, as numbered in netconfig's user namespace.
    pub uid: u32,
    /// The interface to which the socket is bound, if any.
    pub interface_index: Option<u32>,
    /// The socket's mark; `None` if the kernel did not report a mark.
    pub mark: Option<u32>,
    /// The number of the socket's inode, for the search of its holders.
    pub inode: u32,
    /// The kernel's identifier of the socket, never reused.
    pub cookie: u64,
    /// The identifier of the opening process's cgroup of version 2, if the kernel reports cgroups.
    pub cgroup: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    Tcp,
    Udp,
}

/// Returns listening TCP and bound, unconnected UDP sockets, ordered by protocol, port and address.
///
/// # Errors
///
/// Fails if the kernel lacks sock_diag or its modules for TCP and UDP.
pub fn listeners(netns: &Netns) -> Result<Vec<Listener>, InspectError> {
    let of = |protocol| {
        move |message: &Msg, attributes: &IterableReplyAttrs<'_>| {
            listener(protocol, message, attributes)
        }
    };
    let mut found = diag::dump(netns, TCP, &[LISTEN], of(Protocol::Tcp))?;
    found.extend(diag::dump(netns, UDP, &[CLOSE], of(Protocol::Udp))?);
    found.sort();
    Ok(found)
}

/// Returns listeners until each of the ports has one. Reads IPv6 sockets first, which usually serve both families.
pub(crate) fn listeners_on(
    socket: &mut Socket,
    ports: &[(Protocol, u16)],
) -> Result<Vec<Listener>, KernelError> {
    let mut found: Vec<Listener> = Vec::new();
    for (protocol, number, state) in [(Protocol::Tcp, TCP, LISTEN), (Protocol::Udp, UDP, CLOSE)] {
        let of = |message: &Msg, attributes: &IterableReplyAttrs<'_>| {
            listener(protocol, message, attributes)
        };
        for family in [AF_INET6, AF_INET] {
            let is_missing = |(wanted, port): &(Protocol, u16)| {
                let is_on = |it: &Listener| (it.protocol, it.port) == (*wanted, *port);
                *wanted == protocol && !found.iter().any(is_on)
            };
            if ports.iter().any(is_missing) {
                found.extend(diag::dump_family(socket, family, number, &[state], of)?);
            }
        }
    }
    Ok(found)
}

fn listener(protocol: Protocol, message: &Msg, attributes: &IterableReplyAttrs<'_>) -> Listener {
    let local: SocketAddr = diag::local(message);
    let takes_both = find_attr(attributes.get_buf(), ONLY_IPV6) == Some(&[0]);
    Listener {
        protocol,
        port: local.port(),
        address: local.ip(),
        // A socket bound to an IPv4 address accepts only IPv4.
        dual_stack: takes_both && local.is_ipv6(),
        uid: message.uid,
        interface_index: Some(message.sockid.r#if).filter(|index| *index != 0),
        mark: attributes.get_mark().ok(),
        inode: message.inode,
        cookie: u64::from_ne_bytes(message.sockid.cookie),
        cgroup: diag::cgroup(attributes),
    }
}
