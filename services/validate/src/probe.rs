//! The calls of each family, and where they arrive.
//!
//! A call proves redirection where it is accepted at one of the proxy's ports and the kernel says of it that it was meant
//! for another (SO_ORIGINAL_DST, linux/netfilter_ipv4.h). That somebody answers proves nothing: it may be an application.
//! A proxy that listens already shares its port where it set SO_REUSEPORT and is of the same user, as Envoy does;
//! otherwise [`table`] tells where a call went.

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

/// How long a call is given before another is made.
const CONNECT_INTERVAL: Duration = Duration::from_millis(250);

/// How long what is closed is kept for its peer (socket(7), SO_LINGER): not at all. Otherwise a call that arrived would occupy
/// its port for a minute (TIME_WAIT), and a proxy that does not set SO_REUSEADDR would not start.
const NO_LINGER: Option<Duration> = Some(Duration::ZERO);

/// How long nothing may happen before everything is looked at, in milliseconds.
const POLL_TIMEOUT_MS: u8 = 50;

/// What became of a family.
#[derive(Debug)]
pub struct ProbeResult {
    /// Which, and where it was called.
    pub target: ProbeTarget,
    /// What became of it.
    pub outcome: Outcome,
}

/// True if a family is redirected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A call arrived at this port.
    Proven(u16),
    /// None did, and this was seen instead.
    Missing(Observed),
    /// It cannot be told, and why.
    Unknown(String),
}

/// What became of a call that did not arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observed {
    /// Nobody listens where it was meant to go: it went there.
    Refused,
    /// There was no answer.
    Silence,
    /// Somebody answered who is not at the proxy's ports.
    Answered,
    /// The call could not be made.
    Failed(String),
}

/// Calls each place until each is proven or the time is over.
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

/// Waits until something may have happened.
fn wait(probes: &[Probe]) {
    let mut sockets: Vec<_> = probes.iter().flat_map(Probe::poll_fds).collect();
    if poll(&mut sockets, POLL_TIMEOUT_MS).is_err() {
        // A signal, or a kernel without memory: no reason to turn in circles.
        thread::sleep(Duration::from_millis(POLL_TIMEOUT_MS.into()));
    }
}

/// Where the proxy will listen.
struct ProxyListener {
    port: u16,
    socket: io::Result<Socket>,
}

/// A call that is under way or answered.
struct Connection {
    socket: Socket,
    is_answered: bool,
}

/// One family.
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

    fn target(&self) -> SocketAddr {
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
            self.connection = match connect(&self.target, self.target()) {
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

    /// What became of the call by now.
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

    /// The port at which a call arrived.
    fn accepted_port(&self) -> Option<u16> {
        let target = self.target();
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

    /// The port of somebody else at which the call that was answered arrived.
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

    /// Why a call that arrives would not be noticed.
    fn no_listener(&self) -> Option<String> {
        let [inbound, _] = &self.listeners;
        let error = inbound.socket.as_ref().err()?;
        let address = SocketAddr::new(self.target.family.loopback(), inbound.port);
        if error.kind() != io::ErrorKind::AddrInUse {
            return Some(format!("cannot listen on {address}: {error}"));
        }
        // Whoever has the port answers a call that is redirected to it, and the table tells.
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

/// Begins a call. Whatever is called is the pod's own, so that it leaves by `lo`.
fn connect(target: &ProbeTarget, address: SocketAddr) -> io::Result<Socket> {
    let socket = socket(target.family)?;
    socket.set_linger(NO_LINGER)?;
    socket.bind(&SocketAddr::new(target.source(), 0).into())?;
    match socket.connect(&address.into()) {
        // What connect(2) says of a call that is under way.
        Err(error) if error.raw_os_error().map(Errno::from_raw) == Some(Errno::EINPROGRESS) => {
            Ok(socket)
        }
        done => done.map(|()| socket),
    }
}

/// Where an accepted call was meant to go; `None` where nobody changed that.
fn original_destination(socket: &Socket, family: Family) -> Option<SocketAddr> {
    let address = match family {
        Family::V4 => socket.original_dst_v4(),
        Family::V6 => socket.original_dst_v6(),
    };
    address.ok()?.as_socket()
}
