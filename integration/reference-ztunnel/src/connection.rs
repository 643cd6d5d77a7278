//! A connection to the agent, with the faults below the requests.

use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;

use prost::Message as _;
use tokio_seqpacket::UnixSeqpacket;
use zds_client::proto::WorkloadRequest;
use zds_client::{
    AckError, Client, ConnectError, DEFAULT_RECEIVE_BUFFER, ReadError, Received, RecvError,
};

use crate::options::Fault;

/// The hello of version 1, and an answer without an error, in their form on the wire.
const HELLO: &[u8] = b"\x08\x01";
const ACK: &[u8] = b"\x0a\x00";

pub(crate) struct Connection {
    client: Client,
    /// A second handle of the socket, for faults that the client prevents.
    wire: Option<UnixSeqpacket>,
}

impl Connection {
    pub(crate) async fn open(path: &Path, fault: Fault) -> Result<Self, ConnectError> {
        let options = zds_client::Options::default().receive_buffer(buffer(fault));
        let Some(hello) = raw_hello(fault) else {
            let client = options.connect(path).await?;
            return Ok(Self { client, wire: None });
        };
        let connected = UnixSeqpacket::connect(path).await;
        let socket = connected.map_err(ConnectError::Dial)?;
        let wire = socket.as_fd().try_clone_to_owned();
        let wire = wire.and_then(UnixSeqpacket::try_from);
        let wire = wire.map_err(ConnectError::Dial)?;
        wire.send(hello).await.map_err(ConnectError::Hello)?;
        Ok(Self {
            client: options.attach(socket),
            wire: Some(wire),
        })
    }

    pub(crate) async fn recv(&mut self, fault: Fault) -> Result<Option<Received>, RecvError> {
        let has_unknown_fields = fault == Fault::StrictFields && self.peek_unknown_fields().await;
        match self.client.recv().await {
            Ok(Some(_)) if has_unknown_fields => {
                Err(ReadError::from(io::Error::other("unknown field")).into())
            }
            received => received,
        }
    }

    /// Waits for a packet, leaves the packet in the socket, and returns whether the packet has unknown fields.
    async fn peek_unknown_fields(&self) -> bool {
        let Some(wire) = &self.wire else {
            return false;
        };
        let mut buffer = [0; DEFAULT_RECEIVE_BUFFER];
        let length = wire.peek(&mut buffer).await.map(|it| it.bytes_read());
        let packet = buffer.get(..length.unwrap_or_default()).unwrap_or_default();
        WorkloadRequest::decode(packet).is_ok_and(|request| request.encode_to_vec() != packet)
    }

    pub(crate) async fn ack(&mut self, outcome: Result<(), &str>) -> Result<(), AckError> {
        self.client.ack(outcome).await
    }

    /// Sends an answer that no request asked for.
    pub(crate) async fn send_unasked_ack(&self) {
        if let Some(wire) = &self.wire {
            // An error is ignored, because the next request notices a closed connection.
            drop(wire.send(ACK).await);
        }
    }
}

fn buffer(fault: Fault) -> usize {
    if fault == Fault::SmallBuffer {
        512
    } else if fault == Fault::LargeBuffer {
        4096
    } else {
        DEFAULT_RECEIVE_BUFFER
    }
}

/// Returns the hello to send without the client, for faults that need the socket.
fn raw_hello(fault: Fault) -> Option<&'static [u8]> {
    if fault == Fault::WrongVersion {
        return Some(b"\x08\x02");
    }
    if fault == Fault::HelloWithUnknownField {
        return Some(b"\x08\x01\x10\x05");
    }
    matches!(
        fault,
        Fault::Keepalive | Fault::AckTwice | Fault::StrictFields
    )
    .then_some(HELLO)
}
