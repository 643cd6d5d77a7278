//! Sends and receives packets with descriptors over `SOCK_SEQPACKET`, with deadlines and whatever the packets contain.

use std::{
    fs, io,
    net::Shutdown,
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

use prost::Message as _;
use tokio::{runtime::Handle, time::timeout};
use tokio_seqpacket::{
    UnixSeqpacket, UnixSeqpacketListener,
    ancillary::{AncillaryMessageWriter, OwnedAncillaryMessage},
};
use zds_client::proto::{
    Ack, AddWorkload, DelWorkload, KeepWorkload, SnapshotSent, WorkloadInfo, WorkloadRequest,
    WorkloadResponse, workload_request::Payload, workload_response,
};

/// The hello of version 1 of the protocol, as sent by every ztunnel.
pub const HELLO: &[u8] = b"\x08\x01";

pub const ACK: &[u8] = b"\x0a\x00";

/// The maximum size of a request, in bytes.
pub const MAX_REQUEST_BYTES: usize = 1024;

/// The size of the receive buffer, which holds oversized packets as a whole: neither side sends as many bytes.
const ROOM: usize = 256 * 1024;

/// The time for the kernel to accept a packet.
const SEND: Duration = Duration::from_secs(2);

/// An ended connection reports its end again within this time.
const AGAIN: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub struct Packet {
    pub bytes: Vec<u8>,
    pub descriptors: Vec<OwnedFd>,
}

#[derive(Debug)]
pub enum Incoming {
    /// A packet, which may be empty.
    Packet(Packet),
    End,
    Silence,
}

impl Incoming {
    pub fn describe(&self) -> String {
        match self {
            Self::Packet(packet) => packet.describe(),
            Self::End => "the end of the connection".to_owned(),
            Self::Silence => "nothing".to_owned(),
        }
    }
}

impl Packet {
    /// Describes the first bytes of the packet in hexadecimal, and the descriptors.
    pub fn describe(&self) -> String {
        let bytes = self.bytes.iter().take(24);
        let bytes: Vec<_> = bytes.map(|byte| format!("{byte:02x}")).collect();
        let (length, beside) = (self.bytes.len(), self.descriptors.len());
        let bytes = bytes.join(" ");
        format!("a packet of {length} bytes ({bytes}) with {beside} descriptors")
    }
}

#[derive(Debug)]
pub struct Connection {
    socket: UnixSeqpacket,
    runtime: Handle,
}

impl Connection {
    /// Connects to a socket within the given time.
    pub fn connect(runtime: &Handle, path: &Path, within: Duration) -> io::Result<Self> {
        let connecting = async { timeout(within, UnixSeqpacket::connect(path)).await };
        let socket = runtime.block_on(connecting).map_err(io::Error::from)??;
        let runtime = runtime.clone();
        Ok(Self { socket, runtime })
    }

    pub fn receive(&self, within: Duration) -> io::Result<Incoming> {
        self.runtime.block_on(async {
            match timeout(within, receive(&self.socket)).await {
                Err(_) => Ok(Incoming::Silence),
                Ok(packet) => match packet? {
                    Some(packet) if packet.bytes.is_empty() => self.end_or(packet).await,
                    Some(packet) => Ok(Incoming::Packet(packet)),
                    None => Ok(Incoming::End),
                },
            }
        })
    }

    /// Distinguishes the end from an empty packet: only the end is reported again on the next receive.
    async fn end_or(&self, packet: Packet) -> io::Result<Incoming> {
        match timeout(AGAIN, peek(&self.socket)).await {
            Ok(Ok(0)) if packet.descriptors.is_empty() => Ok(Incoming::End),
            _ => Ok(Incoming::Packet(packet)),
        }
    }

    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut room = [0; 512];
        let mut beside = AncillaryMessageWriter::new(&mut room);
        if !descriptors.is_empty() {
            beside.add_fds(descriptors)?;
        }
        self.runtime.block_on(async {
            let sending = self.socket.send_with_ancillary(bytes, &mut beside);
            timeout(SEND, sending)
                .await
                .map_err(io::Error::from)?
                .map(drop)
        })
    }

    /// Closes only the sending side of the connection.
    pub fn half_close(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Write)
    }

    /// Returns the pid of the other end at the time of its connect or listen; `None` if the pid is not visible.
    pub fn peer(&self) -> Option<i32> {
        let pid = self.socket.peer_cred().ok()?.pid()?;
        (pid > 0).then_some(pid)
    }
}

