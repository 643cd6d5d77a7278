//! Connects in each address family, and finds out where the connections arrive.
//!
//! A connection proves redirection if a port of the proxy accepts the connection and the kernel reports another
//! original destination (SO_ORIGINAL_DST, linux/netfilter_ipv4.h). An established connection alone proves nothing,
//! because an application may have accepted it. A proxy that already listens shares its port if the proxy set
//! SO_REUSEPORT and runs as the same user, as Envoy does; otherwise [`table`] shows where a connection arrived.

use std::{
    io,
    net::SocketAddr,
    os::fd::AsFd as _,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, poll},
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::{
    arguments::Ports,
    probe_target::{Family, ProbeTarget},
    table,
};

/// The interval between attempts to connect.
const CONNECT_INTERVAL: Duration = Duration::from_millis(250);

/// Closes sockets without lingering (socket(7), SO_LINGER). Otherwise an arrived connection would occupy its port for a
/// minute (TIME_WAIT), and a proxy that does not set SO_REUSEADDR could not start.
const NO_LINGER: Option<Duration> = Some(Duration::ZERO);

/// The interval between checks of all probes while no socket is ready.
const POLL_TIMEOUT_MS: u8 = 50;

#[derive(Debug)]
pub struct ProbeResult {
    pub target: ProbeTarget,
    pub outcome: Outcome,
}

/// The evidence for or against the redirection of a family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Proven(u16),
    /// No connection arrived at the proxy's ports; holds the last observation.
    Missing(Observed),
    Unknown(String),
}

/// The fate of a connection that did not arrive at the proxy's ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observed {
    /// The connection reached its original destination, where no process listens.
    Refused,
    Silence,
    Answered,
    Failed(String),
}

/// Probes the targets until redirection is proven for all, or until the deadline.
pub fn all(targets: &[ProbeTarget], ports: &Ports, deadline: Instant) -> Vec<ProbeResult> {
    let mut probes: Vec<_> = targets
        .iter()
        .map(|target| Probe::new(*target, *ports))
        .collect();
    loop {
        let now = Instant::now();
        probes.iter_mut().for_each(|probe| probe.poll(now));
        if now >= deadline || probes.iter().all(|probe| probe.proven.is_some()) {
            return probes.into_iter().map(Probe::finish).collect();
        }
        wait(&probes);
    }
}

fn wait(probes: &[Probe]) {
    let mut sockets: Vec<_> = probes.iter().flat_map(Probe::poll_fds).collect();
    if poll(&mut sockets, POLL_TIMEOUT_MS).is_err() {
        // The call was interrupted, or the kernel is out of memory: the sleep avoids a busy loop.
        thread::sleep(Duration::from_millis(POLL_TIMEOUT_MS.into()));
    }
}

struct ProxyListener {
    port: u16,
    socket: io::Result<Socket>,
}

/// An established connection, or an attempt to connect.
struct Connection {
    socket: Socket,
    is_answered: bool,
}

struct Probe {
    target: ProbeTarget,
    ports: Ports,
    listeners: [ProxyListener; 2],
    connection: Option<Connection>,
    last_attempt: Option<Instant>,
    observed: Observed,
    proven: Option<u16>,
}

impl Probe {
    fn new(target: ProbeTarget, ports: Ports) -> Self {
        let listener = |port| ProxyListener {
            port,
            socket: listen(SocketAddr::new(target.family.loopback(), port)),
        };
        Self {
            target,
            ports,
            listeners: [listener(ports.inbound), listener(ports.outbound)],
            connection: None,
            last_attempt: None,
            observed: Observed::Silence,
            proven: None,
        }
    }

    fn probed_address(&self) -> SocketAddr {
        self.target.socket_addr(self.ports.probe)
    }

    fn poll(&mut self, now: Instant) {
        if self.proven.is_none() {
            self.check_connection();
            self.proven = self.accepted_port().or_else(|| self.port_from_table());
        }
        let is_due = self
            .last_attempt
            .is_none_or(|at| now >= at + CONNECT_INTERVAL);
        if self.proven.is_none() && is_due {
            self.last_attempt = Some(now);
            self.connection = match connect(&self.target, self.probed_address()) {
                Ok(socket) => Some(Connection {
                    socket,
                    is_answered: false,
                }),
                Err(error) => {
                    self.observed = Observed::of(&error);
                    None
                }
            };
        }
    }

    fn check_connection(&mut self) {
        let Some(connection) = &mut self.connection else {
            return;
        };
        if let Ok(Some(error)) | Err(error) = connection.socket.take_error() {
            self.observed = Observed::of(&error);
            self.connection = None;
        } else if connection.socket.peer_addr().is_ok() {
            connection.is_answered = true;
            self.observed = Observed::Answered;
        }
    }

