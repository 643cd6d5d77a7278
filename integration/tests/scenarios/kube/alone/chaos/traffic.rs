//! Connections of every pod, and to it, without pause. A connection that keeps its client's port was not captured:
//! ztunnel's own connections have ephemeral ports, which clients here do not use.

use std::{
    io::{self, Read as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU16, Ordering},
        mpsc::Sender,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use inpod_linux::Netns;
use integration::{Pod, listen};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpSocket, TcpStream},
    runtime::Handle,
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::kube::alone::chaos::oracle::{Attempt, Lost, Record, Span, Way};

const PORT: u16 = 8080;

/// Below the ephemeral ones (`net.ipv4.ip_local_port_range`).
const CLIENT_PORTS: Range<u16> = 20_000..30_000;

/// The interval of short connections.
const PAUSE: Duration = Duration::from_millis(100);
const INBOUND_PAUSE: Duration = Duration::from_millis(200);

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Longer than any ztunnel hangs.
const ECHO_TIMEOUT: Duration = Duration::from_secs(20);

/// A netns with an application that sends each client the source that it saw, then echoes.
#[derive(Debug)]
struct Place {
    netns: Netns,
    addresses: [IpAddr; 2],
}

impl Place {
    fn of(pod: &Pod) -> anyhow::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            netns: Netns::open(pod.path(), &["/run/netns".into()])?,
            addresses: pod.addresses(),
        }))
    }

    fn serve(&self, runtime: &Handle, tasks: &mut JoinSet<()>) -> anyhow::Result<()> {
        let listener = self.netns.within(|| listen(PORT))??;
        let _context = runtime.enter();
        let listener = TcpListener::from_std(listener)?;
        tasks.spawn_on(accept(listener), runtime);
        Ok(())
    }
}

async fn accept(listener: TcpListener) {
    let mut served = JoinSet::new();
    loop {
        tokio::select! {
            Ok((stream, peer)) = listener.accept() => drop(served.spawn(echo(stream, peer))),
            Some(_) = served.join_next() => {}
        }
    }
}

/// A client may go away.
async fn echo(mut stream: TcpStream, peer: SocketAddr) {
    let served = async {
        let peer = format!("{} {}\n", peer.ip().to_canonical(), peer.port());
        stream.write_all(peer.as_bytes()).await?;
        let (mut reader, mut writer) = stream.split();
        tokio::io::copy(&mut reader, &mut writer).await
    };
    served.await.map(drop).unwrap_or_default();
}

/// A peer of every pod, outside of the mesh, which sees what comes without ztunnel.
#[derive(Debug)]
pub(crate) struct Outside {
    place: Arc<Place>,
    _tasks: JoinSet<()>,
    stop: Arc<AtomicBool>,
    watcher: Option<JoinHandle<()>>,
}

impl Outside {
    pub(crate) fn start(runtime: &Handle, pod: &Pod, sink: Sender<Record>) -> anyhow::Result<Self> {
        let place = Place::of(pod)?;
        let mut tasks = JoinSet::new();
        place.serve(runtime, &mut tasks)?;
        // ETH_P_ALL.
        let all = Protocol::from(i32::from(3_u16.to_be()));
        let packets = || Socket::new(Domain::PACKET, Type::DGRAM, Some(all));
        let packets = place.netns.within(packets)??;
        packets.set_read_timeout(Some(Duration::from_millis(200)))?;
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let watcher = thread::spawn(move || watch_packets(packets, &is_over, &sink));
        Ok(Self {
            place,
            _tasks: tasks,
            stop,
            watcher: Some(watcher),
        })
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(watcher) = self.watcher.take() {
            watcher.join().unwrap_or_default();
        }
    }
}

fn watch_packets(mut packets: Socket, is_over: &AtomicBool, sink: &Sender<Record>) {
    let mut buffer = [0; 2048];
    while !is_over.load(Ordering::Relaxed) {
        let Ok(length) = packets.read(&mut buffer) else {
            continue;
        };
        let seen = buffer.get(..length).and_then(sent_by_client);
        if let Some((source, port)) = seen {
            let at = Instant::now();
            // The test is over.
            sink.send(Record::Packet { source, port, at })
                .unwrap_or_default();
        }
    }
}

/// Returns the source of a TCP packet with a client's port that opens a connection or has data.
fn sent_by_client(packet: &[u8]) -> Option<(IpAddr, u16)> {
    const SYN: u8 = 2;
    let number = |at: usize| {
        let bytes = packet.get(at..at + 2)?;
        Some(usize::from(u16::from_be_bytes(bytes.try_into().ok()?)))
    };
    let (source, protocol, head, total) = match packet.first()? >> 4 {
        4 => {
            let source: [u8; 4] = packet.get(12..16)?.try_into().ok()?;
            let head = usize::from(packet.first()? & 0xf) * 4;
            (IpAddr::from(source), packet.get(9)?, head, number(2)?)
        }
        6 => {
            let source: [u8; 16] = packet.get(8..24)?.try_into().ok()?;
            (IpAddr::from(source), packet.get(6)?, 40, number(4)? + 40)
        }
        _ => return None,
    };
    let data = head + usize::from(packet.get(head + 12)? >> 4) * 4;
    let is_first = packet.get(head + 13)? & SYN != 0;
    let port = u16::try_from(number(head)?).ok()?;
    let is_meant = *protocol == 6 && CLIENT_PORTS.contains(&port) && (is_first || total > data);
    is_meant.then_some((source, port))
}

/// The traffic of one sandbox; ends on drop.
#[derive(Debug)]
pub(crate) struct Traffic {
    /// Long connections may be open.
    is_long: watch::Sender<bool>,
    _tasks: JoinSet<()>,
}

