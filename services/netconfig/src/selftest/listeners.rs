//! The sockets at which packets may arrive.

use std::{
    fmt, io,
    net::{SocketAddr, TcpListener, UdpSocket},
    os::fd::{AsFd as _, BorrowedFd},
    time::{Duration, Instant},
};

use inpod_linux::Netns;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::world::{APPLICATION, Sent, World, inside};
use crate::marks::{
    DNS_PORT, INBOUND_HBONE_PORT, INBOUND_PLAINTEXT_PORT, OUTBOUND_PORT, ZTUNNEL_DNS_PORT,
};

/// How long a packet may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// Where something arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum At {
    Outbound,
    Plaintext,
    Hbone,
    Names,
    NamesOverUdp,
    Application,
    Peer,
    PeersNames,
    PeersNamesOverUdp,
}

impl At {
    const ALL: [Self; 9] = [
        Self::Outbound,
        Self::Plaintext,
        Self::Hbone,
        Self::Names,
        Self::NamesOverUdp,
        Self::Application,
        Self::Peer,
        Self::PeersNames,
        Self::PeersNamesOverUdp,
    ];

    fn port(self) -> u16 {
        match self {
            Self::Outbound => OUTBOUND_PORT,
            Self::Plaintext => INBOUND_PLAINTEXT_PORT,
            Self::Hbone => INBOUND_HBONE_PORT,
            Self::Names | Self::NamesOverUdp => ZTUNNEL_DNS_PORT,
            Self::Application | Self::Peer => APPLICATION,
            Self::PeersNames | Self::PeersNamesOverUdp => DNS_PORT,
        }
    }

    fn is_peers(self) -> bool {
        matches!(
            self,
            Self::Peer | Self::PeersNames | Self::PeersNamesOverUdp
        )
    }

    fn is_udp(self) -> bool {
        matches!(self, Self::NamesOverUdp | Self::PeersNamesOverUdp)
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = if self.is_peers() { "peer" } else { "pod" };
        let protocol = if self.is_udp() { "UDP" } else { "TCP" };
        write!(f, "{protocol} port {} of the {side}", self.port())
    }
}

enum Listener {
    Tcp(TcpListener),
    Udp(UdpSocket),
}

/// All of them.
pub(super) struct Listeners(Vec<(At, Listener)>);

impl Listeners {
    pub(super) fn open(world: &World) -> io::Result<Self> {
        let open = |at: At| {
            let netns = if at.is_peers() {
                &world.peer
            } else {
                &world.pod
            };
            Ok((at, Listener::open(netns, at, world.has_ipv6)?))
        };
        At::ALL
            .into_iter()
            .map(open)
            .collect::<io::Result<_>>()
            .map(Self)
    }

    /// Whether what was sent arrived where it should, and what was seen of it.
    pub(super) fn judge(&self, sent: io::Result<Sent>, wanted: At) -> Result<String, String> {
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

    /// What arrives next, and from whom.
    fn next(&self) -> io::Result<Option<(At, SocketAddr)>> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            for (at, listener) in self.readable(left)? {
                match listener.take() {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    taken => return Ok(Some((at, taken?))),
                }
            }
        }
    }

    fn readable(&self, patience: Duration) -> io::Result<Vec<(At, &Listener)>> {
        let listeners = self.0.iter();
        let fds = listeners.clone().map(|(_, listener)| listener.fd());
        let mut watched: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let patience = PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX);
        poll(&mut watched, patience)?;
        let ready = listeners
            .zip(&watched)
            .filter(|(_, watched)| watched.any() == Some(true));
        Ok(ready.map(|((at, listener), _)| (*at, listener)).collect())
    }
}

impl Listener {
    /// Of every address of both families, as ztunnel's are.
    fn open(netns: &Netns, at: At, has_ipv6: bool) -> io::Result<Self> {
        let every = if has_ipv6 { "[::]" } else { "0.0.0.0" };
        let address = format!("{every}:{}", at.port());
        if at.is_udp() {
            let socket = inside(netns, || UdpSocket::bind(&address))?;
            socket.set_nonblocking(true)?;
            Ok(Self::Udp(socket))
        } else {
            let listener = inside(netns, || TcpListener::bind(&address))?;
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

    /// From whom something came. It is not answered.
    fn take(&self) -> io::Result<SocketAddr> {
        let from = match self {
            Self::Tcp(listener) => listener.accept()?.1,
            Self::Udp(socket) => socket.recv_from(&mut [0; 16])?.1,
        };
        Ok(SocketAddr::new(from.ip().to_canonical(), from.port()))
    }
}