    /// Accepts connections, and returns the port of the proxy at which the probe's own connection arrived.
    fn accepted_port(&self) -> Option<u16> {
        let target = self.probed_address();
        let arrived = |listener: &&ProxyListener| {
            let socket = listener.socket.as_ref().ok();
            socket.is_some_and(|socket| {
                std::iter::from_fn(|| socket.accept().ok()).any(|(accepted, _)| {
                    accepted.set_linger(NO_LINGER).unwrap_or_default();
                    original_destination(&accepted, self.target.family) == Some(target)
                })
            })
        };
        self.listeners
            .iter()
            .find(arrived)
            .map(|listener| listener.port)
    }

    /// Returns the port at which the connection arrived if another process listens there.
    fn port_from_table(&self) -> Option<u16> {
        let connection = self
            .connection
            .as_ref()
            .filter(|connection| connection.is_answered)?;
        let own = connection.socket.local_addr().ok()?.as_socket()?;
        let taken = self
            .listeners
            .iter()
            .filter(|listener| listener.socket.is_err());
        let taken: Vec<_> = taken.map(|listener| listener.port).collect();
        table::receiver(own, &taken)
    }

    fn poll_fds(&self) -> Vec<PollFd<'_>> {
        let listeners = self
            .listeners
            .iter()
            .filter_map(|listener| listener.socket.as_ref().ok());
        let mut all: Vec<_> = listeners
            .map(|listener| PollFd::new(listener.as_fd(), PollFlags::POLLIN))
            .collect();
        if let Some(connection) = self
            .connection
            .as_ref()
            .filter(|connection| !connection.is_answered)
        {
            all.push(PollFd::new(connection.socket.as_fd(), PollFlags::POLLOUT));
        }
        all
    }

    fn finish(self) -> ProbeResult {
        let outcome = match (self.proven, self.no_listener()) {
            (Some(port), _) => Outcome::Proven(port),
            (None, Some(why)) => Outcome::Unknown(why),
            (None, None) => Outcome::Missing(self.observed),
        };
        ProbeResult {
            target: self.target,
            outcome,
        }
    }

    /// Returns the reason why an arriving connection would not be noticed, if there is such a reason.
    fn no_listener(&self) -> Option<String> {
        let [inbound, _] = &self.listeners;
        let error = inbound.socket.as_ref().err()?;
        let address = SocketAddr::new(self.target.family.loopback(), inbound.port);
        if error.kind() != io::ErrorKind::AddrInUse {
            return Some(format!("cannot listen on {address}: {error}"));
        }
        // The owner of the port accepts redirected connections, and the kernel's table shows the receiving port.
        let is_known = self.observed != Observed::Answered || table::is_readable();
        (!is_known).then(|| {
            format!("{address} is in use, and the kernel's table of TCP sockets cannot be read")
        })
    }
}

impl Observed {
    fn of(error: &io::Error) -> Self {
        let kind = error.kind();
        if kind == io::ErrorKind::ConnectionRefused {
            Self::Refused
        } else if kind == io::ErrorKind::TimedOut {
            Self::Silence
        } else {
            Self::Failed(error.to_string())
        }
    }
}

fn socket(family: Family) -> io::Result<Socket> {
    let domain = match family {
        Family::V4 => Domain::IPV4,
        Family::V6 => Domain::IPV6,
    };
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn listen(address: SocketAddr) -> io::Result<Socket> {
    let family = if address.is_ipv4() {
        Family::V4
    } else {
        Family::V6
    };
    let socket = socket(family)?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.bind(&address.into())?;
    socket.listen(16)?;
    Ok(socket)
}

/// Starts to connect. The destination is an address of the pod, so the connection leaves through `lo`.
fn connect(target: &ProbeTarget, address: SocketAddr) -> io::Result<Socket> {
    let socket = socket(target.family)?;
    socket.set_linger(NO_LINGER)?;
    socket.bind(&SocketAddr::new(target.source(), 0).into())?;
    match socket.connect(&address.into()) {
        // EINPROGRESS means that the connection is being established (connect(2)).
        Err(error) if error.raw_os_error().map(Errno::from_raw) == Some(Errno::EINPROGRESS) => {
            Ok(socket)
        }
        done => done.map(|()| socket),
    }
}

/// Returns the destination before the redirection, or `None` if the accepted connection was not redirected.
fn original_destination(socket: &Socket, family: Family) -> Option<SocketAddr> {
    let address = match family {
        Family::V4 => socket.original_dst_v4(),
        Family::V6 => socket.original_dst_v6(),
    };
    address.ok()?.as_socket()
}
