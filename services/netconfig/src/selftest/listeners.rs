use std::{
    fmt, io,
    mem::MaybeUninit,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::Socket;

use super::network::{APPLICATION, Sent, Side, TestNetwork};
use crate::{
    inspect::Protocol,
    marks::{
        DNS_PORT, FROM_ZTUNNEL, INBOUND_HBONE_PORT, INBOUND_PLAINTEXT_PORT, OUTBOUND_PORT,
        ZTUNNEL_DNS_PORT,
    },
};

const RECEIVE_TIMEOUT: Duration = Duration::from_secs(2);

/// The maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 16;

pub(super) const OUTBOUND: Arrival = Arrival(Protocol::Tcp, OUTBOUND_PORT, Side::Pod);
pub(super) const PLAINTEXT: Arrival = Arrival(Protocol::Tcp, INBOUND_PLAINTEXT_PORT, Side::Pod);
pub(super) const HBONE: Arrival = Arrival(Protocol::Tcp, INBOUND_HBONE_PORT, Side::Pod);
pub(super) const DNS: Arrival = Arrival(Protocol::Tcp, ZTUNNEL_DNS_PORT, Side::Pod);
pub(super) const DNS_UDP: Arrival = Arrival(Protocol::Udp, ZTUNNEL_DNS_PORT, Side::Pod);
pub(super) const APP: Arrival = Arrival(Protocol::Tcp, APPLICATION, Side::Pod);
pub(super) const PEER: Arrival = Arrival(Protocol::Tcp, APPLICATION, Side::Peer);
const PEER_DNS: Arrival = Arrival(Protocol::Tcp, DNS_PORT, Side::Peer);
const PEER_UDP: Arrival = Arrival(Protocol::Udp, DNS_PORT, Side::Peer);

const ALL: [Arrival; 9] = [
    OUTBOUND, PLAINTEXT, HBONE, DNS, DNS_UDP, APP, PEER, PEER_DNS, PEER_UDP,
];

/// The socket at which a packet has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival(Protocol, u16, Side);

impl fmt::Display for Arrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(protocol, port, side) = self;
        let protocol = match protocol {
            Protocol::Tcp => "TCP",
            Protocol::Udp => "UDP",
        };
        let side = match side {
            Side::Pod => "pod",
            Side::Peer => "peer",
        };
        write!(f, "{protocol} port {port} of the {side}")
    }
}

pub(super) struct Listeners(Vec<(Arrival, Socket)>);

impl Listeners {
    pub(super) fn open(network: &TestNetwork) -> io::Result<Self> {
        let listeners = ALL.map(|at| Ok((at, listen(network, at)?)));
        listeners.into_iter().collect::<io::Result<_>>().map(Self)
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

    /// Takes ztunnel's mark from a listener, as if another process had opened it.
    pub(super) fn unmark(&self, which: Arrival) -> io::Result<()> {
        let mut listeners = self.0.iter().filter(|(at, _)| *at == which);
        listeners.try_for_each(|(_, listener)| listener.set_mark(0))
    }

    /// Describes a refusal as text; any other outcome is an error.
    pub(super) fn check_refusal(&self, sent: io::Result<Sent>) -> Result<String, String> {
        const EXPECTED: &str = "expected a refusal";
        match sent {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                Ok("another listener on its port gets nothing".to_owned())
            }
            Err(error) => Err(format!("could not be sent: {error}; {EXPECTED}")),
            Ok(_) => match self.next() {
                Ok(Some((at, _))) => Err(format!("arrived at {at}; {EXPECTED}")),
                Ok(None) => Err(format!("arrived nowhere; {EXPECTED}")),
                Err(error) => Err(format!("could not be received: {error}; {EXPECTED}")),
            },
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
                match receive(at, listener) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    taken => return Ok(Some((at, taken?))),
                }
            }
        }
    }

    fn readable(&self, timeout: Duration) -> io::Result<Vec<(Arrival, &Socket)>> {
        let listeners = self.0.iter();
        let fds = listeners.clone().map(|(_, listener)| listener.as_fd());
        let mut watched: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        poll(&mut watched, timeout)?;
        let ready = listeners
            .zip(&watched)
            .filter(|(_, watched)| watched.any() == Some(true));
        Ok(ready.map(|((at, listener), _)| (*at, listener)).collect())
    }
}

/// Listens on all addresses of both families, as ztunnel does.
fn listen(network: &TestNetwork, at: Arrival) -> io::Result<Socket> {
    let Arrival(protocol, port, side) = at;
    let every: IpAddr = match network.has_ipv6 {
        true => Ipv6Addr::UNSPECIFIED.into(),
        false => Ipv4Addr::UNSPECIFIED.into(),
    };
    let address = SocketAddr::new(every, port);
    let socket = network.open_socket(side, protocol, address)?;
    socket.set_nonblocking(true)?;
    if is_of_ztunnel(at) {
        socket.set_mark(FROM_ZTUNNEL.value())?;
    }
    socket.bind(&address.into())?;
    if protocol == Protocol::Tcp {
        socket.listen(BACKLOG)?;
    }
    Ok(socket)
}

fn is_of_ztunnel(at: Arrival) -> bool {
    [OUTBOUND, PLAINTEXT, HBONE, DNS, DNS_UDP].contains(&at)
}

/// Accepts one connection or datagram without a reply, and returns the source address.
fn receive(Arrival(protocol, ..): Arrival, socket: &Socket) -> io::Result<SocketAddr> {
    let from = match protocol {
        Protocol::Tcp => socket.accept()?.1,
        Protocol::Udp => socket.recv_from(&mut [MaybeUninit::uninit(); 16])?.1,
    };
    let from = from.as_socket().ok_or(io::ErrorKind::InvalidData)?;
    Ok(SocketAddr::new(from.ip().to_canonical(), from.port()))
}
