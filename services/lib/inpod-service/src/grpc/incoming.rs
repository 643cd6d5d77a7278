//! Accepts the connections of a Unix socket.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::Stream;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{UnixListener, UnixStream},
};
use tonic::transport::server::Connected;

use crate::{
    metrics::Calls,
    peer::{Peer, Policy},
};

/// Accepts and identifies peers, and closes a connection whose peer cannot be identified.
pub(super) fn incoming(
    listener: UnixListener,
    policy: Arc<Policy>,
    calls: Calls,
) -> impl Stream<Item = io::Result<Connection>> {
    let start = (listener, policy, calls);
    futures_util::stream::unfold(start, |(listener, policy, calls)| async move {
        loop {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Most likely the process is out of file descriptors, of which some will be closed soon.
                    tracing::error!(%error, "Cannot accept");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            match policy.identify(&stream) {
                Ok(peer) => {
                    let connection = Connection { stream, peer };
                    return Some((Ok(connection), (listener, policy, calls)));
                }
                Err(refused) => {
                    calls.refuse_connection();
                    tracing::warn!(error = %refused, "Refused a connection");
                }
            }
        }
    })
}

#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    peer: Peer,
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
