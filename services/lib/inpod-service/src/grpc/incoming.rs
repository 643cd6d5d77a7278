//! Accepts the connections of a Unix socket.

use std::{
    collections::BTreeMap,
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
    sync::oneshot,
    time::{Sleep, sleep},
};
use tonic::transport::server::Connected;

use crate::{
    metrics::Calls,
    peer::{Peer, Policy},
    throttle_log,
};

/// The time in which a new connection must send the preface of HTTP/2 or a request of HTTP/1.1. hyper waits for the
/// preface without a deadline, and sends keepalive pings only afterwards.
pub(super) const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);

/// Accepts the connections of identified peers.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) listener: UnixListener,
    pub(super) policy: Arc<Policy>,
    pub(super) calls: Calls,
    pub(super) connections: Connections,
}

impl Incoming {
    pub(super) fn accept_all(self) -> impl Stream<Item = io::Result<Connection>> {
        futures_util::stream::unfold(self, |mut incoming| async move {
            Some((Ok(incoming.accept().await), incoming))
        })
    }

    /// Closes connections whose peer cannot be identified.
    async fn accept(&mut self) -> Connection {
        loop {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Most likely the process is out of file descriptors, of which some will be closed soon.
                    if let Some(suppressed) = throttle_log("accept") {
                        tracing::error!(%error, suppressed, "Cannot accept");
                    }
                    sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            match self.policy.identify(&stream) {
                Ok(peer) => return self.connections.insert(stream, peer),
                Err(refused) => {
                    self.calls.refuse_connection();
                    if let Some(suppressed) = throttle_log("connection") {
                        tracing::warn!(error = %refused, suppressed, "Refused a connection");
                    }
                }
            }
        }
    }
}

/// The open connections in the order of their arrival, of which there is a maximum.
#[derive(Debug)]
pub(super) struct Connections {
    max: usize,
    open: Vec<Open>,
}

#[derive(Debug)]
struct Open {
    pid: i32,
    is_service: bool,
    close: oneshot::Sender<()>,
}

impl Connections {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            open: Vec::new(),
        }
    }

    fn insert(&mut self, stream: UnixStream, peer: Peer) -> Connection {
        if self.open.len() >= self.max {
            self.open.retain(|connection| !connection.close.is_closed());
        }
        if self.open.len() >= self.max {
            self.close_one();
        }
        let (close, closed) = oneshot::channel();
        self.open.push(Open {
            pid: peer.pid,
            is_service: peer.is_only_service(),
            close,
        });
        Connection {
            stream,
            peer,
            close_order: Some(closed),
            preface_deadline: Some(Box::pin(sleep(PREFACE_TIMEOUT))),
            is_closed: false,
        }
    }

    /// Closes the oldest connection of the process with the most connections. A service loses connections only if no
    /// other process has any.
    fn close_one(&mut self) {
        let mut counts = BTreeMap::<i32, usize>::new();
        for connection in &self.open {
            *counts.entry(connection.pid).or_default() += 1;
        }
        let rank = |connection: &Open| (!connection.is_service, counts.get(&connection.pid));
        // `max_by_key` returns the last of several equal elements.
        let connections = self.open.iter().enumerate().rev();
        let oldest = connections.max_by_key(|(_, connection)| rank(connection));
        if let Some((at, _)) = oldest {
            let closing = self.open.remove(at);
            if let Some(suppressed) = throttle_log("connections") {
                let (max, pid) = (self.max, closing.pid);
                tracing::warn!(
                    max,
                    peer.pid = pid,
                    suppressed,
                    "Closing a connection: too many are open"
                );
            }
            // The peer may have closed the connection meanwhile.
            closing.close.send(()).unwrap_or_default();
        }
    }
}

#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    peer: Peer,
    /// The order to close the connection. `None` if the server accepts no further connections.
    close_order: Option<oneshot::Receiver<()>>,
    /// `None` after the server's first write: by then, the server has received the preface or a request.
    preface_deadline: Option<Pin<Box<Sleep>>>,
    is_closed: bool,
}

impl Connection {
    fn poll_closed(&mut self, cx: &mut Context<'_>) -> bool {
        if let Some(order) = &mut self.close_order
            && let Poll::Ready(received) = Pin::new(order).poll(cx)
        {
            self.close_order = None;
            self.is_closed = received.is_ok();
        }
        self.is_closed
    }

    fn poll_preface_deadline(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut self.preface_deadline {
            Some(deadline) => deadline.as_mut().poll(cx),
            None => Poll::Pending,
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    /// Reads the end of the stream after the order to close the connection, or after the deadline for the preface.
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.poll_closed(cx) {
            return Poll::Ready(Ok(()));
        }
        // Data that arrived in time count even if a busy server reads them after the deadline.
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if read.is_pending() && self.poll_preface_deadline(cx).is_ready() {
            self.is_closed = true;
            return Poll::Ready(Ok(()));
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.is_closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        self.preface_deadline = None;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Opens a connection of the process, which is a service or runs on the host.
    fn open(connections: &mut Connections, pid: i32, is_service: bool) -> (Connection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let peer = Peer::of_test(pid, is_service);
        (connections.insert(ours, peer), theirs)
    }

    fn is_closed(connection: &mut Connection) -> bool {
        let read = connection.read_u8().now_or_never();
        read.is_some_and(|read| read.is_err())
    }

    #[tokio::test]
    async fn the_process_with_most_connections_loses_its_oldest() {
        let mut connections = Connections::new(5);
        let mut all: Vec<_> = [(1, true), (1, true), (2, false), (3, false), (3, false)]
            .map(|(pid, is_service)| open(&mut connections, pid, is_service))
            .into();
        let mut closed = Vec::new();
        for _ in 0..4 {
            all.push(open(&mut connections, 4, false));
            for (at, (connection, _)) in all.iter_mut().enumerate() {
                if !closed.contains(&at) && is_closed(connection) {
                    closed.push(at);
                    connection.write_u8(1).await.unwrap_err();
                }
            }
        }
        // Process 4 has most connections from its third connection on.
        assert_eq!(closed, [3, 2, 5, 6]);
    }

    #[tokio::test]
    async fn a_connection_that_was_closed_makes_room() {
        let mut connections = Connections::new(1);
        drop(open(&mut connections, 1, false));
        let (mut second, _theirs) = open(&mut connections, 2, false);
        assert!(!is_closed(&mut second));
        drop(connections);
        assert!(!is_closed(&mut second), "a drain closes none");
    }
}
