//! Finds foreign rules and settings that can defeat inpod's rules.
//!
//! Analyses nf_tables, including iptables-nft. Of iptables' legacy tables only their use is known. Rules that exclude all packets that inpod's rules act on (`decode`), or that no base chain leads to
//! (`walk`), are no conflict.

mod decode;
mod environment;
mod owner;
mod read;
mod ruleset;
mod shadow;
mod walk;

use std::{io, net::IpAddr};

use inpod_linux::Netns;
use nix::sys::socket::SockProtocol;

use crate::{
    inspect::InspectError,
    legacy,
    netlink::{KernelError, Socket},
};

/// Limits the response: any process with NET_ADMIN in the netns can add rules.
const MAX_FINDINGS: usize = 100;

/// A foreign rule or setting that can defeat inpod's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub kind: Kind,
    /// Table and chain, interface or sysctl.
    pub subject: String,
    pub sentence: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Can translate connections before inpod's chain.
    NatChain,
    /// Overwrites inpod's bits of a mark.
    UnmaskedMark,
    /// Accepts, drops or untracks packets before inpod's rules see them.
    EarlyVerdict,
    /// Strict reverse path filtering drops packets from outside.
    RpFilter,
    LoopbackDown,
    Ipv6Disabled,
    Incumbent,
    /// iptables' legacy table nat is in use; its rules are unknown.
    LegacyNat,
}

/// Finds conflicts in the netns of a pod with these addresses.
pub fn find_conflicts(netns: &Netns, addresses: &[IpAddr]) -> Result<Vec<Finding>, InspectError> {
    let (socket, reader, uses_legacy_nat) = netns.within(|| {
        let socket = Socket::open(SockProtocol::NetlinkNetFilter);
        (socket, environment::Reader::open(), legacy::uses_nat())
    })?;
    let reader = reader.map_err(|source| InspectError::Read {
        what: "the interfaces",
        source,
    })?;
    let mut found = environment::findings(&reader.read()?, addresses);
    found.extend(shadow::findings(&tables(socket)?));
    found.extend(uses_legacy_nat.then(legacy_nat));
    found.truncate(MAX_FINDINGS);
    Ok(found)
}

fn legacy_nat() -> Finding {
    Finding {
        kind: Kind::LegacyNat,
        subject: "legacy table nat".to_owned(),
        sentence: "iptables' legacy table nat is in use; its rules cannot be seen here, and may translate connections \
                   before inpod's do."
            .to_owned(),
    }
}

/// Kernels without nfnetlink have no such socket and no tables.
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
