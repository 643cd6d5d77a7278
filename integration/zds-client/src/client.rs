//! Connects to the agent: sends a hello, then receives requests and sends answers in order.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use prost::Message;
use tokio_seqpacket::UnixSeqpacket;
use tokio_seqpacket::ancillary::{AncillaryMessageReader, OwnedAncillaryMessage};

use crate::error::{AckError, ConnectError, ProtocolError, ReadError, RecvError};
use crate::proto::{Ack, Version, WorkloadResponse, ZdsHello, workload_response};
use crate::request::{Received, parse};

/// The size of stock ztunnel's receive buffer, and therefore of the longest request that stock ztunnel can read.
pub const DEFAULT_RECEIVE_BUFFER: usize = 1024;

/// The longest error text that is sent, so that an answer fits the 1024 bytes of Istio's receive buffer.
const MAX_ERROR_TEXT: usize = 1000;

/// Options for a connection to the agent.
#[derive(Debug, Clone)]
pub struct Options {
    receive_buffer: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            receive_buffer: DEFAULT_RECEIVE_BUFFER,
        }
    }
}

impl Options {
    /// Sets the maximum size of a request; receiving a longer request is a read error.
    #[must_use]
    pub const fn receive_buffer(mut self, bytes: usize) -> Self {
        self.receive_buffer = bytes;
        self
    }

    /// Connects to the socket of the agent and sends the hello.
    ///
    /// # Errors
    ///
    /// After an error, retry with a growing pause: the agent may be restarting.
    pub async fn connect(&self, path: impl AsRef<Path>) -> Result<Client, ConnectError> {
        let socket = UnixSeqpacket::connect(path)
            .await
            .map_err(ConnectError::Dial)?;
        let client = self.attach(socket);
        client.hello().await.map_err(ConnectError::Hello)?;
        Ok(client)
    }

    /// Uses a connected socket, on which the caller sends the hello.
    #[must_use]
    pub fn attach(&self, socket: UnixSeqpacket) -> Client {
        Client::new(socket, self.receive_buffer)
    }
}

/// A connection to the agent that receives requests.
#[derive(Debug)]
pub struct Client {
    socket: UnixSeqpacket,
    buffer: Vec<u8>,
    snapshot_sent: bool,
    owed: usize,
}

/// The control buffer, with room for two descriptors as in stock ztunnel: the space for one descriptor is rounded up to
/// the alignment of the control header.
#[derive(Default)]
#[repr(align(8))]
struct Control([u8; 24]);

impl Client {
    /// Connects with stock ztunnel's settings and sends the hello, to which the agent sends no answer.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Options::connect`].
    pub async fn connect(path: impl AsRef<Path>) -> Result<Self, ConnectError> {
        Options::default().connect(path).await
    }

    fn new(socket: UnixSeqpacket, receive_buffer: usize) -> Self {
        Self {
            socket,
            buffer: vec![0; receive_buffer],
            snapshot_sent: false,
            owed: 0,
        }
    }

    async fn hello(&self) -> io::Result<()> {
        let hello = ZdsHello {
            version: Version::V1.into(),
        };
        self.send(&hello.encode_to_vec()).await
    }

    /// Receives the next request, or `None` at the end of the connection. An empty packet also reads as the end,
    /// because `SOCK_SEQPACKET` does not distinguish an empty packet from the end.
    ///
    /// The method is cancel safe: a request is either returned or still in the socket.
    ///
    /// # Errors
    ///
    /// Answer each error like a request, with the text of the error, before you drop the connection; nothing can be
    /// received after an error.
    pub async fn recv(&mut self) -> Result<Option<Received>, RecvError> {
        let received = self.next().await;
        if !matches!(received, Ok(None)) {
            self.owed = self.owed.saturating_add(1);
        }
        received
    }

    async fn next(&mut self) -> Result<Option<Received>, RecvError> {
        let Some((length, descriptors)) = self.read().await? else {
            return Ok(None);
        };
        let packet = self.buffer.get(..length).unwrap_or_default();
        let received = parse(packet, descriptors)?;
        self.check_order(&received)?;
        Ok(Some(received))
    }

    async fn read(&mut self) -> Result<Option<(usize, Vec<OwnedFd>)>, ReadError> {
        let mut control = Control::default();
        let (message, ancillary) = self
            .socket
            .recv_with_ancillary(&mut self.buffer, &mut control.0)
            .await?;
        // The function does not await from here on, because a cancelled call would lose the request.
        let descriptors = own(ancillary);
        if message.bytes_read() == 0 {
            return Ok(None);
        }
        if message.ancillary_truncated() {
            return Err(ReadError::DescriptorsTruncated);
        }
        if message.truncated() {
            return Err(ReadError::Truncated);
        }
        Ok(Some((message.bytes_read(), descriptors)))
    }

    /// Checks the only order in the protocol: after the snapshot, neither a Keep nor a second SnapshotSent may follow.
    fn check_order(&mut self, received: &Received) -> Result<(), ProtocolError> {
        match received {
            Received::Keep { .. } if self.snapshot_sent => Err(ProtocolError::KeepAfterSnapshot),
            Received::SnapshotSent if self.snapshot_sent => Err(ProtocolError::SecondSnapshot),
            Received::SnapshotSent => {
                self.snapshot_sent = true;
                Ok(())
            }
            Received::Add { .. } | Received::Keep { .. } | Received::Del { .. } => Ok(()),
        }
    }

    /// Answers the oldest unanswered request with success or with an error text. Cuts a text that is longer than the
    /// agent's buffer.
    ///
    /// # Errors
    ///
    /// After an error the connection is unusable; connect again.
    pub async fn ack(&mut self, outcome: Result<(), &str>) -> Result<(), AckError> {
        self.owed = self.owed.checked_sub(1).ok_or(AckError::NothingOwed)?;
        let error = outcome.err().map(cut).unwrap_or_default().to_owned();
        let response = WorkloadResponse {
            payload: Some(workload_response::Payload::Ack(Ack { error })),
        };
        let packet = response.encode_to_vec();
        self.send(&packet).await.map_err(AckError::Socket)
    }

    async fn send(&self, packet: &[u8]) -> io::Result<()> {
        // A packet is sent whole or not at all, so the count carries no information.
        self.socket.send(packet).await.map(drop)
    }
}

/// Takes ownership of every descriptor, so that unexpected descriptors are closed instead of leaked.
fn own(ancillary: AncillaryMessageReader<'_>) -> Vec<OwnedFd> {
    let mut owned = Vec::new();
    for message in ancillary.into_messages() {
        if let OwnedAncillaryMessage::FileDescriptors(descriptors) = message {
            owned.extend(descriptors);
        }
    }
    owned
}

fn cut(text: &str) -> &str {
    text.get(..text.floor_char_boundary(MAX_ERROR_TEXT))
        .unwrap_or_default()
}
