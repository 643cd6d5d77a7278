//! A broker on a real socket, a netconfig that hands out descriptors, and scripted ztunnels.

use std::{
    fs::File,
    io::ErrorKind,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use inpod_proto::{
    netconfig::v1::{
        FetchNetnsFailure, FetchNetnsRequest, FetchNetnsResponse,
        fetch_netns_response::Result as Answer,
    },
    types::v1::Failure,
    zds::{WorkloadRequest, workload_request::Payload},
};
use inpod_service::peer::Setting;
use inpod_types::{NetnsId, Reason, Revision, SandboxRef, Workload, WorkloadInfo};
use nix::sys::socket::{MsgFlags, send};
use prost::Message as _;
use sendfd::SendWithFd as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{UnixListener, UnixStream},
    task::JoinHandle,
    time::{Instant, timeout},
};
use tokio_seqpacket::{UnixSeqpacket, ancillary::OwnedAncillaryMessage};
use ztunnel_broker::{
    admission, descriptors::Descriptors, hub::Hub, peer::Policy, session::SessionId, zds,
};

/// The limit for everything that is expected to happen.
pub(crate) const SOON: Duration = Duration::from_secs(5);

pub(crate) const ACK_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct Bench {
    pub(crate) hub: Arc<Hub>,
    pub(crate) netconfig: Arc<AtomicBool>,
    dir: tempfile::TempDir,
    ztunnels: JoinHandle<()>,
    tasks: Vec<JoinHandle<()>>,
}

impl Bench {
    pub(crate) fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let netconfig = Arc::new(AtomicBool::new(true));
        let hand_out = netconfig_at(&dir.path().join("netns.sock"), &netconfig);
        let hub = Hub::new(
            Descriptors::new(dir.path().join("netns.sock")),
            ACK_TIMEOUT,
            inpod_service::Readiness::default(),
        );
        let listener = zds::listen(&dir.path().join("ztunnel.sock")).unwrap();
        let serving = admission::serve(listener, Arc::clone(&hub), Policy::new(Setting::Uid));
        let fetching = Arc::clone(&hub);
        Self {
            hub,
            netconfig,
            ztunnels: tokio::spawn(async { match serving.await {} }),
            tasks: vec![
                hand_out,
                tokio::spawn(async move { match fetching.fetch_missing().await {} }),
            ],
            dir,
        }
    }

    /// A broker with a desired set and a ztunnel whose snapshot is complete.
    pub(crate) async fn live(all: Vec<Workload>) -> (Self, Ztunnel) {
        let bench = Self::start();
        bench.set(0, all);
        let ztunnel = bench.ztunnel().await;
        while !matches!(ztunnel.ack_next().await, Payload::SnapshotSent(_)) {}
        (bench, ztunnel)
    }

    pub(crate) fn socket(&self) -> std::path::PathBuf {
        self.dir.path().join("ztunnel.sock")
    }

    pub(crate) fn set(&self, revision: u64, all: Vec<Workload>) {
        self.hub.set(Revision(revision), all);
    }

    pub(crate) fn remove(&self, container: &str, revision: u64) {
        let removed = self.hub.state().remove(
            &sandbox(container),
            Revision(revision),
            Instant::now().into_std(),
        );
        removed.unwrap();
    }

    pub(crate) fn add(
        &self,
        workload: Workload,
        wait: Duration,
    ) -> JoinHandle<Result<SessionId, inpod_types::Failure>> {
        let hub = Arc::clone(&self.hub);
        let until = Instant::now() + wait;
        tokio::spawn(async move { hub.add(workload, until).await })
    }

    pub(crate) async fn ztunnel(&self) -> Ztunnel {
        let ztunnel = Ztunnel::connect(&self.socket()).await;
        ztunnel.send(b"\x08\x01").await;
        ztunnel
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.ztunnels.abort();
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// A ztunnel that does nothing by itself.
pub(crate) struct Ztunnel(UnixSeqpacket);

impl Ztunnel {
    pub(crate) async fn connect(socket: &Path) -> Self {
        Self(UnixSeqpacket::connect(socket).await.unwrap())
    }

    pub(crate) async fn send(&self, packet: &[u8]) {
        self.0.send(packet).await.unwrap();
    }

    /// Returns the next message and its descriptors without acknowledging it.
    pub(crate) async fn next(&self) -> (Payload, Vec<OwnedFd>) {
        self.within(SOON).await.expect("a message was due")
    }

    /// Returns `None` if there is none in that time.
    pub(crate) async fn within(&self, time: Duration) -> Option<(Payload, Vec<OwnedFd>)> {
        let packet = timeout(time, self.receive()).await.ok()?;
        let (bytes, fds) = packet.expect("the connection was to stay");
        let request = WorkloadRequest::decode(&*bytes).unwrap();
        Some((request.payload.unwrap(), fds))
    }

    pub(crate) async fn ack(&self) {
        self.send(b"\x0a\x00").await;
    }

    /// Sends two acknowledgements between which the broker cannot run, as it could while a task waits to send.
    pub(crate) fn ack_twice_at_once(&self) {
        for _ in 0..2 {
            let sent = send(self.0.as_raw_fd(), b"\x0a\x00", MsgFlags::MSG_DONTWAIT);
            assert_eq!(sent, Ok(2));
        }
    }

    pub(crate) async fn nack(&self, error: &str) {
        use inpod_proto::zds::{Ack, WorkloadResponse, workload_response};
        let ack = workload_response::Payload::Ack(Ack {
            error: error.into(),
        });
        self.send(&WorkloadResponse { payload: Some(ack) }.encode_to_vec())
            .await;
    }

    pub(crate) async fn ack_next(&self) -> Payload {
        let (payload, _) = self.next().await;
        self.ack().await;
        payload
    }

    /// Waits for the end of the connection, before which nothing may arrive.
    pub(crate) async fn hung_up(&self, time: Duration) -> bool {
        matches!(timeout(time, self.receive()).await, Ok(None))
    }

    async fn receive(&self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        #[repr(align(8))]
        struct Control([u8; 64]);
        let (mut bytes, mut control) = (vec![0; 1024], Control([0; 64]));
        let received = self.0.recv_with_ancillary(&mut bytes, &mut control.0).await;
        let (info, ancillary) = match received {
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
            received => received.unwrap(),
        };
        assert!(!info.truncated() && !info.ancillary_truncated());
        let mut fds = Vec::new();
        for message in ancillary.into_messages() {
            if let OwnedAncillaryMessage::FileDescriptors(received) = message {
                fds.extend(received);
            }
        }
        bytes.truncate(info.bytes_read());
        (!bytes.is_empty()).then_some((bytes, fds))
    }
}

/// Namespaces of this process that stand for those of pods.
const STAND_INS: [&str; 3] = ["net", "uts", "ipc"];

pub(crate) fn netns(number: usize) -> NetnsId {
    let stat = File::open(stand_in(number)).unwrap().metadata().unwrap();
    NetnsId {
        device: stat.dev(),
        inode: stat.ino(),
        cookie: 1,
    }
}

fn stand_in(number: usize) -> String {
    format!("/proc/self/ns/{}", STAND_INS[number])
}

/// Serves netns.sock while `on` is set.
pub(crate) fn netconfig_at(socket: &Path, on: &Arc<AtomicBool>) -> JoinHandle<()> {
    let claims = UnixListener::bind(socket).unwrap();
    tokio::spawn(hand_out(claims, Arc::clone(on)))
}

/// netconfig's side of netns.sock; unless `on` is set, no claim is known.
async fn hand_out(claims: UnixListener, on: Arc<AtomicBool>) {
    loop {
        let (mut stream, _) = claims.accept().await.unwrap();
        let length = stream.read_u32().await.unwrap();
        let mut request = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut request).await.unwrap();
        let request = FetchNetnsRequest::decode(&*request).unwrap();
        assert!(request.sandbox.is_some());
        let wanted = request.netns.unwrap();
        let found = (0..STAND_INS.len()).find(|n| netns(*n).inode == wanted.inode);
        match found.filter(|_| on.load(Ordering::Relaxed)) {
            Some(number) => {
                answer(&mut stream, Answer::Netns(wanted)).await;
                let file = File::open(stand_in(number)).unwrap();
                stream
                    .into_std()
                    .unwrap()
                    .send_with_fd(&[0], &[file.as_raw_fd()])
                    .unwrap();
            }
            None => answer(&mut stream, Answer::Failure(unknown_claim())).await,
        }
    }
}