/// The control buffer, because control messages are aligned like `size_t`.
#[repr(align(8))]
struct Control([u8; 512]);

/// Receives a packet, or `None` if the connection was reset, as after a close with unread data.
async fn receive(socket: &UnixSeqpacket) -> io::Result<Option<Packet>> {
    let (mut bytes, mut control) = (vec![0; ROOM], Control([0; 512]));
    let received = socket.recv_with_ancillary(&mut bytes, &mut control.0).await;
    let (info, beside) = match received {
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
        received => received?,
    };
    let mut descriptors = Vec::new();
    for message in beside.into_messages() {
        if let OwnedAncillaryMessage::FileDescriptors(owned) = message {
            descriptors.extend(owned);
        }
    }
    bytes.truncate(info.bytes_read());
    Ok(Some(Packet { bytes, descriptors }))
}

async fn peek(socket: &UnixSeqpacket) -> io::Result<usize> {
    socket.peek(&mut [0; 1]).await.map(|info| info.bytes_read())
}

/// A listening socket; its path is removed on drop.
#[derive(Debug)]
pub struct Listener {
    listener: UnixSeqpacketListener,
    path: PathBuf,
    runtime: Handle,
}

impl Listener {
    /// Listens at the path, and replaces an existing file.
    pub fn bind(runtime: &Handle, path: &Path) -> io::Result<Self> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let within = runtime.enter();
        let listener = UnixSeqpacketListener::bind(path)?;
        drop(within);
        Ok(Self {
            listener,
            path: path.to_owned(),
            runtime: runtime.clone(),
        })
    }

    /// Accepts a connection; returns `None` if no connection arrives in time.
    pub fn accept(&mut self, within: Duration) -> io::Result<Option<Connection>> {
        let accepting = async { timeout(within, self.listener.accept()).await };
        let Ok(accepted) = self.runtime.block_on(accepting) else {
            return Ok(None);
        };
        let runtime = self.runtime.clone();
        accepted.map(|socket| Some(Connection { socket, runtime }))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // The removal fails if the path is gone already.
        drop(fs::remove_file(&self.path));
    }
}

pub fn encode(payload: Payload) -> Vec<u8> {
    let payload = Some(payload);
    WorkloadRequest { payload }.encode_to_vec()
}

pub fn add(uid: &str) -> Payload {
    let name: String = uid.chars().take(32).collect();
    Payload::Add(AddWorkload {
        uid: uid.to_owned(),
        workload_info: Some(WorkloadInfo {
            name: format!("name-of-{name}"),
            namespace: "conformance".to_owned(),
            service_account: "default".to_owned(),
        }),
    })
}

pub fn keep(uid: &str) -> Payload {
    let uid = uid.to_owned();
    Payload::Keep(KeepWorkload { uid })
}

pub fn del(uid: &str) -> Payload {
    let uid = uid.to_owned();
    Payload::Del(DelWorkload { uid })
}

pub fn snapshot_sent() -> Payload {
    Payload::SnapshotSent(SnapshotSent {})
}

pub fn describe(payload: &Payload) -> String {
    match payload {
        Payload::Add(add) => format!("Add {}", add.uid),
        Payload::Keep(keep) => format!("Keep {}", keep.uid),
        Payload::Del(del) => format!("Del {}", del.uid),
        Payload::SnapshotSent(_) => "SnapshotSent".to_owned(),
    }
}

pub fn nack(error: &str) -> Vec<u8> {
    let error = error.to_owned();
    let payload = Some(workload_response::Payload::Ack(Ack { error }));
    WorkloadResponse { payload }.encode_to_vec()
}

/// Returns the error text of an answer, which is empty for success; `None` if the bytes are no answer.
pub fn answer(bytes: &[u8]) -> Option<String> {
    let response = WorkloadResponse::decode(bytes).ok()?;
    let workload_response::Payload::Ack(ack) = response.payload?;
    Some(ack.error)
}
