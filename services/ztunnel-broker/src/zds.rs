//! The ZDS socket and the packets of each session. [`crate::session`] decides the messages, [`crate::peer`] the
//! permission to connect, and `admission` the number and rate of connections.

use std::{convert::Infallible, path::Path, time::Duration};

use anyhow::{Context as _, bail};
use inpod_proto::zds::{Version, WorkloadResponse, ZdsHello, workload_response};
use inpod_service::uds;
use inpod_types::PodUid;
use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, SockType, recv},
};
use prost::Message as _;
use tokio::time::Instant;
use tokio_seqpacket::{UnixSeqpacket, UnixSeqpacketListener, ancillary::AncillaryMessageWriter};

use crate::{
    hub::{Hub, now},
    message::Message,
    nack::Nack,
    peer::Peer,
    session::{SessionEnd, SessionId},
};

/// Connections queued by the kernel. A ztunnel that finds the queue full retries with growing delays of at most 15 s.
pub(crate) const LISTEN_BACKLOG: i32 = 1024;

/// Stock ztunnel's negative responses carry a backtrace of up to 1.5 KB.
const MAX_RESPONSE_BYTES: usize = 64 * 1024;

/// The kernel accepts a packet at once, because at most one packet is unread.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// An empty packet looks the same as a closed connection.
const DISCONNECTED: &str = "it closed the connection";
const CANNOT_RECEIVE: &str = "cannot receive from it";

/// Listens on a socket in a directory, both accessible only to this user. Replaces a stale socket, but not a socket that
/// is being served.
///
/// # Errors
///
/// If the socket is served, its place is not safe, or the kernel refuses.
pub fn listen(path: &Path) -> anyhow::Result<UnixSeqpacketListener> {
    let lock = uds::prepare(path, SockType::SeqPacket)?;
    uds::restrict_directory(path)?;
    let listener = UnixSeqpacketListener::bind_with_backlog(path, LISTEN_BACKLOG);
    let listener = listener.with_context(|| format!("cannot listen on {}", path.display()))?;
    drop(lock);
    uds::restrict_socket(path)?;
    tracing::info!(socket = %path.display(), "Listening for ztunnel");
    Ok(listener)
}

pub(crate) async fn serve_session(socket: UnixSeqpacket, hub: &Hub, peer: Peer) {
    let id = hub.state().connect(peer.clone(), now());
    let (cgroup, pod) = (
        peer.cgroup.as_deref(),
        peer.pod_uid.as_ref().map(PodUid::as_str),
    );
    tracing::info!(session = %id, peer.pid = peer.pid, peer.cgroup = cgroup, peer.pod.uid = pod, "ztunnel connected");
    let Err(error) = exchange_messages(&socket, hub, id, &peer).await;
    let cause = format!("{error:#}");
    tracing::warn!(session = %id, peer.pid = peer.pid, error = cause, "ztunnel session ended");
    hub.state().disconnect(id, &cause, now());
}

/// A message whose response is awaited.
struct Asked {
    at: Instant,
    verb: &'static str,
    pod: Option<String>,
}

/// Exchanges the messages of a session. At most one request is in flight at any time.
async fn exchange_messages(
    socket: &UnixSeqpacket,
    hub: &Hub,
    id: SessionId,
    peer: &Peer,
) -> anyhow::Result<Infallible> {
    let mut changes = hub.state().changes();
    let mut buffer = vec![0; MAX_RESPONSE_BYTES];
    let mut greeted = false;
    let mut asked = None;
    loop {
        if greeted && asked.is_none() {
            check_no_unsolicited(socket, &mut buffer)?;
        }
        let (message, wake_at) = hub.state().next(id, now());
        if let Some(message) = message {
            asked = Some(Asked {
                at: Instant::now(),
                verb: message.verb(),
                pod: message.uid().map(str::to_owned),
            });
            if let Err(error) = send(socket, &message).await {
                hub.state().on_send_failed(id);
                return Err(error.context("cannot send to it"));
            }
            log_message(id, peer, &message);
        }
        tokio::select! {
            // Prefer a response that has arrived over an expired deadline: the broker itself may have been stalled.
            biased;
            packet = receive(socket, &mut buffer) => {
                let packet = packet?;
                if greeted {
                    let answer = parse_answer(packet)?;
                    if let Some(asked) = asked.take() {
                        let nack = answer.as_ref().err();
                        hub.metrics().answered(asked.verb, nack, asked.at.elapsed());
                        log_refusal(id, &asked, nack);
                    }
                    hub.state().ack(id, answer, now())?;
                } else {
                    parse_hello(packet)?;
                    hub.state().hello(id, now());
                    greeted = true;
                }
            }
            // The hub outlives its sessions, so waiting for changes never fails.
            _ = changes.changed() => {}
            () = sleep_until(wake_at) => hub.state().check_deadline(id, now())?,
        }
    }
}

