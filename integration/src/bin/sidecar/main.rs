//! A minimal sidecar proxy, which runs as user and group 1337 in the netns of its pod. The proxy accepts connections
//! redirected to 15006, connects to their original destination, and prints for each connection: source, destination,
//! and `forwarded`, `refused` or `loop`.
//!
//! ```text
//! sidecar original          from 127.0.0.6 or ::6 to the address and port that the client dialed
//! sidecar localhost         to that port of localhost, as Istio did before 1.10
//! sidecar unmarked          as original, without an address of its own
//! sidecar transparent       from the client's address, as group 1337 only
//! ```
//!
//! With the arguments of Istio's container after the mode (`proxy sidecar ...`) the program is the whole proxy: the
//! proxy then also serves connections redirected to 15001, and answers 200 at 15021, like Istio's proxy once ready.

use std::{
    collections::BTreeSet,
    io::{self, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail};
use nix::unistd::{Gid, Uid, setresgid, setresuid};
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, Type};

const OWNER: u32 = 1337;

/// The port to which the rules redirect inbound connections.
const INBOUND: u16 = 15006;

/// The port to which the rules redirect outbound connections.
const OUTBOUND: u16 = 15001;

/// The port of the readiness probe.
const HEALTH: u16 = 15021;

const READY: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// The TPROXY mark of Istio, which routes replies to the client back to the proxy.
const TPROXY_MARK: u32 = 1337;

const TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
enum Mode {
    Original,
    Localhost,
    Unmarked,
    Transparent,
}

#[derive(Debug)]
struct Way {
    to: SockAddr,
    from: Option<IpAddr>,
    /// The mark of packets to the server, if the source is the client's address.
    mark: Option<u32>,
}

impl Mode {
    fn parse(arguments: &[String]) -> anyhow::Result<Self> {
        let words: Vec<_> = arguments.iter().map(String::as_str).collect();
        match words.as_slice() {
            ["original"] | ["original", "proxy", ..] => Ok(Self::Original),
            ["localhost"] | ["localhost", "proxy", ..] => Ok(Self::Localhost),
            ["unmarked"] | ["unmarked", "proxy", ..] => Ok(Self::Unmarked),
            ["transparent"] => Ok(Self::Transparent),
            _ => bail!("{USAGE}"),
        }
    }

    fn is_transparent(&self) -> bool {
        matches!(self, Self::Transparent)
    }

    fn way(&self, client: SocketAddr, original: SocketAddr) -> Way {
        let is_v4 = original.is_ipv4();
        let either =
            |v4: Ipv4Addr, v6: Ipv6Addr| -> IpAddr { if is_v4 { v4.into() } else { v6.into() } };
        let (to, from) = match self {
            Self::Original => {
                let mark = either(Ipv4Addr::new(127, 0, 0, 6), Ipv6Addr::from(6));
                (original, Some(mark))
            }
            Self::Localhost => {
                let localhost = either(Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST);
                (SocketAddr::new(localhost, original.port()), None)
            }
            Self::Unmarked => (original, None),
            Self::Transparent => (original, Some(client.ip())),
        };
        Way {
            to: to.into(),
            from,
            mark: self.is_transparent().then_some(TPROXY_MARK),
        }
    }
}

/// The local ports of the proxy's own connections.
type Own = Arc<Mutex<BTreeSet<u16>>>;

const USAGE: &str = "\
sidecar original          from 127.0.0.6 or ::6 to the address that the client
                          dialed
sidecar localhost         to that port of localhost, as Istio did before 1.10
sidecar unmarked          as original, without an address of its own
sidecar transparent       from the client's address, as group 1337 only

A minimal sidecar proxy. With `proxy ...` after the mode, it is the whole proxy.";

fn main() -> anyhow::Result<ExitCode> {
    let code = integration::answer(USAGE, |arguments| {
        matches!(
            arguments,
            ["original" | "localhost" | "unmarked" | "transparent"]
                | ["original" | "localhost" | "unmarked", "proxy", ..]
        )
    });
    match code {
        Some(code) => Ok(code),
        None => run().map(|()| ExitCode::SUCCESS),
    }
}

fn run() -> anyhow::Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let mode = Arc::new(Mode::parse(&arguments)?);
    let (uid, gid) = (Uid::from_raw(OWNER), Gid::from_raw(OWNER));
    setresgid(gid, gid, gid).context("cannot become the proxy's group")?;
    // A transparent socket needs rights that the proxy's user lacks.
    let transparent = mode.is_transparent();
    if !transparent {
        setresuid(uid, uid, uid).context("cannot become the proxy's user")?;
    }
    let (listener, own) = (listen(INBOUND, transparent)?, Own::default());
    if std::env::args().nth(2).as_deref() == Some("proxy") {
        let (outbound, known) = (listen(OUTBOUND, transparent)?, Arc::clone(&own));
        thread::spawn(move || take(&outbound, &Arc::new(Mode::Unmarked), &known));
        let health = listen(HEALTH, false)?;
        thread::spawn(move || health.incoming().flatten().for_each(answer));
    }
    print_line("listening")?;
    take(&listener, &mode, &own)
}

