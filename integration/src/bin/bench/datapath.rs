//! Measures the cost of a pod's rules for the pod's traffic: new connections, round trips and throughput.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use integration::{Call, Mesh, Node, Pod, Spec, TIMEOUT, listen};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::{
    compare::{Comparison, quantile},
    side::Side,
};

/// The server's port for the first sample. Each sample has a port of its own, because conntrack keeps a reset
/// connection for 10 s. On a single port, a connection without mark is not redirected if the client's port was that of a marked
/// connection within these 10 s.
const FIRST_PORT: u16 = 20_000;

/// The mark of ztunnel's own connections; the rules of each agent leave such connections alone.
const ZTUNNEL_MARK: u32 = 0x539;

/// The kinds of traffic, each with the mark of its packets.
const KINDS: [(&str, Option<u32>); 2] = [
    ("with ztunnel's mark", Some(ZTUNNEL_MARK)),
    ("without mark", None),
];

/// The number of connections, round trips and chunks whose median is one sample.
const BATCH: usize = 100;

/// The size of a chunk. The receive window of a new connection holds a chunk, so a single thread can write a chunk and
/// then read the chunk.
const CHUNK: usize = 32 * 1024;

/// Compares the traffic of a pod on each side's node, and of a pod without rules on a node without an agent.
pub(crate) fn datapath(samples: usize, sides: &[Side]) -> anyhow::Result<()> {
    let (mut pairs, mut inhabitants) = (Vec::new(), Vec::new());
    for side in sides {
        let pods = side.sandboxes(&[Mesh::Inside, Mesh::Outside])?;
        for pod in &pods {
            side.call(Call::add, pod)?.succeed()?;
        }
        // A sandbox without processes could be taken for an ended sandbox.
        inhabitants.push(side.inhabitants(&pods)?);
        pairs.push(PodPair::new(&side.name, pods, Some(ZTUNNEL_MARK))?);
    }
    let bare = Node::new()?;
    let pods = ["client", "server"].map(|name| bare.sandbox(Spec::new(name)));
    let pods = pods.into_iter().collect::<Result<_, _>>()?;
    pairs.push(PodPair::new("no rules", pods, None)?);
    let names = pairs.iter().map(|pair| pair.name.as_str());
    let title = "Traffic of a pod to another pod of its node";
    let mut table = Comparison::new(title, "us", names);
    for sample in 0..samples {
        let port = FIRST_PORT + u16::try_from(sample)?;
        for index in (0..pairs.len()).map(|index| (index + sample) % pairs.len()) {
            let pair = pairs.get(index).context("a pair of pods")?;
            for (kind, mark) in KINDS {
                for (what, micros) in pair.measure(port, mark)? {
                    table.record(&format!("{what}, {kind}"), index, micros);
                }
            }
        }
    }
    drop(inhabitants);
    table.print()
}

/// A pod, and the pod to which the connections lead.
struct PodPair {
    name: String,
    client: Pod,
    server: Pod,
    /// The only mark with which connections are not redirected, if the client has rules.
    unredirected: Option<u32>,
}

impl PodPair {
    fn new(name: &str, pods: Vec<Pod>, unredirected: Option<u32>) -> anyhow::Result<Self> {
        let [client, server] = <[Pod; 2]>::try_from(pods)
            .ok()
            .context("a client and a server")?;
        Ok(Self {
            name: name.to_owned(),
            client,
            server,
            unredirected,
        })
    }

    /// Measures a sample of each kind of work in microseconds, with packets of the given mark.
    fn measure(&self, port: u16, mark: Option<u32>) -> anyhow::Result<[(&'static str, f64); 3]> {
        let listener = self.server.netns.within(|| listen(port))??;
        listener.set_nonblocking(false)?;
        // Accepted connections inherit the timeout.
        SockRef::from(&listener).set_read_timeout(Some(TIMEOUT))?;
        let connect = || self.connect(&listener, (self.server.v4, port).into(), mark);
        self.client.netns.within(|| {
            let connections = median(|| Ok(connect()?.0))?;
            let (_, mut client, mut server) = connect()?;
            let round_trips = median(|| {
                let began = Instant::now();
                transfer(&mut client, &mut server, &mut [0])?;
                transfer(&mut server, &mut client, &mut [0])?;
                Ok(began.elapsed())
            })?;
            let mut chunk = vec![0; CHUNK];
            let chunks = median(|| {
                let began = Instant::now();
                transfer(&mut client, &mut server, &mut chunk)?;
                Ok(began.elapsed())
            })?;
            Ok([
                ("new connection", connections),
                ("round trip of 1 byte", round_trips),
                ("32 KiB one way", chunks),
            ])
        })?
    }

    /// Connects in the thread's netns, and returns the time until the server has accepted, with both ends.
    fn connect(
        &self,
        listener: &TcpListener,
        to: SocketAddr,
        mark: Option<u32>,
    ) -> anyhow::Result<(Duration, TcpStream, TcpStream)> {
        let client = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
        mark.map_or(Ok(()), |mark| client.set_mark(mark))?;
        let began = Instant::now();
        client.connect(&to.into())?;
        let (server, source) = listener.accept()?;
        let took = began.elapsed();
        let client = TcpStream::from(client);
        client.set_read_timeout(Some(TIMEOUT))?;
        for end in [&client, &server] {
            end.set_nodelay(true)?;
            // Closing resets the connection, so that no sockets in TIME_WAIT slow down the search for a free port.
            SockRef::from(end).set_linger(Some(Duration::ZERO))?;
        }
        // ztunnel connects to the server from another port.
        let is_redirected = source.port() != client.local_addr()?.port();
        let expected = self.unredirected.is_some() && mark != self.unredirected;
        ensure!(
            is_redirected == expected,
            "{}: redirected: {is_redirected}, mark {mark:?}",
            self.name
        );
        Ok((took, client, server))
    }
}

fn transfer(from: &mut TcpStream, to: &mut TcpStream, bytes: &mut [u8]) -> anyhow::Result<()> {
    from.write_all(bytes)?;
    Ok(to.read_exact(bytes)?)
}

/// Returns the median of a batch in microseconds.
fn median(mut measure: impl FnMut() -> anyhow::Result<Duration>) -> anyhow::Result<f64> {
    let times = (0..BATCH).map(|_| measure().map(|time| time.as_secs_f64() * 1e6));
    Ok(quantile(&times.collect::<Result<Vec<_>, _>>()?, 0.5))
}
