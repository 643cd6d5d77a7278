//! Finds rules and settings of others in a netns that can defeat inpod's rules.
//!
//! Analyses nf_tables, which includes rules of iptables-nft. The tables of iptables-legacy cannot be read through any
//! kernel interface that is available here. Rules are followed as a packet would (`packet`, `walk`): rules that cannot
//! match any packet that inpod's rules act on are no conflict.

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

/// Any process with NET_ADMIN in the netns can add rules, so the response has to be limited.
const MAX_FINDINGS: usize = 100;

/// A rule or setting of others that can defeat inpod's rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub kind: Kind,
    /// The table and chain, the interface or the sysctl.
    pub subject: String,
    pub sentence: String,
}

/// The kinds of findings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A foreign NAT chain can translate connections before inpod's.
    NatChain,
    /// A foreign rule overwrites inpod's bits of a mark.
    UnmaskedMark,
    /// A foreign rule accepts, drops or untracks packets before inpod's rules see them.
    EarlyVerdict,
    /// Strict reverse path filtering drops packets from outside.
    RpFilter,
    /// The loopback interface is down.
    LoopbackDown,
    /// IPv6 is disabled but expected.
    Ipv6Disabled,
    /// Rules of Istio's node agent exist.
    Incumbent,
}

/// Finds conflicts in a netns whose pod has these addresses.
///
/// # Errors
///
/// When the netns cannot be entered or its state cannot be read.
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

/// Kernels without nfnetlink have no such socket, and no tables.
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
