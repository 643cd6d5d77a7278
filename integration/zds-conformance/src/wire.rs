//! Packets and descriptors over `SOCK_SEQPACKET`, with a deadline on everything.
//!
//! Nothing here knows what a packet should be: it tells what was there.

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

/// The hello of version 1.
pub const HELLO: &[u8] = b"\x08\x01";

/// A positive answer.
pub const ACK: &[u8] = b"\x0a\x00";

/// The largest packet that a request may be, in bytes.
pub const LONGEST: usize = 1024;

/// More than either side ever sends, in bytes: what is too long is seen whole.
const ROOM: usize = 256 * 1024;

/// How long the kernel may take to take a packet.
const SEND: Duration = Duration::from_secs(2);

/// How soon an ended connection says again that it has ended.
const AGAIN: Duration = Duration::from_millis(50);

/// One packet.
#[derive(Debug)]
pub struct Packet {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// The descriptors beside it.
    pub descriptors: Vec<OwnedFd>,
}

/// What there was to receive.
#[derive(Debug)]
pub enum Incoming {
    /// A packet, possibly an empty one.
    Packet(Packet),
    /// The end of the connection.
    End,
    /// Nothing in that time.
    Silence,
}

impl Incoming {
    /// For people.
    pub fn describe(&self) -> String {
        match self {
            Self::Packet(packet) => packet.describe(),
            Self::End => "the end of the connection".to_owned(),
            Self::Silence => "nothing".to_owned(),
        }
    }
}

impl Packet {
    /// For people: its first bytes, in hexadecimal, and its descriptors.
    pub fn describe(&self) -> String {
        let bytes = self.bytes.iter().take(24);
        let bytes: Vec<_> = bytes.map(|byte| format!("{byte:02x}")).collect();
        let (length, beside) = (self.bytes.len(), self.descriptors.len());
        let bytes = bytes.join(" ");
        format!("a packet of {length} bytes ({bytes}) with {beside} descriptors")
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct Connection {
    socket: UnixSeqpacket,
    runtime: Handle,
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    ///
    /// Nobody listens there, or nobody took the connection in that time.
    pub fn connect(runtime: &Handle, path: &Path, within: Duration) -> io::Result<Self> {
        let connecting = async { timeout(within, UnixSeqpacket::connect(path)).await };
        let socket = runtime.block_on(connecting).map_err(io::Error::from)??;
        let runtime = runtime.clone();
        Ok(Self { socket, runtime })
    }

    /// Waits for what comes.
    ///
    /// # Errors
    ///
    /// The socket failed.
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

    /// An empty packet looks like the end, but for this: the end comes again.
    async fn end_or(&self, packet: Packet) -> io::Result<Incoming> {
        match timeout(AGAIN, peek(&self.socket)).await {
            Ok(Ok(0)) if packet.descriptors.is_empty() => Ok(Incoming::End),
            _ => Ok(Incoming::Packet(packet)),
        }
    }

    /// Sends one packet.
    ///
    /// # Errors
    ///
    /// The other end has closed the connection or takes nothing.
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

    /// Sends no more, but still receives.
    ///
    /// # Errors
    ///
    /// The connection has ended.
    pub fn half_close(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Write)
    }

    /// The process at the other end, as it was when it connected or listened; `None` where it cannot be seen.
    pub fn peer(&self) -> Option<i32> {
        let pid = self.socket.peer_cred().ok()?.pid()?;
        (pid > 0).then_some(pid)
    }
}

/// Control messages are aligned like `size_t`.
#[repr(align(8))]
struct Control([u8; 512]);

/// One packet; `None` where the connection was reset, which is how it ends while something was unread.
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

/// A listening socket. Its path goes with it.
#[derive(Debug)]
pub struct Listener {
    listener: UnixSeqpacketListener,
    path: PathBuf,
    runtime: Handle,
}

impl Listener {
    /// Listens, in place of what was there before.
    ///
    /// # Errors
    ///
    /// The path cannot be used.
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

    /// Waits for a connection; `None` if there was none in that time.
    ///
    /// # Errors
    ///
    /// The socket failed.
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
        // It may be gone already.
        drop(fs::remove_file(&self.path));
    }
}

/// The bytes of a request.
pub fn encode(payload: Payload) -> Vec<u8> {
    let payload = Some(payload);
    WorkloadRequest { payload }.encode_to_vec()
}

/// An Add of a pod of that uid.
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

/// A Keep.
pub fn keep(uid: &str) -> Payload {
    let uid = uid.to_owned();
    Payload::Keep(KeepWorkload { uid })
}

/// A Del.
pub fn del(uid: &str) -> Payload {
    let uid = uid.to_owned();
    Payload::Del(DelWorkload { uid })
}

/// The end of the snapshot.
pub fn snapshot_sent() -> Payload {
    Payload::SnapshotSent(SnapshotSent {})
}

/// A request in a few words.
pub fn describe(payload: &Payload) -> String {
    match payload {
        Payload::Add(add) => format!("Add {}", add.uid),
        Payload::Keep(keep) => format!("Keep {}", keep.uid),
        Payload::Del(del) => format!("Del {}", del.uid),
        Payload::SnapshotSent(_) => "SnapshotSent".to_owned(),
    }
}

/// The bytes of a negative answer.
pub fn nack(error: &str) -> Vec<u8> {
    let error = error.to_owned();
    let payload = Some(workload_response::Payload::Ack(Ack { error }));
    WorkloadResponse { payload }.encode_to_vec()
}

/// An answer's error text, which is empty for success; `None` for what is no answer.
pub fn answer(bytes: &[u8]) -> Option<String> {
    let response = WorkloadResponse::decode(bytes).ok()?;
    let workload_response::Payload::Ack(ack) = response.payload?;
    Some(ack.error)
}
