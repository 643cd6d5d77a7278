//! Forwards a connection from its listener to its destination.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::access_log::{Accepted, Entry};
use crate::connect_request::{self, ACCEPTED, ConnectRequest, REFUSED, RequestError, UNAVAILABLE};
use crate::listeners::Listener;
use crate::options::Fault;
use crate::proxy::{Member, Pod};
use crate::tunnel;
use crate::upstream::{MARK, Upstream};

const COPY_BUFFER: usize = 16 * 1024;

pub(crate) struct Incoming {
    pub(crate) listener: Listener,
    pub(crate) stream: TcpStream,
    pub(crate) source: SocketAddr,
}

#[derive(Debug, thiserror::Error)]
enum ForwardError {
    #[error("refused: {0} is a listener of ztunnel itself")]
    Loop(SocketAddr),
    #[error("refused: {0} is not an address of this pod")]
    ForeignTarget(SocketAddr),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("failed to connect to {0}: {1}")]
    Connect(SocketAddr, io::Error),
    #[error("failed to open a tunnel to {0}: {1}")]
    Tunnel(SocketAddr, io::Error),
    #[error("failed to receive a tunnel: {0}")]
    Receive(io::Error),
    #[error("not a CONNECT request to an ip:port")]
    NoTarget,
    #[error("failed to forward: {0}")]
    Copy(#[from] io::Error),
}

/// The source, the original destination and the arrival address of a connection.
#[derive(Debug, Clone, Copy)]
struct Route {
    source: SocketAddr,
    original: SocketAddr,
    local: SocketAddr,
}

pub(crate) async fn forward(incoming: Incoming, pod: Arc<Pod>) {
    let Incoming {
        listener,
        stream,
        source,
    } = incoming;
    let Ok(mut route) = route(&stream, source) else {
        // Without a local address, the client is gone already.
        return;
    };
    if pod.fault == Fault::IgnoresOriginalDestination {
        route.original = route.local;
    }
    let accepted = Accepted {
        uid: Arc::clone(&pod.uid),
        listener,
        source: route.source,
        original_destination: (listener != Listener::Hbone).then_some(route.original),
    };
    let mut entry = Entry::accepted(pod.log.clone(), accepted);
    let outcome = match listener {
        Listener::Outbound | Listener::Inbound => {
            redirected(stream, listener, route, &pod, &mut entry).await
        }
        Listener::Hbone => match &pod.member {
            Some(member) if is_tls(&stream).await => {
                received(stream, route, &pod, member, &mut entry).await
            }
            Some(_) | None => tunnelled(stream, route, &pod, &mut entry).await,
        },
    };
    entry.close(outcome.err().map(|error| error.to_string()));
}

fn route(stream: &TcpStream, source: SocketAddr) -> io::Result<Route> {
    let local = canonical(stream.local_addr()?);
    Ok(Route {
        source: canonical(source),
        original: original_destination(stream, local).unwrap_or(local),
        local,
    })
}

/// Returns an IPv4 address in its usual form: a dual-stack socket shows an IPv4 peer as an IPv6 address
/// (`::ffff:10.0.0.1`).
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        // An IPv6 address is returned unchanged, because a new address would lack the scope id.
        ip if ip.is_ipv4() => SocketAddr::new(ip, address.port()),
        _ => address,
    }
}

/// Returns the address that the client dialed, from conntrack. The family of the connection decides which of the two
/// socket options to read, because a dual-stack socket has both.
fn original_destination(stream: &TcpStream, local: SocketAddr) -> Option<SocketAddr> {
    let socket = SockRef::from(stream);
    let original = if local.is_ipv4() {
        socket.original_dst_v4()
    } else {
        socket.original_dst_v6()
    };
    original.ok()?.as_socket()
}

/// Refuses connections that would loop: a connection that was not redirected was made to the listener itself, and a
/// connection to another listener of the same pod would pass through both listeners for ever.
fn refuse_loop(listener: Listener, route: Route) -> Result<(), ForwardError> {
    let direct = route.original == route.local;
    let inward = listener != Listener::Outbound && Listener::has(route.original.port());
    if direct || inward {
        return Err(ForwardError::Loop(route.original));
    }
    Ok(())
}

