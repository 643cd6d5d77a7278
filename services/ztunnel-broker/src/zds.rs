//! The ZDS socket and the packets of each session. [`crate::session`] decides the messages, [`crate::peer`] the
//! permission to connect, and `admission` the number and rate of connections.

use std::{
    convert::Infallible,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use inpod_proto::zds::{Version, WorkloadResponse, ZdsHello, workload_response};
use inpod_service::uds::{self, BindError, DirectoryAccess};
use inpod_types::{PodUid, with_causes};
use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, SockType, recv},
};
use prost::Message as _;
use tokio::time::Instant;
use tokio_seqpacket::{UnixSeqpacket, UnixSeqpacketListener, ancillary::AncillaryMessageWriter};

use crate::{
    admission::{self, Admission},
    hub::Hub,
    message::Message,
    nack::Nack,
    peer::{Peer, Policy},
    session::{Answered, SessionEnd},
    sessions::SessionId,
};

/// Stock ztunnel's negative responses carry a backtrace of up to 1.5 KB.
const MAX_RESPONSE_BYTES: usize = 64 * 1024;

/// The kernel accepts a packet at once, because at most one packet is unread.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("cannot listen on {}", .path.display())]
    Listen { path: PathBuf, source: io::Error },
}

#[derive(Debug, thiserror::Error)]
pub enum ZdsError {
    #[error(transparent)]
    Session(#[from] SessionEnd),
    /// An empty packet looks the same as a closed connection.
    #[error("it closed the connection")]
    Disconnected,
    #[error("it sent a packet of more than {MAX_RESPONSE_BYTES} bytes, or one with descriptors")]
    Truncated,
    #[error("it sent an invalid response")]
    InvalidResponse,
    #[error("its first packet was not a ZdsHello of version 1")]
    InvalidHello,
    #[error("cannot receive from it")]
    Receive(#[source] io::Error),
    #[error("cannot send to it")]
    Send(#[source] io::Error),
    #[error("it did not read a packet within {} s", SEND_TIMEOUT.as_secs())]
    SendTimeout,
}

#[derive(Debug)]
pub struct Listener {
    listener: UnixSeqpacketListener,
    path: PathBuf,
    policy: Policy,
}

impl Listener {
    /// Listens on a socket in a directory, both accessible only to this user, and admits every process of this user.
    /// Replaces a stale socket, but not a socket that is being served.
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        let lock = uds::prepare(path, SockType::SeqPacket)?;
        restrict_directory(path)?;
        let listen = |source| ListenError::Listen {
            path: path.to_owned(),
            source,
        };
        let listener = UnixSeqpacketListener::bind_with_backlog(path, admission::LISTEN_BACKLOG);
        let listener = listener.map_err(listen)?;
        drop(lock);
        uds::restrict_socket(path)?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            policy: Policy::same_uid(),
        })
    }

    #[must_use]
    pub fn admitting(self, policy: Policy) -> Self {
        Self { policy, ..self }
    }

    /// Serves all connections. Dropping the future closes them without sending anything, so ztunnels keep serving their
    /// pods.
    pub async fn serve(self, hub: Arc<Hub>) -> Infallible {
        tracing::info!(socket = %self.path.display(), "Listening for ztunnel");
        Admission::new(hub, self.policy).serve(self.listener).await
    }
}

fn restrict_directory(path: &Path) -> Result<(), BindError> {
    let (mode, what) = match uds::restrict_directory(path)? {
        DirectoryAccess::AlreadyPrivate => return Ok(()),
        DirectoryAccess::Restricted(mode) => (
            mode,
            "Restricted the directory of the ZDS socket to its owner",
        ),
        DirectoryAccess::Shared(mode) => (
            mode,
            "The directory of the ZDS socket is accessible to others and holds other files; use a directory of its own",
        ),
    };
    let mode = format_args!("{mode:o}");
    tracing::warn!(socket = %path.display(), %mode, "{what}");
    Ok(())
}

pub(crate) async fn serve_session(socket: UnixSeqpacket, hub: &Hub, peer: Peer) {
    let id = hub.connect(peer.clone());
    let guard = SessionGuard { hub, id };
    let Peer {
        pid,
        cgroup,
        pod_uid,
    } = &peer;
    let (cgroup, pod) = (cgroup.as_deref(), pod_uid.as_ref().map(PodUid::as_str));
    tracing::info!(session = %id, peer.pid = pid, peer.cgroup = cgroup, peer.pod.uid = pod, "ztunnel connected");
    let Err(error) = exchange_messages(&socket, hub, id, &peer).await;
    let cause = with_causes(&error);
    tracing::warn!(session = %id, peer.pid = pid, error = cause, "ztunnel session ended");
    hub.disconnect(id, &cause);
    drop(guard);
}

/// Removes the session if its task is dropped. A second removal changes nothing.
struct SessionGuard<'a> {
    hub: &'a Hub,
    id: SessionId,
}

impl Drop for SessionGuard<'_> {
    fn drop(&mut self) {
        self.hub.disconnect(self.id, "its connection was closed");
    }
}

