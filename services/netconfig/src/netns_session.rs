//! Holds a session in one netns: netlink sockets and files opened inside the netns and used from outside.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    time::{Duration, Instant},
};

use inpod_linux::{EnterError, Netns};
use nix::sys::socket::SockProtocol;

use crate::{
    family::Family,
    inspect::Proxies,
    netlink::{KernelError, Socket},
    nftables::{Nftables, Observed},
    plan::State,
    routes::{Routes, Routing},
    rules::Table,
    sysctl::{
        MigrateReq, Ports, RESERVED_PORTS_NAME, ReservedPorts, Sysctls, TCP_MIGRATE_REQ_NAME,
    },
};

/// Protocol counters of the reading thread's netns, with a line of names and a line of values per protocol
/// (proc_net(5)).
const COUNTERS: &str = "/proc/thread-self/net/snmp";

/// Counters of TCP connections opened from and to the netns (RFC 4022), which do not include forwarded connections.
const CONNECTION_COUNTERS: [&str; 2] = ["ActiveOpens", "PassiveOpens"];

#[derive(Debug, thiserror::Error)]
pub enum ReachError {
    #[error("cannot reach into the netns")]
    Enter(#[from] EnterError),
    #[error("cannot open a netlink socket in the netns, or read its sysctls")]
    Socket(#[from] io::Error),
    #[error("cannot write the sysctl {TCP_MIGRATE_REQ_NAME} of the netns")]
    Sysctl(#[source] io::Error),
    #[error("cannot write the sysctl {RESERVED_PORTS_NAME} of the netns")]
    ReservedPorts(#[source] io::Error),
}

/// Sockets and files opened by one visit of a netns, and facts read during the visit. Sockets and files keep
/// belonging to the visited netns.
#[derive(Debug)]
pub(crate) struct Visit {
    pub(crate) nftables: Nftables,
    pub(crate) routes: Routes,
    /// A socket of sock_diag(7); `None` if the kernel lacks it.
    pub(crate) sockets: Option<Socket>,
    migrates: Option<MigrateReq>,
    reserved_ports: Option<ReservedPorts>,
    counters: Option<File>,
    has_ipv6: bool,
    /// The uid of root in the owning user namespace, as numbered in netconfig's user namespace.
    root: u32,
}

impl Visit {
    /// Visits the calling thread's netns, which must be the pod's.
    pub(crate) fn here(sysctls: &Sysctls) -> io::Result<Self> {
        let sysctls = sysctls.open_for_netns()?;
        Ok(Self {
            nftables: Nftables::open()?,
            routes: Routes::open()?,
            sockets: Socket::open(SockProtocol::NetlinkSockDiag).ok(),
            migrates: sysctls.migrates()?,
            reserved_ports: sysctls.reserved_ports(),
            counters: File::open(COUNTERS).ok(),
            has_ipv6: sysctls.has_ipv6(),
            root: sysctls.root()?,
        })
    }
}

/// The visit of a claim and the state read by the claim, kept for the first operation that needs them.
///
/// Later use is safe: changes from outside are notified, the kernel refuses a change of nf_tables based on an old
/// generation, and routes are added only where none exist.
#[derive(Debug)]
pub(crate) struct Prepared {
    visit: Visit,
    /// `None` after a notification of a change from outside.
    state: Option<State>,
    read_at: Instant,
}

impl Prepared {
    /// The time after which unused descriptors are closed.
    pub(crate) const MAX_AGE: Duration = Duration::from_secs(60);

    pub(crate) fn is_stale(&self) -> bool {
        self.read_at.elapsed() > Self::MAX_AGE
    }

    /// Keeps the visit, whose session reads the state again.
    pub(crate) fn without_state(self) -> Self {
        Self {
            state: None,
            ..self
        }
    }

    /// Resumes the session, and counts connections anew because the pod may be running by now.
    pub(crate) fn resume(self, netns: &Netns) -> (NetnsSession<'_>, Result<State, KernelError>) {
        let mut session = NetnsSession::new(netns, self.visit);
        let state = match self.state {
            Some(state) => Ok(State {
                has_connected: session.has_connected(),
                ..state
            }),
            None => session.read(),
        };
        (session, state)
    }
}

#[derive(Debug)]
pub(crate) struct NetnsSession<'a> {
    pub(crate) netns: &'a Netns,
    pub(crate) visit: Visit,
}

impl<'a> NetnsSession<'a> {
    pub(crate) fn new(netns: &'a Netns, mut visit: Visit) -> Self {
        visit.nftables.socket.set_claimed(netns.id());
        visit.routes.set_claimed(netns.id());
        Self { netns, visit }
    }

    /// Keeps sockets and state for the next session.
    pub(crate) fn prepare(self, state: State) -> Prepared {
        Prepared {
            visit: self.visit,
            state: Some(state),
            read_at: Instant::now(),
        }
    }

    /// Returns whether any TCP connection was ever opened, and `true` if the counters are unreadable. Reads the
    /// counters now, not when the session began, because pods may be running.
    fn has_connected(&self) -> bool {
        self.visit
            .counters
            .as_ref()
            .and_then(|file| read_whole(file).ok())
            .is_none_or(|text| has_tcp_history(&text))
    }

    /// Returns the socket for connection tracking, which shares nf_tables' protocol.
    pub(crate) fn conntrack(&mut self) -> &mut Socket {
        &mut self.visit.nftables.socket
    }

    pub(crate) fn families(&self) -> &'static [Family] {
        if self.visit.has_ipv6 {
            &Family::ALL
        } else {
            &[Family::V4]
        }
    }

    /// Returns the users that `tables` treat as a sidecar's proxy, as numbered in netconfig's user namespace. For a pod
    /// with a user namespace of its own (`hostUsers: false`), the number is the uid in the rules plus the node's uid of
    /// the pod's root, because the kubelet maps uids contiguously.
    pub(crate) fn proxies<'t>(&self, tables: impl IntoIterator<Item = &'t Table>) -> Proxies {
        let users = tables.into_iter().flat_map(Table::matched_users);
        Proxies::of(users.filter_map(|user| self.visit.root.checked_add(user)))
    }

    pub(crate) fn read(&mut self) -> Result<State, KernelError> {
        let nftables = self.visit.nftables.read()?;
        let routing = self.visit.routes.read()?;
        Ok(self.state_with(nftables, routing))
    }

    /// Completes a state by what is read without netlink.
    pub(crate) fn state_with(&self, nftables: Observed, routing: Routing) -> State {
        State {
            nftables,
            routing,
            has_connected: self.has_connected(),
            migrates: self.visit.migrates.as_ref().map(|migrates| migrates.is_on),
            reserved_ports: self.reserved_ports().cloned(),
        }
    }

    /// Returns the ports in `net.ipv4.ip_local_reserved_ports`, and `None` if netconfig cannot replace the value.
    pub(crate) fn reserved_ports(&self) -> Option<&Ports> {
        let reserved = self.visit.reserved_ports.as_ref();
        reserved.map(|reserved| &reserved.ports)
    }

    pub(crate) fn set_reserved_ports(&mut self, ports: &Ports) -> Result<(), ReachError> {
        let reserved = self.visit.reserved_ports.as_mut();
        reserved.map_or(Ok(()), |reserved| {
            reserved.set(ports).map_err(ReachError::ReservedPorts)
        })
    }

    pub(crate) fn set_migrates(&mut self, on: bool) -> Result<(), ReachError> {
        let migrates = self.visit.migrates.as_mut();
        migrates.map_or(Ok(()), |migrates| {
            migrates.set(on).map_err(ReachError::Sysctl)
        })
    }
}

fn has_tcp_history(counters: &str) -> bool {
    let mut of_tcp = counters.lines().filter_map(|it| it.strip_prefix("Tcp:"));
    let (Some(names), Some(numbers)) = (of_tcp.next(), of_tcp.next()) else {
        return true;
    };
    let mut found = names.split_whitespace().zip(numbers.split_whitespace());
    found.any(|(name, number)| CONNECTION_COUNTERS.contains(&name) && number != "0")
}

/// Reads a file of procfs, whose size is unknown.
fn read_whole(file: &File) -> io::Result<String> {
    let mut text = vec![0; 8 * 1024];
    let length = file.read_at(&mut text, 0)?;
    text.truncate(length);
    Ok(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_netns_in_which_no_connection_was_begun_is_told_from_one_that_has_a_past() {
        let counters = |active, passive| {
            format!(
                "Udp: InDatagrams\nUdp: 7\nTcp: RtoMin ActiveOpens PassiveOpens InSegs\n\
                 Tcp: 200 {active} {passive} 12\n"
            )
        };
        assert!(!has_tcp_history(&counters(0, 0)));
        assert!(has_tcp_history(&counters(1, 0)));
        assert!(has_tcp_history(&counters(0, 30)));
        // Without counters, connections must be assumed.
        assert!(has_tcp_history("Udp: InDatagrams\nUdp: 7\n"));
    }
}
