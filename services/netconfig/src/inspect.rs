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
pub use listeners::{Listener, Protocol, listeners};
pub(crate) use process::{
    PROC, has_processes, has_processes_in, proc_scans, process_directories, read_process,
};
pub use process::{Process, processes};

use std::{collections::BTreeSet, fs::File, io, path::Path};

use inpod_linux::{EnterError, Netns};

use crate::netlink::KernelError;

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

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sockets {
    pub listening_ports: BTreeSet<u16>,
    /// The number of ztunnel's established connections: on ztunnel's ports, and on other ports by TPROXY. Without
    /// sock_diag, connections by TPROXY are not recognised and count as direct.
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

    /// Returns whether the socket belongs to a sidecar; `false` if the socket's user is unknown.
    fn own(&self, socket: &tcp::Socket) -> bool {
        socket.user.is_some_and(|user| self.0.contains(&user))
    }
}

/// Summarises the TCP sockets of a netns; `proxies` are a sidecar's users.
pub fn sockets(netns: &Netns, proxies: &Proxies) -> Result<Sockets, InspectError> {
    let sockets = read(netns)?;
    let listening = sockets
        .iter()
        .filter(|socket| socket.state == tcp::State::Listening);
    Ok(Sockets {
        listening_ports: listening.map(|socket| socket.local.port()).collect(),
        captured_flows: flows::captured(&sockets),
        direct_flows: flows::direct(&sockets, proxies),
    })
}

/// Counts only [`Sockets::captured_flows`] of a netns.
pub fn captured_flows(netns: &Netns) -> Result<u32, InspectError> {
    Ok(flows::captured(&read(netns)?))
}

/// Counts established TCP connections that bypass ztunnel or a sidecar, except connections within the pod and the
/// proxy's own. Without sock_diag, ztunnel's own outbound connections are counted as well.
pub fn direct_flows(netns: &Netns, proxies: &Proxies) -> Result<u32, InspectError> {
    Ok(flows::direct(&read(netns)?, proxies))
}

fn read(netns: &Netns) -> Result<Vec<tcp::Socket>, InspectError> {
    or_without_sock_diag(diag::read(netns), || read_tables(netns))
}

/// Falls back to `read` on kernels without sock_diag.
fn or_without_sock_diag<T>(
    found: Result<T, InspectError>,
    read: impl FnOnce() -> Result<T, InspectError>,
) -> Result<T, InspectError> {
    match found {
        Err(error) if diag::is_missing(&error) => read(),
        found => found,
    }
}

/// Opens the files inside the netns and reads outside: each file shows the netns in which it was opened, and
/// reading takes milliseconds.
fn read_tables(netns: &Netns) -> Result<Vec<tcp::Socket>, InspectError> {
    let tables = ["tcp", "tcp6"].map(|name| Path::new("/proc/thread-self/net").join(name));
    let [v4, v6] = netns.within(|| tables.map(File::open))?;
    let read = || {
        let v4 = io::read_to_string(v4?)?;
        // The file does not exist on kernels without IPv6.
        let v6 = v6.map_or_else(|_| Ok(String::new()), io::read_to_string)?;
        Ok(tcp::parse(&v4).chain(tcp::parse(&v6)).collect())
    };
    read().map_err(|source| InspectError::Read {
        what: "the TCP sockets",
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::KernelError;

    #[test]
    fn a_kernel_without_sock_diag_is_read_another_way_and_a_refusal_is_an_error() {
        let failed = |errno| Err(KernelError::new("read the sockets", errno).into());
        let other = || Ok("tables");
        assert_eq!(or_without_sock_diag(Ok("diag"), other).unwrap(), "diag");
        assert_eq!(
            or_without_sock_diag(failed(nix::Error::ENOENT), other).unwrap(),
            "tables"
        );
        assert!(or_without_sock_diag(failed(nix::Error::EPERM), other).is_err());
    }
}
