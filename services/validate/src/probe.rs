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
    place::{Family, Place},
    table,
};

/// How long a call is given before another is made.
const AGAIN: Duration = Duration::from_millis(250);

/// How long what is closed is kept for its peer (socket(7), SO_LINGER): not at all. Otherwise a call that arrived would occupy
/// its port for a minute (TIME_WAIT), and a proxy that does not set SO_REUSEADDR would not start.
const NOT_AT_ALL: Option<Duration> = Some(Duration::ZERO);

/// How long nothing may happen before everything is looked at, in milliseconds.
const LOOK: u8 = 50;

/// What became of a family.
#[derive(Debug)]
pub struct Found {
    /// Which, and where it was called.
    pub place: Place,
    /// What became of it.
    pub outcome: Outcome,
}

/// Whether a family is redirected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A call arrived at this port.
    Proven(u16),
    /// None did, and this was seen instead.
    Missing(Seen),
    /// It cannot be told, and why.
    Unknown(String),
}

/// What became of a call that did not arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
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
pub fn all(places: &[Place], ports: &Ports, deadline: Instant) -> Vec<Found> {
    let mut probes: Vec<_> = places
        .iter()
        .map(|place| Probe::new(*place, *ports))
        .collect();
    loop {
        let now = Instant::now();
        probes.iter_mut().for_each(|probe| probe.step(now));
        if now >= deadline || probes.iter().all(|probe| probe.proven.is_some()) {
            return probes.into_iter().map(Probe::finish).collect();
        }
        rest(&probes);
    }
}

/// Waits until something may have happened.
fn rest(probes: &[Probe]) {
    let mut sockets: Vec<_> = probes.iter().flat_map(Probe::waits_for).collect();
    if poll(&mut sockets, LOOK).is_err() {
        // A signal, or a kernel without memory: no reason to turn in circles.
        thread::sleep(Duration::from_millis(LOOK.into()));
    }
}

/// Where the proxy will listen.
struct Ear {
    port: u16,
    socket: io::Result<Socket>,
}

/// A call that is under way or answered.
struct Call {
    socket: Socket,
    is_answered: bool,
}

/// One family.
struct Probe {
    place: Place,
    ports: Ports,
    ears: [Ear; 2],
    call: Option<Call>,
    called: Option<Instant>,
    seen: Seen,
    proven: Option<u16>,
}

impl Probe {
    fn new(place: Place, ports: Ports) -> Self {
        let ear = |port| Ear {
            port,
            socket: listen(SocketAddr::new(place.family.loopback(), port)),
        };
        Self {
            place,
            ports,
            ears: [ear(ports.inbound), ear(ports.outbound)],
            call: None,
            called: None,
            seen: Seen::Silence,
            proven: None,
        }
    }

    fn target(&self) -> SocketAddr {
        self.place.target(self.ports.probe)
    }

    fn step(&mut self, now: Instant) {
        if self.proven.is_none() {
            self.follow();
            self.proven = self.heard().or_else(|| self.witnessed());
        }
        let is_due = self.called.is_none_or(|called| now >= called + AGAIN);
        if self.proven.is_none() && is_due {
            self.called = Some(now);
            self.call = match call(&self.place, self.target()) {
                Ok(socket) => Some(Call {
                    socket,
                    is_answered: false,
                }),
                Err(error) => {
                    self.seen = Seen::of(&error);
                    None
                }
            };
        }
    }

    /// What became of the call by now.
    fn follow(&mut self) {
        let Some(call) = &mut self.call else { return };
        if let Ok(Some(error)) | Err(error) = call.socket.take_error() {
            self.seen = Seen::of(&error);
            self.call = None;
        } else if call.socket.peer_addr().is_ok() {
            call.is_answered = true;
            self.seen = Seen::Answered;
        }
    }

    /// The port at which a call arrived.
    fn heard(&self) -> Option<u16> {
        let target = self.target();
        let arrived = |ear: &&Ear| {
            let socket = ear.socket.as_ref().ok();
            socket.is_some_and(|socket| {
                std::iter::from_fn(|| socket.accept().ok()).any(|(accepted, _)| {
                    accepted.set_linger(NOT_AT_ALL).unwrap_or_default();
                    meant_for(&accepted, self.place.family) == Some(target)
                })
            })
        };
        self.ears.iter().find(arrived).map(|ear| ear.port)
    }

    /// The port of somebody else at which the call that was answered arrived.
    fn witnessed(&self) -> Option<u16> {
        let call = self.call.as_ref().filter(|call| call.is_answered)?;
        let own = call.socket.local_addr().ok()?.as_socket()?;
        let taken = self.ears.iter().filter(|ear| ear.socket.is_err());
        let taken: Vec<_> = taken.map(|ear| ear.port).collect();
        table::receiver(own, &taken)
    }

    fn waits_for(&self) -> Vec<PollFd<'_>> {
        let ears = self.ears.iter().filter_map(|ear| ear.socket.as_ref().ok());
        let mut all: Vec<_> = ears
            .map(|ear| PollFd::new(ear.as_fd(), PollFlags::POLLIN))
            .collect();
        if let Some(call) = self.call.as_ref().filter(|call| !call.is_answered) {
            all.push(PollFd::new(call.socket.as_fd(), PollFlags::POLLOUT));
        }
        all
    }

    fn finish(self) -> Found {
        let outcome = match (self.proven, self.deaf()) {
            (Some(port), _) => Outcome::Proven(port),
            (None, Some(why)) => Outcome::Unknown(why),
            (None, None) => Outcome::Missing(self.seen),
        };
        Found {
            place: self.place,
            outcome,
        }
    }

    /// Why a call that arrives would not be noticed.
    fn deaf(&self) -> Option<String> {
        let [inbound, _] = &self.ears;
        let error = inbound.socket.as_ref().err()?;
        let address = SocketAddr::new(self.place.family.loopback(), inbound.port);
        if error.kind() != io::ErrorKind::AddrInUse {
            return Some(format!("cannot listen at {address}: {error}"));
        }
        // Whoever has the port answers a call that is redirected to it, and the table tells.
        let is_told = self.seen != Seen::Answered || table::is_readable();
        (!is_told).then(|| format!("{address} is taken, and who was called is not to be read"))
    }
}

impl Seen {
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
fn call(place: &Place, target: SocketAddr) -> io::Result<Socket> {
    let socket = socket(place.family)?;
    socket.set_linger(NOT_AT_ALL)?;
    socket.bind(&SocketAddr::new(place.from(), 0).into())?;
    match socket.connect(&target.into()) {
        // What connect(2) says of a call that is under way.
        Err(error) if error.raw_os_error().map(Errno::from_raw) == Some(Errno::EINPROGRESS) => {
            Ok(socket)
        }
        done => done.map(|()| socket),
    }
}

/// Where an accepted call was meant to go; `None` where nobody changed that.
fn meant_for(socket: &Socket, family: Family) -> Option<SocketAddr> {
    let address = match family {
        Family::V4 => socket.original_dst_v4(),
        Family::V6 => socket.original_dst_v6(),
    };
    address.ok()?.as_socket()
}