async fn redirected(
    stream: TcpStream,
    listener: Listener,
    route: Route,
    pod: &Pod,
    entry: &mut Entry,
) -> Result<(), ForwardError> {
    if pod.fault != Fault::ForwardsDirectConnections {
        refuse_loop(listener, route)?;
    }
    if let Some(member) = pod
        .member
        .as_ref()
        .filter(|_| listener == Listener::Outbound)
        && let Some(peer) = member.mesh.name_at(route.original.ip()).await
    {
        return through_tunnel(stream, route.original, (member, peer), pod, entry).await;
    }
    let upstream = Upstream {
        destination: route.original,
        client: (listener == Listener::Inbound).then_some(route.source),
    };
    let destination = connect(upstream, pod, entry).await?;
    if pod.fault == Fault::IgnoresHalfCloses {
        return exchange_without_ends(stream, destination).await;
    }
    exchange(stream, destination, &[], entry).await
}

/// Returns whether the peer begins with TLS; a silent peer does not count as TLS.
async fn is_tls(stream: &TcpStream) -> bool {
    tunnel::is_tls(stream).await.unwrap_or(false)
}

async fn through_tunnel(
    mut stream: TcpStream,
    original: SocketAddr,
    (member, peer): (&Member, Arc<str>),
    pod: &Pod,
    entry: &mut Entry,
) -> Result<(), ForwardError> {
    let upstream = Upstream {
        destination: SocketAddr::new(original.ip(), Listener::Hbone.port()),
        client: None,
    };
    let outer = connect(upstream, pod, entry).await?;
    let opened = tunnel::open(outer, original, &member.identity, &peer, &member.baggage).await;
    let (tunnel, connection) = opened.map_err(|error| ForwardError::Tunnel(original, error))?;
    entry.peer_is(Some(peer.to_string()));
    let exchanged = tunnel.exchange(&mut stream, &entry.from_source, &entry.from_destination);
    // The connection ends with the last handle of the tunnel.
    let (exchanged, _ended) = tokio::join!(exchanged, connection);
    Ok(exchanged?)
}

