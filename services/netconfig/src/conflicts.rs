//! The conflict radar: what of others in a netns can keep our rules from doing what they say, a sentence each.
//!
//! It sees nf_tables, in which iptables-nft writes too; what iptables-legacy holds is not told by any interface of
//! the kernel's that can be used here, and is left out. Rules are followed as packets would be (`packet`, `walk`):
//! what cannot meet a packet that ours act on is no finding.

mod decode;
mod environment;
mod op;
mod owner;
mod packet;
mod read;
mod ruleset;
mod shadow;
mod walk;

use std::{io, net::IpAddr};

use inpod_linux::Netns;
use nix::sys::socket::SockProtocol;

use crate::{
    error::InspectError,
    netlink::{KernelError, Socket},
};

/// How many findings are told: who may write rules in a netns must not make an answer endless.
const MAX_FINDINGS: usize = 100;

/// Something of others that can keep rules from doing what they say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Of which kind.
    pub kind: Kind,
    /// Where it is: a table and chain, an interface, a sysctl.
    pub subject: String,
    /// What it does.
    pub sentence: String,
}

/// Kinds of findings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A NAT chain of others that can decide instead of ours.
    NatChain,
    /// A rule of others that writes our bits of a mark.
    UnmaskedMark,
    /// A rule of others that ends the way of packets before ours see them.
    EarlyVerdict,
    /// Strict reverse path filtering that drops what comes from outside.
    RpFilter,
    /// The loopback interface is down.
    LoopbackDown,
    /// IPv6 is switched off and expected.
    Ipv6Disabled,
    /// Rules of Istio's node agent.
    Incumbent,
}

/// Looks for what stands in the way in a netns, or could. `addresses` are those that the pod was given.
///
/// # Errors
///
/// When it cannot be entered, or the kernel does not tell.
pub fn find_conflicts(netns: &Netns, addresses: &[IpAddr]) -> Result<Vec<Finding>, InspectError> {
    let (socket, reader) = netns.within(|| {
        let socket = Socket::open(SockProtocol::NetlinkNetFilter);
        (socket, environment::Reader::open())
    })?;
    let reader = reader.map_err(|source| InspectError::Read {
        what: "the interfaces",
        source,
    })?;
    let mut found = environment::findings(&reader.read()?, addresses);
    found.extend(shadow::findings(&tables(socket)?));
    found.truncate(MAX_FINDINGS);
    Ok(found)
}

/// A kernel without nfnetlink has no such socket.
fn tables(socket: io::Result<Socket>) -> Result<Vec<ruleset::Table>, KernelError> {
    match socket {
        Ok(mut socket) => read::read(&mut socket),
        Err(error) if is_missing(&error) => Ok(Vec::new()),
        Err(error) => Err(KernelError::new("open a netlink socket", error)),
    }
}

fn is_missing(error: &io::Error) -> bool {
    error.raw_os_error() == io::Error::from(nix::Error::EPROTONOSUPPORT).raw_os_error()
}

#[cfg(test)]
mod tests;
