//! The peers around the broker: a ztunnel that answers at once, and a bare server of packets.

use std::{
    fs::File,
    path::Path,
    process::{Child, Command},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use inpod_proto::zds::{AddWorkload, WorkloadInfo, WorkloadRequest, workload_request::Payload};
use prost::Message as _;
use tokio::time::timeout;
use tokio_seqpacket::{UnixSeqpacket, UnixSeqpacketListener, ancillary::AncillaryMessageWriter};
use zds_client::Client;

pub(super) const TIMEOUT: Duration = Duration::from_secs(20);

/// The argument with which the bench executes itself as a ztunnel.
pub(crate) const ZTUNNEL: &str = "ztunnel";

/// Acknowledges every packet at once, until the agent is gone for good.
pub(crate) fn ztunnel(socket: &Path) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        while let Ok(mut client) = Client::connect(socket).await {
            while let Ok(Some(received)) = client.recv().await {
                // A ztunnel closes the descriptor once its listeners are open.
                drop(received);
                client.ack(Ok(())).await?;
            }
        }
        Ok(())
    })
}

#[derive(Debug)]
pub(super) struct Running(Child);

impl Running {
    pub(super) fn start(command: &mut Command) -> anyhow::Result<Self> {
        let child = command.spawn();
        child.map(Self).with_context(|| format!("{command:?}"))
    }

    pub(super) fn ztunnel(socket: &Path) -> anyhow::Result<Self> {
        Self::start(
            Command::new(std::env::current_exe()?)
                .arg(ZTUNNEL)
                .arg(socket),
        )
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A server that only sends a packet and receives the answer.
#[derive(Debug)]
pub(super) struct Bare {
    socket: UnixSeqpacket,
    netns: File,
    packet: Vec<u8>,
    _ztunnel: Running,
    _dir: tempfile::TempDir,
}

impl Bare {
    pub(super) async fn connect() -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("ztunnel.sock");
        let mut listener = UnixSeqpacketListener::bind(&path)?;
        let ztunnel = Running::ztunnel(&path)?;
        let socket = timeout(TIMEOUT, listener.accept()).await??;
        timeout(TIMEOUT, socket.recv(&mut [0; 1024])).await??;
        Ok(Self {
            socket,
            netns: File::open("/proc/self/ns/net")?,
            packet: packet(),
            _ztunnel: ztunnel,
            _dir: dir,
        })
    }

    pub(super) async fn round_trip(&mut self) -> anyhow::Result<Duration> {
        let started = Instant::now();
        let mut buffer = [0; 64];
        let mut ancillary = AncillaryMessageWriter::new(&mut buffer);
        ancillary.add_fds([&self.netns])?;
        let sending = self
            .socket
            .send_with_ancillary(&self.packet, &mut ancillary);
        timeout(TIMEOUT, sending).await??;
        let mut answer = [0; 1024];
        let received = timeout(TIMEOUT, self.socket.recv(&mut answer)).await??;
        ensure!(received.bytes_read() == 2, "an acknowledgement");
        Ok(started.elapsed())
    }
}

fn packet() -> Vec<u8> {
    let add = AddWorkload {
        uid: "11111111-2222-3333-4444-555555555555".to_owned(),
        workload_info: Some(WorkloadInfo {
            name: "pod-1".to_owned(),
            namespace: "default".to_owned(),
            service_account: "default".to_owned(),
        }),
    };
    let payload = Some(Payload::Add(add));
    WorkloadRequest { payload }.encode_to_vec()
}
