//! Implements HBONE: an HTTP/2 CONNECT within mutual TLS, with one connection per tunnel.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use h2::client::SendRequest;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{Method, Request, Response, StatusCode};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::identity::Identity;
use crate::tls;

/// The first byte of a TLS handshake.
const HANDSHAKE: u8 = 0x16;

const BUFFER: usize = 16 * 1024;

const BAGGAGE: &str = "baggage";

/// Returns whether a client begins with TLS.
pub(crate) async fn is_tls(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    Ok(stream.peek(&mut first).await? == 1 && first == [HANDSHAKE])
}

/// A tunnel with its two directions.
pub(crate) struct Tunnel {
    send: SendStream<Bytes>,
    receive: RecvStream,
}

/// Opens a tunnel to a workload at the other end of a connection. Returns the tunnel and the HTTP/2 connection, which
/// must be polled.
pub(crate) async fn open(
    stream: TcpStream,
    target: SocketAddr,
    own: &Identity,
    peer: &str,
    baggage: &str,
) -> io::Result<(Tunnel, impl Future<Output = Result<(), h2::Error>> + use<>)> {
    let config = tls::client(own, peer).map_err(io::Error::other)?;
    let name = ServerName::IpAddress(target.ip().into());
    let stream = TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await?;
    let (client, connection) = h2::client::handshake(stream)
        .await
        .map_err(io::Error::other)?;
    let mut connection = Box::pin(connection);
    let mut asked = pin!(ask(client, target, baggage));
    let tunnel = tokio::select! {
        tunnel = asked.as_mut() => tunnel?,
        _ended = connection.as_mut() => {
            // The answer may have come before the end of the connection.
            asked.await?;
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    };
    Ok((tunnel, connection))
}

async fn ask(client: SendRequest<Bytes>, target: SocketAddr, baggage: &str) -> io::Result<Tunnel> {
    let mut client = client.ready().await.map_err(io::Error::other)?;
    let request = Request::builder()
        .method(Method::CONNECT)
        .uri(target.to_string())
        .header(BAGGAGE, baggage)
        .body(())
        .map_err(io::Error::other)?;
    let (response, send) = client
        .send_request(request, false)
        .map_err(io::Error::other)?;
    let response = response.await.map_err(io::Error::other)?;
    if response.status() != StatusCode::OK {
        let status = response.status();
        return Err(io::Error::other(format!("the peer answered {status}")));
    }
    Ok(Tunnel {
        send,
        receive: response.into_body(),
    })
}

/// The request of a peer for a tunnel.
pub(crate) struct Asked {
    /// The identity that the peer proved.
    pub(crate) peer: Option<String>,
    pub(crate) target: Option<SocketAddr>,
    respond: SendResponse<Bytes>,
    receive: RecvStream,
}

type Connection = h2::server::Connection<tokio_rustls::server::TlsStream<TcpStream>, Bytes>;

/// Receives the request for a tunnel on a connection. Returns the request and the HTTP/2 connection, which must be
/// polled.
pub(crate) async fn receive(stream: TcpStream, own: &Identity) -> io::Result<(Asked, Connection)> {
    let config = tls::server(own).map_err(io::Error::other)?;
    let stream = TlsAcceptor::from(Arc::new(config)).accept(stream).await?;
    let certificates = stream.get_ref().1.peer_certificates();
    let certificate: Option<&CertificateDer<'_>> = certificates.and_then(<[_]>::first);
    let peer = certificate.and_then(tls::name_in);
    let mut connection = h2::server::handshake(stream)
        .await
        .map_err(io::Error::other)?;
    let accepted = connection.accept().await;
    let accepted = accepted.ok_or(io::ErrorKind::UnexpectedEof)?;
    let (request, respond) = accepted.map_err(io::Error::other)?;
    let is_connect = request.method() == Method::CONNECT;
    let authority = request.uri().authority().filter(|_| is_connect);
    let asked = Asked {
        peer,
        target: authority.and_then(|authority| authority.as_str().parse().ok()),
        respond,
        receive: request.into_body(),
    };
    Ok((asked, connection))
}

impl Asked {
    pub(crate) fn accept(mut self) -> io::Result<Tunnel> {
        let send = self
            .respond
            .send_response(Response::new(()), false)
            .map_err(io::Error::other)?;
        Ok(Tunnel {
            send,
            receive: self.receive,
        })
    }

    pub(crate) fn refuse(mut self, status: StatusCode) {
        let mut response = Response::new(());
        *response.status_mut() = status;
        // The answer fails if the peer is gone.
        drop(self.respond.send_response(response, true));
    }
}

/// Ends a connection in order, so that the last bytes reach the peer.
pub(crate) async fn close(mut connection: Connection) {
    connection.graceful_shutdown();
    drop(poll_fn(|context| connection.poll_closed(context)).await);
}

/// Polls a connection, and refuses every further request on the connection.
pub(crate) async fn drive(connection: &mut Connection) {
    while let Some(Ok((_, mut respond))) = connection.accept().await {
        respond.send_reset(h2::Reason::REFUSED_STREAM);
    }
}

impl Tunnel {
    /// Copies between the tunnel and a connection until both directions have ended, and counts the bytes.
    pub(crate) async fn exchange(
        mut self,
        stream: &mut TcpStream,
        to_tunnel: &AtomicU64,
        from_tunnel: &AtomicU64,
    ) -> io::Result<()> {
        let (mut reader, mut writer) = stream.split();
        tokio::try_join!(
            send_all(&mut reader, &mut self.send, to_tunnel),
            receive_all(&mut self.receive, &mut writer, from_tunnel)
        )?;
        Ok(())
    }
}

async fn send_all(
    reader: &mut (impl AsyncRead + Unpin),
    send: &mut SendStream<Bytes>,
    count: &AtomicU64,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let length = reader.read(&mut buffer).await?;
        let read = buffer.get(..length).unwrap_or_default();
        if read.is_empty() {
            return send.send_data(Bytes::new(), true).map_err(io::Error::other);
        }
        let mut rest = Bytes::copy_from_slice(read);
        while !rest.is_empty() {
            send.reserve_capacity(rest.len());
            let granted = poll_fn(|context| send.poll_capacity(context)).await;
            let granted = granted.ok_or(io::ErrorKind::BrokenPipe)?;
            let granted = granted.map_err(io::Error::other)?.min(rest.len());
            send.send_data(rest.split_to(granted), false)
                .map_err(io::Error::other)?;
        }
        add(count, length);
    }
}

async fn receive_all(
    receive: &mut RecvStream,
    writer: &mut (impl AsyncWrite + Unpin),
    count: &AtomicU64,
) -> io::Result<()> {
    while let Some(data) = receive.data().await {
        let data = data.map_err(io::Error::other)?;
        writer.write_all(&data).await?;
        let flow = receive.flow_control();
        flow.release_capacity(data.len())
            .map_err(io::Error::other)?;
        add(count, data.len());
    }
    writer.shutdown().await
}

fn add(count: &AtomicU64, length: usize) {
    count.fetch_add(u64::try_from(length).unwrap_or(0), Ordering::Relaxed);
}
