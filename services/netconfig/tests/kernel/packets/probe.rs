//! A packet test's steps as data, and their evidence.

use std::{
    fmt,
    io::{self, BufRead as _, BufReader, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use socket2::{Domain, Socket, Type};

use crate::packets::{
    stand_in::{Answer, By, UNASKED},
    world::{Place, World},
};

/// Shorter than TCP's first retransmission: any answer is to the first packet. A busy machine may take longer.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(900);

/// The wait for an answer that comes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The same while rules change: what a change cuts is silent, and nobody sends a query by UDP again.
pub(crate) const ASK_PATIENCE: Duration = Duration::from_secs(3);

/// The wait when no answer is expected.
pub(crate) const SILENCE: Duration = Duration::from_millis(300);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Transport {
    Tcp,
    Udp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Owner {
    pub(crate) user: u32,
    pub(crate) group: u32,
}

impl Owner {
    /// Returns the IDs outside of a user namespace that begins at `first`.
    pub(crate) fn outside(self, first: u32) -> Self {
        Self {
            user: self.user + first,
            group: self.group + first,
        }
    }
}

/// While it lives, the calling thread's new sockets have that owner, which rules match (f_cred->fsuid
/// in net/netfilter/xt_owner.c and nft_meta.c).
struct Owned;

impl Owned {
    fn by(owner: Owner) -> Self {
        setfsgid(Gid::from_raw(owner.group));
        setfsuid(Uid::from_raw(owner.user));
        Self
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        setfsuid(Uid::from_raw(0));
        setfsgid(Gid::from_raw(0));
    }
}

/// A TCP connection, or a UDP query.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Dial {
    pub(crate) at: Place,
    pub(crate) transport: Transport,
    /// A source other than the default.
    pub(crate) from: Option<IpAddr>,
    pub(crate) mark: u32,
    /// Bound to it, whatever the routes.
    pub(crate) device: Option<&'static str>,
    /// IDs in the pod's user namespace; root by default.
    pub(crate) owner: Option<Owner>,
    pub(crate) to: SocketAddr,
}

impl Dial {
    pub(crate) fn tcp(at: Place, to: IpAddr, port: u16) -> Self {
        Self {
            at,
            transport: Transport::Tcp,
            from: None,
            mark: 0,
            device: None,
            owner: None,
            to: SocketAddr::new(to, port),
        }
    }

    pub(crate) fn udp(at: Place, to: IpAddr, port: u16) -> Self {
        Self {
            transport: Transport::Udp,
            ..Self::tcp(at, to, port)
        }
    }

    pub(crate) fn from(self, from: IpAddr) -> Self {
        Self {
            from: Some(from),
            ..self
        }
    }

    pub(crate) fn marked(self, mark: u32) -> Self {
        Self { mark, ..self }
    }

    pub(crate) fn by(self, device: &'static str) -> Self {
        Self {
            device: Some(device),
            ..self
        }
    }

    pub(crate) fn of(self, owner: Owner) -> Self {
        Self {
            owner: Some(owner),
            ..self
        }
    }

    pub(crate) fn is_tcp(&self) -> bool {
        self.transport == Transport::Tcp
    }

    fn socket(&self, world: &World, port: u16) -> io::Result<Socket> {
        let dial = self.clone();
        let owner = self.owner.map(|owner| owner.outside(world.users_from));
        world.at(self.at).run(move || {
            let _owner = owner.map(Owned::by);
            let domain = Domain::for_address(dial.to);
            let kind = match dial.transport {
                Transport::Tcp => Type::STREAM,
                Transport::Udp => Type::DGRAM,
            };
            let socket = Socket::new(domain, kind, None)?;
            socket.set_reuse_address(true)?;
            socket.set_mark(dial.mark)?;
            socket.bind_device(dial.device.map(str::as_bytes))?;
            if dial.from.is_some() {
                match dial.to {
                    SocketAddr::V4(_) => socket.set_ip_transparent_v4(true)?,
                    SocketAddr::V6(_) => socket.set_ip_transparent_v6(true)?,
                }
            }
            let any: IpAddr = match dial.to {
                SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let from = SocketAddr::new(dial.from.unwrap_or(any), port);
            socket.bind(&from.into())?;
            Ok(socket)
        })
    }

    fn connected(&self, world: &World, port: u16, timeout: Duration) -> io::Result<Socket> {
        let socket = self.socket(world, port)?;
        socket.connect_timeout(&self.to.into(), timeout)?;
        Ok(socket)
    }

    pub(crate) fn connect(
        &self,
        world: &World,
        port: u16,
        timeout: Duration,
    ) -> io::Result<TcpStream> {
        let stream = TcpStream::from(self.connected(world, port, timeout)?);
        stream.set_read_timeout(Some(timeout))?;
        Ok(stream)
    }

    pub(crate) fn open(
        &self,
        world: &World,
        port: u16,
        timeout: Duration,
    ) -> (Option<Flow>, Evidence) {
        let opened = self
            .connected(world, port, timeout)
            .and_then(|socket| Flow::new(self.transport, socket, timeout));
        match opened {
            Ok((flow, answer)) => (Some(flow), Evidence::Answer(answer)),
            Err(error) => (None, Evidence::of(&error)),
        }
    }

    /// Uses a port that no other test uses.
    pub(crate) fn hold(&self, world: &World) -> (Option<Flow>, Evidence) {
        let patience = match self.transport {
            Transport::Tcp => PATIENCE,
            Transport::Udp => ASK_PATIENCE,
        };
        self.open(world, world.port(), patience)
    }

    pub(crate) fn ask(&self, world: &World) -> Evidence {
        self.open(world, world.port(), ASK_PATIENCE).1
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Evidence {
    Answer(Answer),
    Refused(io::ErrorKind),
    Silence,
}

impl Evidence {
    fn of(error: &io::Error) -> Self {
        let is_silence = |kind| matches!(kind, io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock);
        if is_silence(error.kind()) {
            Self::Silence
        } else {
            Self::Refused(error.kind())
        }
    }

    pub(crate) fn by(&self) -> Option<By> {
        match self {
            Self::Answer(answer) => Some(answer.by),
            Self::Refused(_) | Self::Silence => None,
        }
    }
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answer(answer) => answer.fmt(f),
            Self::Refused(kind) => write!(f, "refused ({kind})"),
            Self::Silence => f.write_str("silence"),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Flow {
    Tcp(By, BufReader<TcpStream>),
    Udp(UdpSocket),
}

impl Flow {
    fn new(transport: Transport, socket: Socket, timeout: Duration) -> io::Result<(Self, Answer)> {
        socket.set_read_timeout(Some(timeout))?;
        match transport {
            Transport::Tcp => {
                let mut stream = BufReader::new(TcpStream::from(socket));
                let answer = parse(&line(&mut stream)?)?;
                // Tests expect of many connections that they are silent later.
                stream.get_ref().set_read_timeout(Some(TIMEOUT))?;
                Ok((Self::Tcp(answer.by, stream), answer))
            }
            Transport::Udp => {
                let mut flow = Self::Udp(socket.into());
                let answer = flow.ask()?;
                Ok((flow, answer))
            }
        }
    }

    /// Sends another UDP query.
    pub(crate) fn ask(&mut self) -> io::Result<Answer> {
        let Self::Udp(socket) = self else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let mut answer = [0; 256];
        socket.send(b"?")?;
        let length = socket.recv(&mut answer)?;
        parse(&String::from_utf8_lossy(&answer[..length]))
    }

    /// Data that the server sends on its own must come from the first answerer. Not for UDP.
    pub(crate) fn hear(&mut self) -> io::Result<()> {
        let Self::Tcp(by, stream) = self else {
            return Ok(());
        };
        let heard = line(stream)?;
        if heard == format!("{by} {UNASKED}\n") {
            Ok(())
        } else {
            Err(io::Error::other(format!("heard {heard:?} unasked")))
        }
    }

    /// Expects an echo from the first answerer.
    pub(crate) fn talk(&mut self) -> io::Result<()> {
        let Self::Tcp(by, stream) = self else {
            return self.ask().map(drop);
        };
        stream.get_mut().write_all(b"hello\n")?;
        let unasked = format!("{by} {UNASKED}\n");
        let mut heard = line(stream)?;
        while heard == unasked {
            heard = line(stream)?;
        }
        let wanted = format!("{by} hello\n");
        if heard == wanted {
            Ok(())
        } else {
            Err(io::Error::other(format!("heard {heard:?}")))
        }
    }
}

fn line(stream: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut line = String::new();
    match stream.read_line(&mut line)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(line),
    }
}

fn parse(text: &str) -> io::Result<Answer> {
    Answer::parse(text).ok_or_else(|| io::Error::other(format!("heard {text:?}")))
}

/// A packet to send, and the expected evidence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) dial: Dial,
    pub(crate) wanted: Evidence,
}

/// Runs them one after another from one port, and waits that long for an answer that is wanted. Each socket is closed
/// before the next.
pub(crate) fn run(world: &World, steps: &[Step], patience: Duration) -> Result<(), String> {
    let port = world.port();
    for Step { dial, wanted } in steps {
        let timeout = if *wanted == Evidence::Silence {
            SILENCE
        } else {
            patience
        };
        let (_flow, found) = dial.open(world, port, timeout);
        if found != *wanted {
            return Err(format!("wanted {wanted}, found {found}"));
        }
    }
    Ok(())
}

/// Set when this is dropped: threads that ask for it end also if the test fails before.
pub(crate) struct SetOnDrop<'a>(pub(crate) &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Several threads wait concurrently. The order of results is undefined.
pub(crate) fn at_once<T: Sync, R: Send>(
    hands: usize,
    items: &[T],
    act: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let hand = |first| items.iter().skip(first).step_by(hands).map(&act).collect();
    let hand = &hand;
    std::thread::scope(|scope| {
        let hands = (0..hands).map(|first| scope.spawn(move || -> Vec<R> { hand(first) }));
        let hands: Vec<_> = hands.collect();
        hands
            .into_iter()
            .flat_map(|hand| hand.join().unwrap())
            .collect()
    })
}
