//! Runs connections and applications in a network namespace. A socket stays in the namespace of its creation, so no
//! process in the pod is needed.

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::Context as _;
use inpod_linux::Netns;
use socket2::{Domain, Protocol, Socket, Type};

/// The time for one step of a connection.
const STEP: Duration = Duration::from_secs(5);

/// An application that sends each client the client's source address, then echoes.
#[derive(Debug)]
pub struct App {
    stop: Arc<AtomicBool>,
    port: u16,
}

impl App {
    pub fn start(netns: &Netns, port: u16) -> anyhow::Result<Self> {
        let listener = netns
            .within(|| listen(port))?
            .with_context(|| format!("cannot listen on {port}"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((stream, peer)) => drop(thread::spawn(move || serve(stream, peer))),
                    Err(_) => thread::sleep(Duration::from_millis(2)),
                }
            }
        });
        Ok(Self { stop, port })
    }

    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for App {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Listens for both address families, without blocking.
pub fn listen(port: u16) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_only_v6(false)?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::from(([0_u16; 8], port)).into())?;
    socket.listen(128)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Serves a client, and ignores errors because the client may go away.
fn serve(mut stream: TcpStream, peer: SocketAddr) {
    let served = (|| -> io::Result<()> {
        stream.set_nonblocking(false)?;
        let source = format!("{}\n", peer.ip().to_canonical());
        stream.write_all(source.as_bytes())?;
        let mut buffer = [0; 4096];
        loop {
            match stream.read(&mut buffer)? {
                0 => return Ok(()),
                read => stream.write_all(buffer.get(..read).unwrap_or_default())?,
            }
        }
    })();
    served.unwrap_or_default();
}

/// Connects to an address from inside a netns.
pub fn connect(netns: &Netns, to: SocketAddr) -> anyhow::Result<TcpStream> {
    connect_marked(netns, to, None)
}

/// Connects from inside a netns, with marked packets.
pub fn connect_marked(
    netns: &Netns,
    to: SocketAddr,
    mark: Option<u32>,
) -> anyhow::Result<TcpStream> {
    let socket = netns
        .within(|| Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP)))??;
    mark.map_or(Ok(()), |mark| socket.set_mark(mark))?;
    socket
        .connect_timeout(&to.into(), STEP)
        .with_context(|| format!("cannot connect to {to}"))?;
    socket.set_read_timeout(Some(STEP))?;
    socket.set_write_timeout(Some(STEP))?;
    Ok(socket.into())
}

pub fn ask(netns: &Netns, to: SocketAddr) -> anyhow::Result<IpAddr> {
    source_seen(connect(netns, to)?).map(|(source, _)| source)
}

/// Reads the first line of the application, which contains the source address that the application saw.
pub fn source_seen(stream: TcpStream) -> anyhow::Result<(IpAddr, TcpStream)> {
    let mut line = String::new();
    // The reader takes one byte at a time, so that the rest stays in the socket.
    BufReader::with_capacity(1, &stream)
        .read_line(&mut line)
        .context("no answer")?;
    let source = line
        .trim()
        .parse()
        .with_context(|| format!("not an address: {line:?}"))?;
    Ok((source, stream))
}

pub fn exchange(stream: &mut TcpStream, word: &str) -> anyhow::Result<()> {
    stream.write_all(word.as_bytes()).context("cannot send")?;
    let mut echo = vec![0; word.len()];
    stream.read_exact(&mut echo).context("no echo")?;
    anyhow::ensure!(echo == word.as_bytes(), "another echo than was sent");
    Ok(())
}
