mod address;
mod cgroup;
mod connections;
mod diag;
mod flows;
mod grace_period;
mod listeners;
mod process;
mod tcp;

pub use address::addresses;
pub(crate) use address::{all_addresses, is_global};
pub(crate) use connections::{Connections, proxied};
pub(crate) use grace_period::{GRACE_PERIOD, GracePeriod};
pub(crate) use listeners::listeners_on;
pub use listeners::{Listener, Protocol, listeners};
pub(crate) use process::{
    PROC, has_processes, has_processes_in, proc_scans, process_directories, read_process,
    socket_holders,
};
pub use process::{Process, processes};

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use inpod_linux::{EnterError, Netns};
use inpod_types::cgroup::PodKey;

use crate::netlink::{KernelError, Socket};

#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    #[error("cannot inspect the netns")]
    Enter(#[from] EnterError),
    #[error("cannot inspect the netns")]
    Kernel(#[from] KernelError),
    #[error("cannot read {what} of the netns")]
    Read {
        what: &'static str,
        source: io::Error,
    },
}

impl InspectError {
    pub(crate) fn reading(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Read { what, source }
    }

    /// Returns whether sock_diag or its module for the protocol is missing, because the kernel was built without the
    /// module or can no longer load modules.
    pub(crate) fn is_missing_sock_diag(&self) -> bool {
        matches!(self, Self::Kernel(error) if lacks_sock_diag(error))
    }
}

pub(crate) fn lacks_sock_diag(error: &KernelError) -> bool {
    let errnos = [nix::Error::ENOENT, nix::Error::EPROTONOSUPPORT];
    errnos.iter().any(|errno| error.is(*errno))
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sockets {
    pub listening_ports: BTreeSet<u16>,
    /// The number of ztunnel's established connections: on ztunnel's ports, and on other ports by TPROXY.
    pub captured_flows: u32,
    /// The number of established connections that bypass ztunnel or the sidecar.
    pub direct_flows: u32,
}

/// User ids of a sidecar, as numbered in netconfig's user namespace. The connections of these users bypass nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proxies(BTreeSet<u32>);

impl Proxies {
    pub fn of(users: impl IntoIterator<Item = u32>) -> Self {
        Self(users.into_iter().collect())
    }

    /// Returns whether the socket belongs to a sidecar.
    fn own(&self, socket: &tcp::Socket) -> bool {
        self.0.contains(&socket.user)
    }
}

/// Summarises the TCP sockets of a netns; `proxies` are a sidecar's users.
pub fn sockets(netns: &Netns, proxies: &Proxies) -> Result<Sockets, InspectError> {
    let sockets = diag::read(netns)?;
    let listening = sockets
        .iter()
        .filter(|socket| socket.state == tcp::State::Listening);
    Ok(Sockets {
        listening_ports: listening.map(|socket| socket.local.port()).collect(),
        captured_flows: flows::captured(&sockets),
        direct_flows: flows::direct(&sockets, proxies),
    })
}

/// Finds the pod's processes with connections that carry ztunnel's mark, and so bypass ztunnel, and counts the
/// connections. `ztunnels` are the cgroups of ztunnel's listeners. Connections without a holder in the pod belong to
/// another ztunnel, which drains.
pub(crate) fn marked_connections(
    netns: &Netns,
    pod: Option<PodKey>,
    ztunnels: &BTreeSet<u64>,
) -> Result<BTreeMap<Process, usize>, InspectError> {
    let marked = flows::marked_by_others(diag::marked_connections(netns)?, ztunnels);
    let inodes: BTreeSet<_> = marked.iter().map(|socket| socket.inode).collect();
    let mut found = BTreeMap::new();
    if !inodes.is_empty() {
        for process in socket_holders(netns, pod, &inodes)?.into_values() {
            *found.entry(process).or_default() += 1;
        }
    }
    Ok(found)
}

/// Counts only [`Sockets::captured_flows`] of a netns.
pub fn captured_flows(netns: &Netns) -> Result<u32, InspectError> {
    Ok(flows::captured(&diag::read(netns)?))
}

/// Counts like [`captured_flows`] through a socket of sock_diag(7) in the netns.
pub(crate) fn captured_flows_on(socket: &mut Socket) -> Result<u32, InspectError> {
    Ok(flows::captured(&diag::read_on(socket)?))
}

/// Counts established TCP connections that bypass ztunnel or a sidecar, except connections within the pod and the
/// proxy's own.
pub fn direct_flows(netns: &Netns, proxies: &Proxies) -> Result<u32, InspectError> {
    Ok(flows::direct(&diag::read(netns)?, proxies))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_kernel_without_sock_diag_is_missing_it() {
        let error = |errno| InspectError::Kernel(KernelError::new("read the sockets", errno));
        assert!(error(nix::Error::ENOENT).is_missing_sock_diag());
        assert!(!error(nix::Error::EPERM).is_missing_sock_diag());
    }
}