impl Traffic {
    pub(crate) fn start(
        runtime: &Handle,
        sandbox: u32,
        pod: &Pod,
        outside: &Outside,
        sink: &Sender<Record>,
    ) -> anyhow::Result<Self> {
        let place = Place::of(pod)?;
        let mut tasks = JoinSet::new();
        place.serve(runtime, &mut tasks)?;
        let (is_long, _) = watch::channel(true);
        for is_inbound in [false, true] {
            let (from, to) = if is_inbound {
                (&outside.place, &place)
            } else {
                (&place, &outside.place)
            };
            let client = Arc::new(Client {
                sandbox,
                is_inbound,
                from: Arc::clone(from),
                to: to.addresses,
                next_port: AtomicU16::new(CLIENT_PORTS.start),
                sink: sink.clone(),
            });
            let again = Arc::clone(&client);
            tasks.spawn_on(async move { again.connect_often().await }, runtime);
            let is_long = is_long.subscribe();
            tasks.spawn_on(async move { client.stay_connected(is_long).await }, runtime);
        }
        Ok(Self {
            is_long,
            _tasks: tasks,
        })
    }

    /// Clients close their long connections within 5 s, or may open them again.
    pub(crate) fn allow_long(&self, is_long: bool) {
        self.is_long.send_replace(is_long);
    }
}

#[derive(Debug)]
struct Client {
    sandbox: u32,
    is_inbound: bool,
    from: Arc<Place>,
    to: [IpAddr; 2],
    next_port: AtomicU16,
    sink: Sender<Record>,
}

impl Client {
    fn record(&self, record: Record) {
        // The test is over.
        self.sink.send(record).unwrap_or_default();
    }

    async fn connect_often(&self) {
        loop {
            let pause = sleep(if self.is_inbound {
                INBOUND_PAUSE
            } else {
                PAUSE
            });
            self.attempt().await;
            pause.await;
        }
    }

    async fn attempt(&self) -> Option<(Way, BufReader<TcpStream>)> {
        let from = Instant::now();
        let connected = timeout(CONNECT_TIMEOUT, self.connect()).await;
        let connected = connected.map_err(anyhow::Error::from).flatten();
        let outcome = connected.as_ref().map(|(way, _)| *way);
        self.record(Record::Attempt(Attempt {
            sandbox: self.sandbox,
            span: Span::new(from, Instant::now()),
            is_inbound: self.is_inbound,
            outcome: outcome.map_err(|error| format!("{error:#}")),
        }));
        connected.ok()
    }

    async fn connect(&self) -> anyhow::Result<(Way, BufReader<TcpStream>)> {
        let address = *fastrand::choice(&self.to).context("an address")?;
        let port = self.next_port.fetch_add(1, Ordering::Relaxed);
        if port + 1 >= CLIENT_PORTS.end {
            self.next_port.store(CLIENT_PORTS.start, Ordering::Relaxed);
        }
        let any: IpAddr = match address {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let address = SocketAddr::new(address, PORT);
        let socket = || -> io::Result<Socket> {
            let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
            // Its last connection may linger.
            socket.set_reuse_address(true)?;
            socket.set_nonblocking(true)?;
            socket.bind(&SocketAddr::new(any, port).into())?;
            Ok(socket)
        };
        let socket = self.from.netns.within(socket)??;
        let stream = TcpSocket::from_std_stream(socket.into()).connect(address);
        let mut stream = BufReader::new(stream.await.context("cannot connect")?);
        let mut line = String::new();
        stream.read_line(&mut line).await.context("no answer")?;
        let seen = line.trim().rsplit_once(' ').context("closed")?.1;
        let is_own = seen.parse::<u16>()? == port;
        Ok((if is_own { Way::Direct } else { Way::Captured }, stream))
    }

    async fn stay_connected(&self, mut is_long: watch::Receiver<bool>) {
        loop {
            if is_long.wait_for(|is_long| *is_long).await.is_err() {
                return;
            }
            let opened = Instant::now();
            let Some((way, mut stream)) = self.attempt().await else {
                sleep(Duration::from_millis(300)).await;
                continue;
            };
            let mut answered = Instant::now();
            let broken = tokio::select! {
                error = talk(&mut stream, &mut answered) => Some(error),
                () = closed(&mut is_long) => None,
            };
            if let Some(error) = broken {
                self.record(Record::Lost(Lost {
                    sandbox: self.sandbox,
                    way,
                    is_inbound: self.is_inbound,
                    opened,
                    broke: Span::new(answered, Instant::now()),
                    error: format!("{error:#}"),
                }));
            }
        }
    }
}

async fn closed(is_long: &mut watch::Receiver<bool>) {
    // An error means that the traffic ends.
    if is_long.wait_for(|is_long| !is_long).await.is_ok() {
        sleep(Duration::from_millis(fastrand::u64(0..5000))).await;
    }
}

async fn talk(stream: &mut BufReader<TcpStream>, answered: &mut Instant) -> anyhow::Error {
    const WORD: &[u8] = b"a word";
    let mut exchange = async || {
        stream.write_all(WORD).await.context("cannot send")?;
        let mut echo = [0; WORD.len()];
        let read = timeout(ECHO_TIMEOUT, stream.read_exact(&mut echo)).await;
        read.context("no echo in time")?.context("no echo")?;
        ensure!(echo == *WORD, "another echo than was sent");
        anyhow::Ok(())
    };
    loop {
        if let Err(error) = exchange().await {
            return error;
        }
        *answered = Instant::now();
        sleep(Duration::from_millis(100)).await;
    }
}
