//! Measures ZDS without an agent: a packet with a descriptor to the reference ztunnel, and the answer.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use inpod_linux::Netns;
use inpod_proto::zds::{
    AddWorkload, DelWorkload, SnapshotSent, WorkloadInfo, WorkloadRequest,
    workload_request::Payload,
};
use integration::{Node, Pod};
use prost::Message as _;
use tokio::time::timeout;
use tokio_seqpacket::{UnixSeqpacket, UnixSeqpacketListener, ancillary::AncillaryMessageWriter};

const TIMEOUT: Duration = Duration::from_secs(20);

/// A bare server of ZDS, which sends a packet and receives ztunnel's answer.
pub(crate) struct Bare {
    socket: UnixSeqpacket,
    pub(crate) node: Node,
}

impl Bare {
    pub(crate) async fn connect() -> anyhow::Result<Self> {
        let node = Node::new()?;
        let path = node.zds_socket();
        fs::create_dir_all(path.parent().context("a directory")?)?;
        let mut listener = UnixSeqpacketListener::bind(&path)?;
        node.start_ztunnel(&[])?;
        let socket = timeout(TIMEOUT, listener.accept()).await??;
        timeout(TIMEOUT, socket.recv(&mut [0; 1024])).await??;
        let bare = Self { socket, node };
        bare.send(Payload::SnapshotSent(SnapshotSent {}), None)
            .await?;
        Ok(bare)
    }

    async fn send(&self, payload: Payload, netns: Option<&Netns>) -> anyhow::Result<Duration> {
        let packet = WorkloadRequest {
            payload: Some(payload),
        };
        let packet = packet.encode_to_vec();
        let mut buffer = [0; 64];
        let mut ancillary = AncillaryMessageWriter::new(&mut buffer);
        if let Some(netns) = netns {
            ancillary.add_fds([netns])?;
        }
        let started = Instant::now();
        let sending = self.socket.send_with_ancillary(&packet, &mut ancillary);
        timeout(TIMEOUT, sending).await??;
        let mut answer = [0; 2048];
        let received = timeout(TIMEOUT, self.socket.recv(&mut answer)).await??;
        ensure!(received.bytes_read() == 2, "an acknowledgement");
        Ok(started.elapsed())
    }

    /// Hands a pod over to ztunnel and takes the pod back; returns both times.
    pub(crate) async fn round_trips(&self, pod: &Pod) -> anyhow::Result<[Duration; 2]> {
        let uid = pod.spec.uid.clone();
        let add = AddWorkload {
            uid: uid.clone(),
            workload_info: Some(WorkloadInfo {
                service_account: "default".to_owned(),
                name: pod.spec.name.clone(),
                namespace: pod.spec.namespace.clone(),
            }),
        };
        Ok([
            self.send(Payload::Add(add), Some(&pod.netns)).await?,
            self.send(Payload::Del(DelWorkload { uid }), None).await?,
        ])
    }
}
