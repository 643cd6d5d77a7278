//! The listeners: ztunnel's stand-ins, the application, and the outside. Each reports to its client who it is and
//! what it saw, then echoes, and sends data on request.

use std::{
    fmt,
    io::{self, BufRead as _, BufReader, Write as _},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    str::FromStr,
    sync::{Arc, Mutex, Weak},
    thread::{self, JoinHandle},
};

use socket2::{Domain, SockRef, Socket, Type};

use crate::support::{Fresh, mark_as_ztunnel};

/// The listener that answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum By {
    /// ztunnel's, or a sidecar proxy's, on that port.
    Ztunnel(u16),
    Application,
    Outside,
}

impl fmt::Display for By {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ztunnel(port) => write!(f, "ztunnel:{port}"),
            Self::Application => f.write_str("application"),
            Self::Outside => f.write_str("outside"),
        }
    }
}

impl FromStr for By {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "application" => Ok(Self::Application),
            "outside" => Ok(Self::Outside),
            _ => Ok(Self::Ztunnel(text.trim_start_matches("ztunnel:").parse()?)),
        }
    }
}

/// A listener's view of its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) by: By,
    /// The port that accepted the connection.
    pub(crate) on: u16,
    /// The client's address as the listener sees it.
    pub(crate) peer: IpAddr,
    /// Determined as by ztunnel. Unknown for UDP.
    pub(crate) destination: Option<SocketAddr>,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            by,
            on,
            peer,
            destination,
        } = self;
        let destination = destination.map_or_else(|| "-".to_owned(), |found| found.to_string());
        write!(f, "{by} {on} {peer} {destination}")
    }
}

impl Answer {
    /// Returns `None` for a text that is no answer.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let words: Vec<_> = text.split_whitespace().collect();
        let [by, on, peer, destination] = words.as_slice() else {
            return None;
        };
        Some(Self {
            by: by.parse().ok()?,
            on: on.parse().ok()?,
            peer: peer.parse().ok()?,
            destination: destination.parse().ok(),
        })
    }
}

pub(crate) struct Listener {
    pub(crate) by: By,
    socket: Socket,
    calls: Calls,
    thread: Option<JoinHandle<()>>,
}

/// Accepted connections, while they are served.
type Calls = Arc<Mutex<Vec<Weak<TcpStream>>>>;

/// A server sends it on its own.
pub(crate) const UNASKED: &str = "and more";

impl Listener {
    pub(crate) fn tcp(fresh: &Fresh, by: By, at: SocketAddr) -> Self {
        fresh.run(move || Self::tcp_here(by, at))
    }

    pub(crate) fn tcp_here(by: By, at: SocketAddr) -> Self {
        let socket = bound(Type::STREAM, at);
        socket.listen(256).unwrap();
        let listener: TcpListener = socket.try_clone().unwrap().into();
        let calls = Calls::default();
        let accepted = Arc::clone(&calls);
        let thread = Some(thread::spawn(move || accept_all(by, &listener, &accepted)));
        Self {
            by,
            socket,
            calls,
            thread,
        }
    }

    pub(crate) fn udp(fresh: &Fresh, by: By, at: SocketAddr) -> Self {
        fresh.run(move || Self::udp_here(by, at))
    }

    pub(crate) fn udp_here(by: By, at: SocketAddr) -> Self {
        let socket = bound(Type::DGRAM, at);
        let serving: UdpSocket = socket.try_clone().unwrap().into();
        let thread = Some(thread::spawn(move || answer_all(by, &serving)));
        Self {
            by,
            socket,
            calls: Calls::default(),
            thread,
        }
    }

    /// Sends data on every connection, even ended ones.
    pub(crate) fn speak(&self) {
        for call in self.calls.lock().unwrap().iter().filter_map(Weak::upgrade) {
            drop(writeln!(&*call, "{} {UNASKED}", self.by));
        }
    }

    /// Only ztunnel's sockets carry its mark, which takes a capability.
    pub(crate) fn mark_as_ztunnel(&self) {
        mark_as_ztunnel(&self.socket);
    }

    pub(crate) fn unmark(&self) {
        self.socket.set_mark(0).unwrap();
    }

    /// Transparent sockets accept foreign destinations.
    pub(crate) fn set_transparent(&self, transparent: bool) {
        self.socket.set_ip_transparent_v6(transparent).unwrap();
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Shutdown wakes waiting threads, even for an unconnected socket, where it is an error.
        drop(self.socket.shutdown(Shutdown::Both));
        self.thread.take().unwrap().join().unwrap();
    }
}

pub(crate) fn bound(kind: Type, at: SocketAddr) -> Socket {
    let socket = Socket::new(Domain::for_address(at), kind, None).unwrap();
    if kind == Type::STREAM {
        socket.set_reuse_address(true).unwrap();
    }
    socket
        .bind(&at.into())
        .unwrap_or_else(|error| panic!("{at}: {error}"));
    socket
}

fn accept_all(by: By, listener: &TcpListener, calls: &Calls) {
    while let Ok((stream, _)) = listener.accept() {
        let stream = Arc::new(stream);
        let mut calls = calls.lock().unwrap();
        calls.retain(|call| call.strong_count() > 0);
        calls.push(Arc::downgrade(&stream));
        // A client may disconnect.
        thread::spawn(move || drop(serve(by, &stream)));
    }
}

fn serve(by: By, stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (local, peer) = (canonical(stream.local_addr()?), stream.peer_addr()?);
    let answer = Answer {
        by,
        on: local.port(),
        peer: peer.ip().to_canonical(),
        destination: Some(original_destination(stream).unwrap_or(local)),
    };
    let mut writer = stream;
    writeln!(writer, "{answer}")?;
    for line in BufReader::new(stream).lines() {
        writer.write_all(format!("{by} {}\n", line?).as_bytes())?;
    }
    Ok(())
}

/// Like ztunnel: a dual-stack socket only knows the option of the connection's family.
pub(crate) fn original_destination(stream: &TcpStream) -> Option<SocketAddr> {
    let socket = SockRef::from(stream);
    let found = socket
        .original_dst_v4()
        .or_else(|_| socket.original_dst_v6());
    Some(canonical(found.ok()?.as_socket()?))
}

pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn answer_all(by: By, socket: &UdpSocket) {
    let on = socket.local_addr().unwrap().port();
    let mut question = [0; 64];
    while let Ok((length, peer)) = socket.recv_from(&mut question) {
        // An empty message follows the shutdown.
        if length == 0 {
            return;
        }
        let answer = Answer {
            by,
            on,
            peer: peer.ip(),
            destination: None,
        };
        // The client may be gone.
        drop(socket.send_to(answer.to_string().as_bytes(), peer));
    }
}