/// Checks that no packet has arrived without a request in flight, because such a packet would be credited to the next
/// request.
fn check_no_unsolicited(socket: &UnixSeqpacket, buffer: &mut [u8]) -> anyhow::Result<()> {
    // The call asks the kernel directly: tokio asks only after a notification that the socket is readable.
    match recv(socket.as_raw_fd(), buffer, MsgFlags::MSG_DONTWAIT) {
        Err(Errno::EAGAIN) => Ok(()),
        Err(error) => Err(error).context(CANNOT_RECEIVE),
        Ok(0) => bail!(DISCONNECTED),
        Ok(_) => Err(SessionEnd::Unsolicited.into()),
    }
}

async fn sleep_until(at: Option<std::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

async fn send(socket: &UnixSeqpacket, message: &Message) -> anyhow::Result<()> {
    let bytes = message.encode();
    let mut buffer = [0; 64];
    let mut ancillary = AncillaryMessageWriter::new(&mut buffer);
    if let Some(descriptor) = message.descriptor() {
        ancillary.add_fds([descriptor])?;
    }
    let sending = socket.send_with_ancillary(&bytes, &mut ancillary);
    let sent = tokio::time::timeout(SEND_TIMEOUT, sending).await;
    let seconds = SEND_TIMEOUT.as_secs();
    sent.with_context(|| format!("it did not read a packet within {seconds} s"))??;
    Ok(())
}

async fn receive<'a>(socket: &UnixSeqpacket, buffer: &'a mut [u8]) -> anyhow::Result<&'a [u8]> {
    let info = socket.recv(buffer).await.context(CANNOT_RECEIVE)?;
    if info.truncated() || info.ancillary_truncated() {
        bail!("it sent a packet of more than {MAX_RESPONSE_BYTES} bytes, or one with descriptors");
    }
    match buffer.get(..info.bytes_read()) {
        Some([]) | None => bail!(DISCONNECTED),
        Some(packet) => Ok(packet),
    }
}

fn parse_hello(packet: &[u8]) -> anyhow::Result<()> {
    match ZdsHello::decode(packet) {
        Ok(hello) if hello.version() == Version::V1 => Ok(()),
        Ok(_) | Err(_) => bail!("its first packet was not a ZdsHello of version 1"),
    }
}

fn parse_answer(packet: &[u8]) -> anyhow::Result<Result<(), Nack>> {
    match WorkloadResponse::decode(packet).map(|response| response.payload) {
        Ok(Some(workload_response::Payload::Ack(ack))) => Ok(Nack::parse(&ack.error)),
        Ok(None) | Err(_) => bail!("it sent an invalid response"),
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
fn log_refusal(session: SessionId, asked: &Asked, nack: Option<&Nack>) {
    if let (Some(uid), Some(nack)) = (&asked.pod, nack) {
        let (kind, error) = (nack.kind, &nack.message);
        tracing::warn!(%session, pod.uid = uid, ?kind, ?error, "ztunnel refused a workload");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_is_no_answer_and_an_answer_no_hello() {
        assert!(parse_hello(b"\x08\x01").is_ok());
        assert!(parse_hello(b"\x0a\x00").is_err());
        assert!(parse_hello(b"\x08\x02").is_err());
        assert_eq!(parse_answer(b"\x0a\x00").unwrap(), Ok(()));
        assert!(parse_answer(b"\x08\x01").is_err());
        assert!(parse_answer(b"\xff").is_err());
    }
}