/// Accepts connections and serves each in a thread of its own.
fn take(listener: &TcpListener, mode: &Arc<Mode>, own: &Own) -> anyhow::Result<()> {
    for stream in listener.incoming() {
        let (stream, mode, own) = (stream?, Arc::clone(mode), Arc::clone(own));
        thread::spawn(move || serve(&stream, &mode, &own));
    }
    Ok(())
}

/// Answers a readiness probe, and ignores errors because the client may go away.
fn answer(mut client: TcpStream) {
    let asked = client.read(&mut [0; 4096]);
    asked
        .and_then(|_| client.write_all(READY))
        .unwrap_or_default();
}

fn print_line(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

fn listen(port: u16, is_transparent: bool) -> anyhow::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_only_v6(false)?;
    if is_transparent {
        socket.set_ip_transparent_v6(true)?;
    }
    let bound = socket.bind(&SocketAddr::from(([0_u16; 8], port)).into());
    bound.with_context(|| format!("cannot listen on {port}"))?;
    socket.listen(128)?;
    Ok(socket.into())
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Returns the address that the client dialed, from conntrack; without an entry in conntrack, the local address of a
/// transparent socket.
fn original(stream: &TcpStream, mode: &Mode) -> Option<SocketAddr> {
    let socket = SockRef::from(stream);
    let local = stream.local_addr().ok().map(canonical)?;
    let original = if local.is_ipv4() {
        socket.original_dst_v4()
    } else {
        socket.original_dst_v6()
    };
    let known = original.ok().and_then(|original| original.as_socket());
    known.or_else(|| mode.is_transparent().then_some(local))
}

/// Serves a connection; a client that goes away is no error.
fn serve(client: &TcpStream, mode: &Mode, own: &Own) {
    let source = client.peer_addr().map(canonical);
    let (Ok(source), Some(original)) = (source, original(client, mode)) else {
        return;
    };
    let told = |outcome| print_line(&format!("{source} {original} {outcome}")).unwrap_or_default();
    let is_own = |port| {
        let own = own.lock().unwrap_or_else(PoisonError::into_inner);
        own.contains(&port)
    };
    if is_own(source.port()) || original.port() == INBOUND {
        return told("loop");
    }
    match connect(&mode.way(source, original), own) {
        Ok(server) => {
            told("forwarded");
            both(client, &server).unwrap_or_default();
            // The port is free again, and another client may get the port.
            let address = server.local_addr().ok();
            let port = address.and_then(|address| Some(address.as_socket()?.port()));
            let mut own = own.lock().unwrap_or_else(PoisonError::into_inner);
            own.remove(&port.unwrap_or_default());
        }
        Err(_) => told("refused"),
    }
}

fn connect(way: &Way, own: &Own) -> io::Result<Socket> {
    let socket = Socket::new(way.to.domain(), Type::STREAM, None)?;
    if let Some(mark) = way.mark {
        socket.set_mark(mark)?;
        match way.from {
            Some(IpAddr::V4(_)) => socket.set_ip_transparent_v4(true)?,
            Some(IpAddr::V6(_)) => socket.set_ip_transparent_v6(true)?,
            None => {}
        }
    }
    let any = way.to.as_socket().map(|to| match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
    });
    if let Some(from) = way.from.or(any) {
        socket.bind(&SocketAddr::new(from, 0).into())?;
    }
    // The port is recorded before the first packet, which the rules may redirect back to this proxy.
    if let Some(bound) = socket.local_addr()?.as_socket() {
        let mut own = own.lock().unwrap_or_else(PoisonError::into_inner);
        own.insert(bound.port());
    }
    socket.connect_timeout(&way.to, TIMEOUT)?;
    Ok(socket)
}

fn both(client: &TcpStream, server: &Socket) -> io::Result<()> {
    let (mut from_client, mut to_server) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || {
        io::copy(&mut from_client, &mut to_server)
            .map(drop)
            .unwrap_or_default();
        to_server.shutdown(Shutdown::Write).unwrap_or_default();
    });
    let (mut from_server, mut to_client) = (server, client);
    io::copy(&mut from_server, &mut to_client)?;
    client.shutdown(Shutdown::Write)
}
