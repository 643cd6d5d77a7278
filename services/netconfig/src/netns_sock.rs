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
    Daemon,
    uds::{self, BindError},
};
use inpod_types::{Failure, NetnsId, SandboxRef};
use nix::sys::socket::SockType;
use prost::Message as _;
use sendfd::SendWithFd as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
    net::{UnixListener, UnixStream},
    time::timeout,
};

use crate::{
    claims::{Claim, Claims},
    error::{ClaimError, IntoFailure as _},
};

/// Of the whole exchange.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(2);

const MAX_REQUEST_BYTES: u32 = 4096;

/// SCM_RIGHTS needs at least one byte of data.
const DESCRIPTOR_BYTE: [u8; 1] = [0];

/// Uses a separate directory: only that one is mounted into the broker.
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
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Most likely out of descriptors: temporary.
                tracing::error!(%error, "Cannot accept a connection on netns.sock");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if let Err(refused) = daemon.policy().authorize(&stream, Class::Service) {
            tracing::warn!(error = %refused, "Refused a connection on netns.sock");
            continue;
        }
        tokio::spawn(handle_connection(stream, Arc::clone(&claims)));
    }
}

async fn handle_connection(stream: UnixStream, claims: Arc<Claims>) {
    match timeout(EXCHANGE_TIMEOUT, exchange(stream, &claims)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "A netns.sock request failed"),
        Err(_) => tracing::warn!("A netns.sock request timed out"),
    }
}

async fn exchange(mut stream: UnixStream, claims: &Claims) -> io::Result<()> {
    let request = receive(&mut stream).await?;
    match find(claims, request) {
        Ok(claim) => {
            let netns = claim.netns.id();
            respond(
                &mut stream,
                fetch_netns_response::Result::Netns(netns.into()),
            )
            .await?;
            send_descriptor(&stream, &claim).await
        }
        Err(failure) => {
            let failure = FetchNetnsFailure {
                failure: Some((&failure).into()),
                message: failure.message,
            };
            respond(&mut stream, fetch_netns_response::Result::Failure(failure)).await
        }
    }
}

async fn receive(stream: &mut UnixStream) -> io::Result<FetchNetnsRequest> {
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
    let claim = claims.get(&sandbox).map_err(ClaimError::into_failure)?;
    let found = claim.netns.id();
    if found == wanted {
        Ok(claim)
    } else {
        Err(ClaimError::Mismatch { found }.into_failure())
    }
}

async fn respond(stream: &mut UnixStream, result: fetch_netns_response::Result) -> io::Result<()> {
    let response = FetchNetnsResponse {
        result: Some(result),
    };
    let bytes = response.encode_to_vec();
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_u32(length).await?;
    stream.write_all(&bytes).await
}

/// Sends a descriptor opened O_RDONLY. The receiver's copy outlives the claim.
async fn send_descriptor(stream: &UnixStream, claim: &Claim) -> io::Result<()> {
    let descriptor = claim.netns.as_fd().as_raw_fd();
    loop {
        stream.ready(Interest::WRITABLE).await?;
        match stream.send_with_fd(&DESCRIPTOR_BYTE, &[descriptor]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return result.map(drop),
        }
    }
}
