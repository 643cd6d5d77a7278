use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

use serde::Serialize;
use socket2::{Domain, Protocol, Socket, Type};

use crate::options::Fault;
use crate::upstream::MARK;

const BACKLOG: i32 = 1024;

/// The direction of a connection as seen from the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Direction {
    Inbound,
    Outbound,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Listener {
    /// The listener for redirected traffic from the pod.
    Outbound,
    /// The listener for redirected plaintext to the pod.
    Inbound,
    /// The listener for traffic of other ztunnels to the pod.
    Hbone,
}

impl Listener {
    pub(crate) const ALL: [Self; 3] = [Self::Outbound, Self::Inbound, Self::Hbone];

    pub(crate) const fn port(self) -> u16 {
        match self {
            Self::Outbound => 15001,
            Self::Inbound => 15006,
            Self::Hbone => 15008,
        }
    }

    pub(crate) const fn direction(self) -> Direction {
        match self {
            Self::Outbound => Direction::Outbound,
            Self::Inbound | Self::Hbone => Direction::Inbound,
        }
    }

    pub(crate) fn has(port: u16) -> bool {
        Self::ALL.iter().any(|listener| listener.port() == port)
    }

    pub(crate) fn address(self) -> SocketAddr {
        (Ipv6Addr::UNSPECIFIED, self.port()).into()
    }

    /// Opens the listener in the netns of the calling thread, for both address families if IPv6 exists.
    pub(crate) fn open(self, fault: Fault) -> io::Result<TcpListener> {
        let address = if fault == Fault::LoopbackOnly {
            (Ipv4Addr::LOCALHOST, self.port()).into()
        } else if fault == Fault::V4Only {
            (Ipv4Addr::UNSPECIFIED, self.port()).into()
        } else {
            self.address()
        };
        match listen(address, fault) {
            Err(error) if lacks_ipv6(&error) => {
                listen((Ipv4Addr::UNSPECIFIED, self.port()).into(), fault)
            }
            outcome => outcome,
        }
    }
}

/// Detects a kernel without IPv6, or booted with `ipv6.disable=1`. A netns with only `disable_ipv6` accepts `[::]`, and
/// IPv4 connections through this address.
pub(crate) fn lacks_ipv6(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    [nix::libc::EAFNOSUPPORT, nix::libc::EADDRNOTAVAIL]
        .into_iter()
        .any(|known| code == Some(known))
}

pub(crate) fn listen(address: SocketAddr, fault: Fault) -> io::Result<TcpListener> {
    let domain = Domain::for_address(address);
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(fault == Fault::V6Only)?;
    }
    // Connections of an earlier listener may linger.
    socket.set_reuse_address(true)?;
    // A second ztunnel can take over, because both listen for a while.
    socket.set_reuse_port(fault != Fault::NoReuseport)?;
    socket.set_nonblocking(true)?;
    if fault != Fault::UnmarkedListeners {
        socket.set_mark(MARK)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}