/// Serves a tunnel that a peer opens.
async fn received(
    stream: TcpStream,
    route: Route,
    pod: &Pod,
    member: &Member,
    entry: &mut Entry,
) -> Result<(), ForwardError> {
    let received = tunnel::receive(stream, &member.identity).await;
    let (asked, mut connection) = received.map_err(ForwardError::Receive)?;
    entry.peer_is(asked.peer.clone());
    let target = asked.target.ok_or(ForwardError::NoTarget);
    let upstream = target.and_then(|target| upstream_of(target, route, entry));
    let connected = match upstream {
        Ok(upstream) => connect(upstream, pod, entry).await,
        Err(error) => Err(error),
    };
    let mut destination = match connected {
        Ok(destination) => destination,
        Err(error) => {
            asked.refuse(http::StatusCode::BAD_REQUEST);
            tunnel::close(connection).await;
            return Err(error);
        }
    };
    let tunnel = asked.accept().map_err(ForwardError::Receive)?;
    let exchanged = {
        let (to, from) = (&entry.from_destination, &entry.from_source);
        let exchange = tunnel.exchange(&mut destination, to, from);
        tokio::select! {
            exchanged = exchange => exchanged,
            () = tunnel::drive(&mut connection) => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    };
    tunnel::close(connection).await;
    Ok(exchanged?)
}

async fn tunnelled(
    mut stream: TcpStream,
    route: Route,
    pod: &Pod,
    entry: &mut Entry,
) -> Result<(), ForwardError> {
    let request = connect_request::receive(&mut stream).await;
    let accepted = match request.map_err(ForwardError::from) {
        Ok(request) => accept_target(request, route, entry),
        Err(error) => Err(error),
    };
    let (request, upstream) = match accepted {
        Ok(accepted) => accepted,
        Err(error) => return Err(refuse(stream, REFUSED, error).await),
    };
    match connect(upstream, pod, entry).await {
        Ok(destination) => {
            stream.write_all(ACCEPTED).await?;
            exchange(stream, destination, &request.early, entry).await
        }
        Err(error) => Err(refuse(stream, UNAVAILABLE, error).await),
    }
}

/// Accepts only targets in the pod of the tunnel; other targets would make ztunnel a relay.
fn accept_target(
    request: ConnectRequest,
    route: Route,
    entry: &mut Entry,
) -> Result<(ConnectRequest, Upstream), ForwardError> {
    let upstream = upstream_of(request.target, route, entry)?;
    Ok((request, upstream))
}

fn upstream_of(
    target: SocketAddr,
    route: Route,
    entry: &mut Entry,
) -> Result<Upstream, ForwardError> {
    entry.destination_is(target);
    if target.ip() != route.local.ip() {
        return Err(ForwardError::ForeignTarget(target));
    }
    if Listener::has(target.port()) {
        return Err(ForwardError::Loop(target));
    }
    Ok(Upstream {
        destination: target,
        client: Some(route.source),
    })
}

/// Sends `answer` to the client, which may still be reading, and returns the error.
async fn refuse(mut stream: TcpStream, answer: &[u8], error: ForwardError) -> ForwardError {
    if let Err(error) = stream.write_all(answer).await {
        tracing::debug!(%error, "the client went away before its answer");
    }
    error
}

async fn connect(
    mut upstream: Upstream,
    pod: &Pod,
    entry: &mut Entry,
) -> Result<TcpStream, ForwardError> {
    let is_marked = pod.fault != Fault::UnmarkedUpstreams;
    let mark = if is_marked { MARK } else { 0 };
    if pod.fault == Fault::OwnSourceAddress {
        upstream.client = None;
    }
    let stream = upstream
        .connect(&pod.inside, mark)
        .await
        .map_err(|error| ForwardError::Connect(upstream.destination, error))?;
    entry.connected_from(canonical(stream.local_addr()?));
    Ok(stream)
}

/// Copies both directions, and ends when both are done or one fails.
async fn exchange(
    mut source: TcpStream,
    mut destination: TcpStream,
    early: &[u8],
    entry: &Entry,
) -> Result<(), ForwardError> {
    source.set_nodelay(true)?;
    let (mut source_reader, mut source_writer) = source.split();
    let (mut destination_reader, mut destination_writer) = destination.split();
    let mut forth = early.chain(&mut source_reader);
    tokio::try_join!(
        copy(&mut forth, &mut destination_writer, &entry.from_source),
        copy(
            &mut destination_reader,
            &mut source_writer,
            &entry.from_destination
        ),
    )?;
    Ok(())
}

/// Copies both directions until the destination ends. The source learns of the destination's end, but not vice versa.
async fn exchange_without_ends(
    source: TcpStream,
    destination: TcpStream,
) -> Result<(), ForwardError> {
    let (mut source_reader, mut source_writer) = source.into_split();
    let (mut destination_reader, mut destination_writer) = destination.into_split();
    let forth = async {
        tokio::io::copy(&mut source_reader, &mut destination_writer).await?;
        std::future::pending::<io::Result<()>>().await
    };
    tokio::select! {
        copied = forth => copied?,
        copied = tokio::io::copy(&mut destination_reader, &mut source_writer) => drop(copied?),
    }
    Ok(())
}

/// Copies one direction and counts the bytes, so that a cut connection has byte counts, too; then half-closes the other
/// side.
async fn copy(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    copied: &AtomicU64,
) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(COPY_BUFFER);
    while reader.read_buf(&mut buffer).await? > 0 {
        writer.write_all(&buffer).await?;
        copied.fetch_add(u64::try_from(buffer.len()).unwrap_or(0), Ordering::Relaxed);
        buffer.clear();
    }
    writer.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("address")
    }

    fn refused(listener: Listener, original: &str, local: &str) -> bool {
        let route = Route {
            source: address("10.0.0.1:40000"),
            original: address(original),
            local: address(local),
        };
        refuse_loop(listener, route).is_err()
    }

    #[test]
    fn a_connection_that_nothing_redirected_is_refused() {
        assert!(refused(
            Listener::Outbound,
            "10.0.0.2:15001",
            "10.0.0.2:15001"
        ));
        assert!(refused(
            Listener::Inbound,
            "10.0.0.2:15006",
            "10.0.0.2:15006"
        ));
    }

    #[test]
    fn an_inbound_connection_to_another_listener_is_refused() {
        assert!(refused(
            Listener::Inbound,
            "10.0.0.2:15001",
            "10.0.0.2:15006"
        ));
    }

    #[test]
    fn redirected_connections_are_forwarded() {
        assert!(!refused(
            Listener::Outbound,
            "10.0.0.2:80",
            "127.0.0.1:15001"
        ));
        assert!(!refused(Listener::Inbound, "10.0.0.2:80", "10.0.0.2:15006"));
        // The HBONE port of another pod is an ordinary destination.
        assert!(!refused(
            Listener::Outbound,
            "10.0.0.3:15008",
            "127.0.0.1:15001"
        ));
    }

    #[test]
    fn a_mapped_address_becomes_an_ipv4_address() {
        assert_eq!(
            canonical(address("[::ffff:10.0.0.1]:80")),
            address("10.0.0.1:80")
        );
        assert_eq!(canonical(address("[fd00::1]:80")), address("[fd00::1]:80"));
    }
}