fn unknown_claim() -> FetchNetnsFailure {
    let failure = Failure {
        reason: Reason::ClaimUnknown.number(),
        ..Failure::default()
    };
    FetchNetnsFailure {
        failure: Some(failure),
        message: "no claim is held".into(),
    }
}

async fn answer(stream: &mut UnixStream, result: Answer) {
    let message = FetchNetnsResponse {
        result: Some(result),
    }
    .encode_to_vec();
    stream
        .write_u32(u32::try_from(message.len()).unwrap())
        .await
        .unwrap();
    stream.write_all(&message).await.unwrap();
}

pub(crate) fn sandbox(container: &str) -> SandboxRef {
    SandboxRef {
        network_name: "net".parse().unwrap(),
        container_id: container.parse().unwrap(),
        ifname: "eth0".parse().unwrap(),
    }
}

pub(crate) fn workload(container: &str, pod: &str, number: usize, revision: u64) -> Workload {
    Workload {
        sandbox: sandbox(container),
        uid: pod.parse().unwrap(),
        info: WorkloadInfo {
            name: pod.parse().unwrap(),
            namespace: "default".parse().unwrap(),
            service_account: "sa".parse().unwrap(),
        },
        netns: Some(netns(number)),
        revision: Revision(revision),
    }
}

pub(crate) fn describe(payload: &Payload) -> String {
    match payload {
        Payload::Add(add) => {
            assert!(add.workload_info.is_some());
            format!("add {}", add.uid)
        }
        Payload::Keep(keep) => format!("keep {}", keep.uid),
        Payload::Del(del) => format!("del {}", del.uid),
        Payload::SnapshotSent(_) => "snapshot sent".to_owned(),
    }
}
