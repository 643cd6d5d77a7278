//! Servers that bind in one way, and clients that try to reach them.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    net::{IpAddr, SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use inpod_linux::Netns;
use integration::{Pod, connect};
use socket2::{Domain, Protocol, Socket, Type};

/// Sends each client its port and source.
#[derive(Debug)]
pub(crate) struct Bound(Arc<AtomicBool>);

impl Drop for Bound {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// `both`: if bound to `::`, it accepts IPv4 as well.
fn listener(address: SocketAddr, both: bool, interface: Option<&str>) -> io::Result<TcpListener> {
    let domain = Domain::for_address(address);
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    if domain == Domain::IPV6 {
        socket.set_only_v6(!both)?;
    }
    socket.set_reuse_address(true)?;
    socket.bind_device(interface.map(str::as_bytes))?;
    socket.bind(&address.into())?;
    socket.listen(64)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

impl Bound {
    pub(crate) fn to(netns: &Netns, address: SocketAddr) -> Self {
        Self::with(netns, address, true, None)
    }

    pub(crate) fn with(
        netns: &Netns,
        address: SocketAddr,
        both: bool,
        interface: Option<&str>,
    ) -> Self {
        let listener = netns.within(|| listener(address, both, interface));
        let listener = listener.unwrap().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                match listener.accept() {
                    // A client may disconnect.
                    Ok((mut stream, peer)) => {
                        let source = peer.ip().to_canonical();
                        writeln!(stream, "{} {source}", address.port()).unwrap_or_default();
                    }
                    Err(_) => thread::sleep(Duration::from_millis(2)),
                }
            }
        });
        Self(stop)
    }
}

/// Returns the port that answered and the source that it saw.
pub(crate) fn answer(from: &Netns, to: SocketAddr) -> anyhow::Result<(u16, IpAddr)> {
    let stream = connect(from, to)?;
    let line = io::read_to_string(stream).context("no answer")?;
    let (port, source) = line
        .trim()
        .split_once(' ')
        .context("closed without a word")?;
    Ok((port.parse()?, source.parse()?))
}

/// The addresses to which the servers of the table bind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum BindAddress {
    Wildcard,
    Localhost,
    PodIp,
}

pub(crate) const BIND_ADDRESSES: [BindAddress; 3] = [
    BindAddress::Wildcard,
    BindAddress::Localhost,
    BindAddress::PodIp,
];

impl BindAddress {
    /// A port without a Service is 1000 higher.
    pub(crate) fn port(self) -> u16 {
        match self {
            Self::Wildcard => 8081,
            Self::Localhost => 8082,
            Self::PodIp => 8083,
        }
    }

    fn addresses(self, pod: &Pod) -> Vec<IpAddr> {
        match self {
            Self::Wildcard => vec![[0_u16; 8].into()],
            Self::Localhost => vec![[127, 0, 0, 1].into(), [0, 0, 0, 0, 0, 0, 0, 1].into()],
            Self::PodIp => pod.addresses().into(),
        }
    }
}

/// Starts servers for a port with a Service and one without.
pub(crate) fn servers(pod: &Pod) -> Vec<Bound> {
    let ports = |way: BindAddress| [way.port(), way.port() + 1000].map(|port| (way, port));
    let all = BIND_ADDRESSES.into_iter().flat_map(ports);
    all.flat_map(|(way, port)| {
        let addresses = way.addresses(pod).into_iter();
        addresses.map(move |address| Bound::to(&pod.netns, SocketAddr::new(address, port)))
    })
    .collect()
}

/// By address, whether it has a Service, and whether it is IPv6.
pub(crate) type Table = BTreeMap<(BindAddress, bool, bool), bool>;

/// Returns the expected inbound forwarding (services/docs/facts/istio-sidecar.md, 7): a server is reachable exactly
/// if it binds to more than localhost.
pub(crate) fn wanted() -> Table {
    let rows = BIND_ADDRESSES.into_iter().flat_map(|way| {
        let families = [false, true].map(|v6| [(way, true, v6), (way, false, v6)]);
        families.into_iter().flatten()
    });
    rows.map(|row| (row, row.0 != BindAddress::Localhost))
        .collect()
}

/// Builds the observed table. The server that was asked must answer and see the right source.
pub(crate) fn table(
    mut ask: impl FnMut(u16, bool, bool) -> anyhow::Result<(u16, IpAddr)>,
    source: impl Fn(bool, bool) -> IpAddr,
) -> anyhow::Result<Table> {
    let mut table = Table::new();
    for (way, service, v6) in wanted().into_keys() {
        let port = if service {
            way.port()
        } else {
            way.port() + 1000
        };
        let answer = ask(port, service, v6);
        if let Ok((answered, saw)) = &answer {
            let source = source(service, v6);
            ensure!(*answered == port, "{way:?}: {answered} answered for {port}");
            ensure!(*saw == source, "{way:?}: it saw {saw}, not {source}");
        }
        table.insert((way, service, v6), answer.is_ok());
    }
    Ok(table)
}
