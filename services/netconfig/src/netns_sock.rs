//! Sends claimed netns's descriptors to the broker (`proto/inpod/netconfig/v1/netns_socket.proto`).

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use inpod_proto::{
    Class,
    netconfig::v1::{
        FetchNetnsFailure, FetchNetnsRequest, FetchNetnsResponse, fetch_netns_response,
    },
    required,
};
use inpod_service::{
    Daemon, throttle_log,
    uds::{self, BindError},
};
use inpod_types::{Failure, NetnsId, SandboxRef};
use nix::sys::socket::SockType;
use prost::Message as _;
use sendfd::SendWithFd as _;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Interest},
    net::{UnixListener, UnixStream},
    sync::Semaphore,
    time::timeout,
};

use crate::claims::{Claim, Claims, validate};

/// The timeout of a whole exchange, and of the wait for a connection's first request.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(2);

/// The number of connections kept open between requests; the broker needs one connection. Further connections are
/// closed after their first response, so idle connections never keep a client from being served.
const MAX_KEPT_CONNECTIONS: usize = 16;

/// The number of requests after which a client has to connect again, because the peer is checked only on
/// connecting.
const MAX_REQUESTS: u32 = 1000;

/// The size of the buffer for a request; few requests are longer.
const BUFFER_BYTES: usize = 256;

const MAX_REQUEST_BYTES: u32 = 4096;

/// SCM_RIGHTS needs at least one byte of data.
const DESCRIPTOR_BYTE: u8 = 0;

/// Binds the socket in a separate directory, because only the directory of the socket is mounted into the broker.
pub(crate) fn listen(daemon: &Daemon) -> Result<UnixListener, BindError> {
    uds::bind(&socket_path(daemon))
}

pub(crate) fn remove(daemon: &Daemon) -> Result<(), BindError> {
    uds::remove_socket(&socket_path(daemon), SockType::Stream)
}

fn socket_path(daemon: &Daemon) -> PathBuf {
    daemon.directory("netns").join("netns.sock")
}

pub(crate) async fn serve(listener: UnixListener, claims: Arc<Claims>, daemon: Daemon) {
    let kept = Arc::new(Semaphore::new(MAX_KEPT_CONNECTIONS));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // The most likely cause, a lack of descriptors, is temporary.
                tracing::error!(%error, "Cannot accept a connection on netns.sock");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if let Err(refused) = daemon.policy().authorize(&stream, Class::Service) {
            if let Some(suppressed) = throttle_log("netns.sock") {
                tracing::warn!(error = %refused, suppressed, "Refused a connection on netns.sock");
            }
            continue;
        }
        let (claims, kept) = (Arc::clone(&claims), Arc::clone(&kept));
        tokio::spawn(async move {
            if let Err(error) = handle_connection(stream, &claims, &kept).await {
                tracing::warn!(%error, "A netns.sock request failed");
            }
        });
    }
}

async fn handle_connection(
    stream: UnixStream,
    claims: &Claims,
    kept: &Semaphore,
) -> io::Result<()> {
    let mut stream = BufReader::with_capacity(BUFFER_BYTES, stream);
    if !timeout(EXCHANGE_TIMEOUT, exchange(&mut stream, claims)).await?? {
        return Ok(());
    }
    let Ok(_permit) = kept.try_acquire() else {
        return Ok(());
    };
    for _ in 1..MAX_REQUESTS {
        let is_closed = stream.fill_buf().await?.is_empty();
        if is_closed || !timeout(EXCHANGE_TIMEOUT, exchange(&mut stream, claims)).await?? {
            return Ok(());
        }
    }
    Ok(())
}

/// Serves one request, and returns whether the client may send another.
async fn exchange(stream: &mut BufReader<UnixStream>, claims: &Claims) -> io::Result<bool> {
    let request = receive(stream).await?;
    let keep_open = request.keep_open;
    let (result, claim) = match find(claims, request) {
        Ok(claim) => {
            let netns = claim.netns.id().into();
            (fetch_netns_response::Result::Netns(netns), Some(claim))
        }
        Err(failure) => {
            let failure = FetchNetnsFailure {
                failure: Some((&failure).into()),
                message: failure.message,
            };
            (fetch_netns_response::Result::Failure(failure), None)
        }
    };
    let mut packet = encode(result)?;
    let stream = stream.get_mut();
    // A client without `keep_open` may lose a descriptor unless the descriptor accompanies only the last byte.
    if claim.is_none() || !keep_open {
        stream.write_all(&packet).await?;
        packet.clear();
    }
    if let Some(claim) = claim {
        packet.push(DESCRIPTOR_BYTE);
        send_with_descriptor(stream, &packet, &claim).await?;
    }
    Ok(keep_open)
}

async fn receive(stream: &mut BufReader<UnixStream>) -> io::Result<FetchNetnsRequest> {
    let length = stream.read_u32().await?;
    if length > MAX_REQUEST_BYTES {
        return Err(io::Error::other(format!("a request of {length} bytes")));
    }
    let mut bytes = Vec::new();
    stream.take(length.into()).read_to_end(&mut bytes).await?;
    FetchNetnsRequest::decode(bytes.as_slice()).map_err(io::Error::other)
}

fn find(claims: &Claims, request: FetchNetnsRequest) -> Result<Arc<Claim>, Failure> {
    let sandbox: SandboxRef = required("sandbox", request.sandbox)?;
    let wanted: NetnsId = required("netns", request.netns)?;
    let claim = claims.get(&sandbox)?;
    let found = claim.netns.id();
    if found == wanted {
        Ok(claim)
    } else {
        Err(validate::mismatch(found).into())
    }
}

fn encode(result: fetch_netns_response::Result) -> io::Result<Vec<u8>> {
    let response = FetchNetnsResponse {
        result: Some(result),
    };
    let bytes = response.encode_to_vec();
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    Ok([length.to_be_bytes().as_slice(), &bytes].concat())
}

/// Sends a descriptor opened O_RDONLY, of which the receiver's copy outlives the claim.
async fn send_with_descriptor(
    stream: &mut UnixStream,
    packet: &[u8],
    claim: &Claim,
) -> io::Result<()> {
    let descriptor = claim.netns.as_fd().as_raw_fd();
    loop {
        stream.ready(Interest::WRITABLE).await?;
        match stream.send_with_fd(packet, &[descriptor]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
            Ok(sent) => {
                return stream
                    .write_all(packet.get(sent..).unwrap_or_default())
                    .await;
            }
        }
    }
}
