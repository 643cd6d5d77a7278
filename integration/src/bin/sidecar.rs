//! A sidecar's proxy, as small as can be: as user and group 1337, in the netns that it is started in, it takes what is led
//! to 15006 and connects to where that was going, and tells each connection in a line on its standard output: source,
//! destination, and `forwarded`, `refused` or `loop`.
//!
//! ```text
//! sidecar original     from 127.0.0.6 or ::6 to the address and port that the client dialled
//! sidecar localhost    to that port of localhost, as Istio did before 1.10
//! sidecar unmarked     as original, without an address of its own
//! ```

use std::{
    collections::BTreeSet,
    io::{self, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail};
use nix::unistd::{Gid, Uid, setresgid, setresuid};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

/// The user and group of Istio's proxy.
const OWNER: u32 = 1337;

/// Where inbound connections are led.
const INBOUND: u16 = 15006;

const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug)]
enum Mode {
    Original,
    Localhost,
    Unmarked,
}

impl Mode {
    /// Where it connects to, and from where.
    fn way(self, original: SocketAddr) -> (SocketAddr, IpAddr) {
        let is_v4 = original.is_ipv4();
        let either =
            |v4: Ipv4Addr, v6: Ipv6Addr| -> IpAddr { if is_v4 { v4.into() } else { v6.into() } };
        let any = either(Ipv4Addr::UNSPECIFIED, Ipv6Addr::UNSPECIFIED);
        match self {
            Self::Original => {
                let mark = either(Ipv4Addr::new(127, 0, 0, 6), Ipv6Addr::from(6));
                (original, mark)
            }
            Self::Localhost => {
                let localhost = either(Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST);
                (SocketAddr::new(localhost, original.port()), any)
            }
            Self::Unmarked => (original, any),
        }
    }
}

/// The ports of connections that it has made itself.
type Own = Arc<Mutex<BTreeSet<u16>>>;

fn main() -> anyhow::Result<()> {
    let mode = match std::env::args().nth(1).as_deref() {
        Some("original") => Mode::Original,
        Some("localhost") => Mode::Localhost,
        Some("unmarked") => Mode::Unmarked,
        _ => bail!("see the head of integration/src/bin/sidecar.rs"),
    };
    let (uid, gid) = (Uid::from_raw(OWNER), Gid::from_raw(OWNER));
    setresgid(gid, gid, gid).context("cannot become the proxy's group")?;
    setresuid(uid, uid, uid).context("cannot become the proxy's user")?;
    let listener = listen().context("cannot listen")?;
    say("listening")?;
    let own = Own::default();
    for stream in listener.incoming() {
        let (stream, own) = (stream?, Arc::clone(&own));
        thread::spawn(move || serve(&stream, mode, &own));
    }
    Ok(())
}

fn say(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

fn listen() -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_only_v6(false)?;
    socket.bind(&SocketAddr::from(([0_u16; 8], INBOUND)).into())?;
    socket.listen(128)?;
    Ok(socket.into())
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// What the client dialled, from connection tracking.
fn original(stream: &TcpStream) -> Option<SocketAddr> {
    let socket = SockRef::from(stream);
    let is_v4 = stream.local_addr().ok().map(canonical)?.is_ipv4();
    let original = if is_v4 {
        socket.original_dst_v4()
    } else {
        socket.original_dst_v6()
    };
    original.ok()?.as_socket()
}

/// One connection. A client that goes away is no error.
fn serve(client: &TcpStream, mode: Mode, own: &Own) {
    let (Ok(source), Some(original)) = (client.peer_addr().map(canonical), original(client)) else {
        return;
    };
    let told = |outcome| say(&format!("{source} {original} {outcome}")).unwrap_or_default();
    let is_own = |port| {
        let own = own.lock().unwrap_or_else(PoisonError::into_inner);
        own.contains(&port)
    };
    if is_own(source.port()) || original.port() == INBOUND {
        return told("loop");
    }
    match connect(mode, original, own) {
        Ok(server) => {
            told("forwarded");
            both(client, &server).unwrap_or_default();
        }
        Err(_) => told("refused"),
    }
}

fn connect(mode: Mode, original: SocketAddr, own: &Own) -> io::Result<TcpStream> {
    let (to, from) = mode.way(original);
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    socket.bind(&SocketAddr::new(from, 0).into())?;
    // Known before the first packet: that may come back to the listener.
    if let Some(bound) = socket.local_addr()?.as_socket() {
        let mut own = own.lock().unwrap_or_else(PoisonError::into_inner);
        own.insert(bound.port());
    }
    socket.connect_timeout(&to.into(), PATIENCE)?;
    Ok(socket.into())
}

fn both(client: &TcpStream, server: &TcpStream) -> io::Result<()> {
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
