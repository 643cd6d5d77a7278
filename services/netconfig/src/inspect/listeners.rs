//! What listens in a netns, and who.

use std::net::{IpAddr, SocketAddr};

use inpod_linux::Netns;
use netlink_bindings::{
    inet_diag::{IterableReplyAttrs, Msg},
    utils::find_attr,
};

use super::diag::{self, CLOSE, LISTEN, TCP, UDP};
use crate::error::InspectError;

/// INET_DIAG_SKV6ONLY (linux/inet_diag.h): one byte, of IPv6 sockets alone.
const ONLY_IPV6: u16 = 11;

/// A socket that takes what comes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Listener {
    /// What it speaks.
    pub protocol: Protocol,
    /// The port that it is bound to.
    pub port: u16,
    /// The address that it is bound to; unspecified for every one.
    pub address: IpAddr,
    /// Whether it takes IPv4 too, of an IPv6 socket.
    pub dual_stack: bool,
    /// The user of its owner as this process's user namespace sees it.
    pub uid: u32,
    /// The index of the interface that it is bound to, if it is.
    pub interface_index: Option<u32>,
}

/// What a socket speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// The TCP sockets of a netns that listen, and the UDP sockets that are bound and not connected, by protocol, port and
/// address.
///
/// # Errors
///
/// When it cannot be entered, or the kernel does not tell: it needs sock_diag with its modules for TCP and UDP.
pub fn listeners(netns: &Netns) -> Result<Vec<Listener>, InspectError> {
    let of = |protocol| {
        move |message: &Msg, attributes: &IterableReplyAttrs<'_>| {
            listener(protocol, message, attributes.get_buf())
        }
    };
    let mut found = diag::dump(netns, TCP, &[LISTEN], of(Protocol::Tcp))?;
    found.extend(diag::dump(netns, UDP, &[CLOSE], of(Protocol::Udp))?);
    found.sort();
    Ok(found)
}

fn listener(protocol: Protocol, message: &Msg, attributes: &[u8]) -> Listener {
    let local: SocketAddr = diag::local(message);
    let takes_both = find_attr(attributes, ONLY_IPV6) == Some(&[0]);
    Listener {
        protocol,
        port: local.port(),
        address: local.ip(),
        // One that is bound to an IPv4 address takes nothing else.
        dual_stack: takes_both && local.is_ipv6(),
        uid: message.uid,
        interface_index: Some(message.sockid.r#if).filter(|index| *index != 0),
    }
}
