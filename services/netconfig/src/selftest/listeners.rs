use std::{
    fmt, io,
    net::{SocketAddr, TcpListener, UdpSocket},
    os::fd::{AsFd as _, BorrowedFd},
    time::{Duration, Instant},
};

use inpod_linux::Netns;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::network::{APPLICATION, Sent, TestNetwork, open_inside};
use crate::marks::{
    DNS_PORT, INBOUND_HBONE_PORT, INBOUND_PLAINTEXT_PORT, OUTBOUND_PORT, ZTUNNEL_DNS_PORT,
};

const RECEIVE_TIMEOUT: Duration = Duration::from_secs(2);

/// The socket at which a packet has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    Outbound,
    Plaintext,
    Hbone,
    Dns,
    DnsUdp,
    Application,
    Peer,
    PeerDns,
    PeerDnsUdp,
}

impl Arrival {
    const ALL: [Self; 9] = [
        Self::Outbound,
        Self::Plaintext,
        Self::Hbone,
        Self::Dns,
        Self::DnsUdp,
        Self::Application,
        Self::Peer,
        Self::PeerDns,
        Self::PeerDnsUdp,
    ];

    fn port(self) -> u16 {
        match self {
            Self::Outbound => OUTBOUND_PORT,
            Self::Plaintext => INBOUND_PLAINTEXT_PORT,
            Self::Hbone => INBOUND_HBONE_PORT,
            Self::Dns | Self::DnsUdp => ZTUNNEL_DNS_PORT,
            Self::Application | Self::Peer => APPLICATION,
            Self::PeerDns | Self::PeerDnsUdp => DNS_PORT,
        }
    }

    fn is_peer(self) -> bool {
        matches!(self, Self::Peer | Self::PeerDns | Self::PeerDnsUdp)
    }

    fn is_udp(self) -> bool {
        matches!(self, Self::DnsUdp | Self::PeerDnsUdp)
    }
}

impl fmt::Display for Arrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = if self.is_peer() { "peer" } else { "pod" };
        let protocol = if self.is_udp() { "UDP" } else { "TCP" };
        write!(f, "{protocol} port {} of the {side}", self.port())
    }
}

enum Listener {
    Tcp(TcpListener),
    Udp(UdpSocket),
}

pub(super) struct Listeners(Vec<(Arrival, Listener)>);

impl Listeners {
    pub(super) fn open(network: &TestNetwork) -> io::Result<Self> {
        let open = |at: Arrival| {
            let netns = if at.is_peer() {
                &network.peer
            } else {
                &network.pod
            };
            Ok((at, Listener::open(netns, at, network.has_ipv6)?))
        };
        Arrival::ALL
            .into_iter()
            .map(open)
            .collect::<io::Result<_>>()
            .map(Self)
    }

    /// Describes the observation as text; an error adds the expectation.
    pub(super) fn check_arrival(
        &self,
        sent: io::Result<Sent>,
        wanted: Arrival,
    ) -> Result<String, String> {
        let expected = |seen: String| format!("{seen}; expected at {wanted}");
        let sent = sent.map_err(|error| expected(format!("could not be sent: {error}")))?;
        let from = sent.from;
        match self.next() {
            Ok(Some((at, seen))) if at == wanted && seen == from => {
                Ok(format!("arrived at {at}, from {from}"))
            }
            Ok(Some((at, seen))) => Err(expected(format!(
                "sent from {from}, arrived at {at} from {seen}"
            ))),
            Ok(None) => Err(expected(format!("sent from {from}, arrived nowhere"))),
            Err(error) => Err(expected(format!("could not be received: {error}"))),
        }
    }

    fn next(&self) -> io::Result<Option<(Arrival, SocketAddr)>> {
        let deadline = Instant::now() + RECEIVE_TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            for (at, listener) in self.readable(left)? {
                match listener.receive() {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    taken => return Ok(Some((at, taken?))),
                }
            }
        }
    }

    fn readable(&self, timeout: Duration) -> io::Result<Vec<(Arrival, &Listener)>> {
        let listeners = self.0.iter();
        let fds = listeners.clone().map(|(_, listener)| listener.fd());
        let mut watched: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        poll(&mut watched, timeout)?;
        let ready = listeners
            .zip(&watched)
            .filter(|(_, watched)| watched.any() == Some(true));
        Ok(ready.map(|((at, listener), _)| (*at, listener)).collect())
    }
}

impl Listener {
    /// Listens on all addresses of both families, as ztunnel does.
    fn open(netns: &Netns, at: Arrival, has_ipv6: bool) -> io::Result<Self> {
        let every = if has_ipv6 { "[::]" } else { "0.0.0.0" };
        let address = format!("{every}:{}", at.port());
        if at.is_udp() {
            let socket = open_inside(netns, || UdpSocket::bind(&address))?;
            socket.set_nonblocking(true)?;
            Ok(Self::Udp(socket))
        } else {
            let listener = open_inside(netns, || TcpListener::bind(&address))?;
            listener.set_nonblocking(true)?;
            Ok(Self::Tcp(listener))
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Udp(socket) => socket.as_fd(),
        }
    }

    /// Accepts one connection or datagram without a reply, and returns the source address.
    fn receive(&self) -> io::Result<SocketAddr> {
        let from = match self {
            Self::Tcp(listener) => listener.accept()?.1,
            Self::Udp(socket) => socket.recv_from(&mut [0; 16])?.1,
        };
        Ok(SocketAddr::new(from.ip().to_canonical(), from.port()))
    }
}