/// Exchanges the messages of a session. At most one request is in flight at any time.
async fn exchange_messages(
    socket: &UnixSeqpacket,
    hub: &Hub,
    id: SessionId,
    peer: &Peer,
) -> Result<Infallible, ZdsError> {
    let mut changes = hub.changes();
    let mut buffer = vec![0; MAX_RESPONSE_BYTES];
    let mut greeted = false;
    let mut asked = None;
    loop {
        if greeted && asked.is_none() {
            check_no_unsolicited(socket, &mut buffer)?;
        }
        if let Some(message) = hub.next(id) {
            asked = Some((Instant::now(), message.verb()));
            if let Err(error) = send(socket, &message).await {
                hub.on_send_failed(id);
                return Err(error);
            }
            log_message(id, peer, &message);
        }
        let wake_at = hub.wake_at(id);
        tokio::select! {
            // Prefer a response that has arrived over an expired deadline: the broker itself may have been stalled.
            biased;
            packet = receive(socket, &mut buffer) => {
                let packet = packet?;
                if greeted {
                    let answer = parse_answer(packet)?;
                    let nack = answer.clone().err();
                    if let Some((at, verb)) = asked.take() {
                        hub.metrics().answered(verb, nack.as_ref(), at.elapsed());
                    }
                    let answered = hub.ack(id, answer)?;
                    log_refusal(id, &answered, nack.as_ref());
                } else {
                    parse_hello(packet)?;
                    hub.hello(id);
                    greeted = true;
                }
            }
            // The hub outlives its sessions, so waiting for changes never fails.
            _ = changes.changed() => {}
            () = sleep_until(wake_at) => hub.check_deadline(id)?,
        }
    }
}

/// Checks that no packet has arrived without a request in flight, because such a packet would be credited to the next
/// request.
fn check_no_unsolicited(socket: &UnixSeqpacket, buffer: &mut [u8]) -> Result<(), ZdsError> {
    // The call asks the kernel directly: tokio asks only after a notification that the socket is readable.
    match recv(socket.as_raw_fd(), buffer, MsgFlags::MSG_DONTWAIT) {
        Err(Errno::EAGAIN) => Ok(()),
        Err(error) => Err(ZdsError::Receive(error.into())),
        Ok(0) => Err(ZdsError::Disconnected),
        Ok(_) => Err(SessionEnd::Unsolicited.into()),
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

async fn send(socket: &UnixSeqpacket, message: &Message) -> Result<(), ZdsError> {
    let bytes = message.encode();
    let mut buffer = [0; 64];
    let mut ancillary = AncillaryMessageWriter::new(&mut buffer);
    if let Some(descriptor) = message.descriptor() {
        let added = ancillary.add_fds([descriptor]);
        added.map_err(|error| ZdsError::Send(error.into()))?;
    }
    let sending = socket.send_with_ancillary(&bytes, &mut ancillary);
    let sent = tokio::time::timeout(SEND_TIMEOUT, sending).await;
    sent.map_err(|_| ZdsError::SendTimeout)?
        .map(|_| ())
        .map_err(ZdsError::Send)
}

async fn receive<'a>(socket: &UnixSeqpacket, buffer: &'a mut [u8]) -> Result<&'a [u8], ZdsError> {
    let info = socket.recv(buffer).await.map_err(ZdsError::Receive)?;
    if info.truncated() || info.ancillary_truncated() {
        return Err(ZdsError::Truncated);
    }
    match buffer.get(..info.bytes_read()) {
        Some([]) | None => Err(ZdsError::Disconnected),
        Some(packet) => Ok(packet),
    }
}

fn parse_hello(packet: &[u8]) -> Result<(), ZdsError> {
    match ZdsHello::decode(packet) {
        Ok(hello) if hello.version() == Version::V1 => Ok(()),
        Ok(_) | Err(_) => Err(ZdsError::InvalidHello),
    }
}

fn parse_answer(packet: &[u8]) -> Result<Result<(), Nack>, ZdsError> {
    match WorkloadResponse::decode(packet).map(|response| response.payload) {
        Ok(Some(workload_response::Payload::Ack(ack))) => Ok(Nack::parse(&ack.error)),
        Ok(None) | Err(_) => Err(ZdsError::InvalidResponse),
    }
}

/// Logs a sent message; an Add also goes to the audit log, with the receiving process and the netns.
fn log_message(session: SessionId, peer: &Peer, message: &Message) {
    let pid = peer.pid;
    let Some(uid) = message.uid() else {
        tracing::info!(%session, peer.pid = pid, "Ended the snapshot");
        return;
    };
    if let (Some(descriptor), Some(info)) = (message.descriptor(), message.info()) {
        let pod = format_args!("{}/{}", info.namespace, info.name);
        let netns = descriptor.netns();
        let (cgroup, of) = (peer.cgroup.as_deref(), peer.pod_uid.as_ref());
        let of = of.map(PodUid::as_str);
        tracing::info!(target: "audit", %session, peer.pid = pid, peer.cgroup = cgroup, peer.pod.uid = of, %pod, pod.uid = %uid, %netns, "Gave a netns to ztunnel");
    } else {
        tracing::info!(%session, peer.pid = pid, pod.uid = %uid, verb = message.verb(), "Sent a message to ztunnel");
    }
}

/// Logs a refusal at warning level, because an operator has to examine a pod that ztunnel cannot start.
fn log_refusal(session: SessionId, answered: &Answered, nack: Option<&Nack>) {
    if let (Some((uid, sandbox)), Some(nack)) = (answered, nack) {
        let (kind, error) = (nack.kind, &nack.message);
        tracing::warn!(%session, pod.uid = %uid, %sandbox, ?kind, ?error, "ztunnel refused a workload");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_is_no_answer_and_an_answer_no_hello() {
        assert!(parse_hello(b"\x08\x01").is_ok());
        assert!(matches!(
            parse_hello(b"\x0a\x00"),
            Err(ZdsError::InvalidHello)
        ));
        assert!(matches!(
            parse_hello(b"\x08\x02"),
            Err(ZdsError::InvalidHello)
        ));
        assert_eq!(parse_answer(b"\x0a\x00").unwrap(), Ok(()));
        assert!(matches!(
            parse_answer(b"\x08\x01"),
            Err(ZdsError::InvalidResponse)
        ));
        assert!(matches!(
            parse_answer(b"\xff"),
            Err(ZdsError::InvalidResponse)
        ));
    }
}
