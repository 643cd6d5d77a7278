//! The broker under test, with callers, a ztunnel, and a substitute for netconfig.

use std::{
    fs::{self, File},
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use inpod_proto::{
    netconfig::v1::{FetchNetnsRequest, FetchNetnsResponse, fetch_netns_response},
    types::v1::{NetnsId, SandboxRef, WorkloadInfo},
    ztunnelbroker::v1::{
        AddWorkloadRequest, ListWorkloadsRequest, RemoveWorkloadRequest, SessionPhase,
        SetWorkloadsRequest, WatchSessionsRequest, Workload, watch_sessions_response::Event,
        ztunnel_broker_service_client::ZtunnelBrokerServiceClient,
    },
};
use prost::Message as _;
use sendfd::SendWithFd as _;
use tokio::{
    io::AsyncReadExt as _,
    net::{UnixListener, UnixStream},
    task::{JoinHandle, JoinSet},
    time::timeout,
};
use tonic::{Request, transport::Channel};

use super::peers::{Running, TIMEOUT};

#[derive(Debug)]
pub(super) struct Subject {
    client: ZtunnelBrokerServiceClient<Channel>,
    instance_id: String,
    revision: AtomicU64,
    netconfig: JoinHandle<()>,
    ztunnel: Running,
    broker: Running,
    workloads: u64,
    dir: tempfile::TempDir,
}

impl Drop for Subject {
    fn drop(&mut self) {
        self.netconfig.abort();
    }
}

impl Subject {
    pub(super) async fn with(workloads: u64, program: &Path) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let netns_socket = dir.path().join("netns/netns.sock");
        fs::create_dir(dir.path().join("netns"))?;
        let netconfig = tokio::spawn(hand_out(UnixListener::bind(&netns_socket)?));
        let broker = start(program, dir.path())?;
        let channel = inpod_service::channel(&inpod_service::socket(dir.path(), "ztunnel-broker"));
        let mut client =
            ZtunnelBrokerServiceClient::new(channel).max_decoding_message_size(64 * 1024 * 1024);
        let instance_id = instance_id(&mut client).await?;
        let ztunnel = Running::ztunnel(&dir.path().join("ztunnel.sock"))?;
        let subject = Self {
            client,
            instance_id,
            revision: AtomicU64::new(workloads),
            netconfig,
            ztunnel,
            broker,
            workloads,
            dir,
        };
        subject.set_again().await?;
        subject.live().await?;
        Ok(subject)
    }

    fn next(&self) -> u64 {
        self.revision.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Sends the whole set, and returns the time of the call.
    pub(super) async fn set_again(&self) -> anyhow::Result<Duration> {
        let set = SetWorkloadsRequest {
            instance_id: self.instance_id.clone(),
            revision: self.revision.load(Ordering::Relaxed),
            workloads: (1..=self.workloads)
                .map(workload)
                .collect::<Result<_, _>>()?,
        };
        let started = Instant::now();
        self.client.clone().set_workloads(set).await?;
        Ok(started.elapsed())
    }

    /// Returns the processor time of all threads so far (the first field of schedstat, in nanoseconds).
    pub(super) fn processor_time(&self) -> anyhow::Result<Duration> {
        let mut total = Duration::ZERO;
        for thread in fs::read_dir(format!("/proc/{}/task", self.broker.pid()))? {
            let text = fs::read_to_string(thread?.path().join("schedstat"))?;
            let time = text.split_whitespace().next().context("schedstat")?;
            total += Duration::from_nanos(time.parse()?);
        }
        Ok(total)
    }

    pub(super) fn resident_mib(&self) -> anyhow::Result<f64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.broker.pid()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next());
        let kib: f64 = kib.context("VmRSS")?.parse()?;
        Ok(kib / 1024.0)
    }

    pub(super) async fn add_and_remove(&mut self) -> anyhow::Result<Duration> {
        let number = self.next();
        let started = Instant::now();
        self.add(number).await?;
        let took = started.elapsed();
        self.remove(number).await?;
        Ok(took)
    }

    async fn add(&self, number: u64) -> anyhow::Result<()> {
        let mut request = Request::new(AddWorkloadRequest {
            instance_id: self.instance_id.clone(),
            workload: Some(workload(number)?),
        });
        request.set_timeout(TIMEOUT);
        self.client.clone().add_workload(request).await?;
        Ok(())
    }

    async fn remove(&self, number: u64) -> anyhow::Result<()> {
        let request = RemoveWorkloadRequest {
            instance_id: self.instance_id.clone(),
            sandbox: Some(sandbox(number)),
            revision: number,
        };
        self.client.clone().remove_workload(request).await?;
        Ok(())
    }

    /// Restarts the ztunnel, and waits for the end of its snapshot.
    pub(super) async fn snapshot(&mut self) -> anyhow::Result<()> {
        let mut client = self.client.clone();
        let sessions = client.list_workloads(ListWorkloadsRequest {}).await?;
        let sessions = sessions.into_inner().sessions;
        let session_id = sessions.first().context("no session")?.session_id;
        let mut events = client
            .watch_sessions(WatchSessionsRequest {})
            .await?
            .into_inner();
        self.ztunnel = Running::ztunnel(&self.dir.path().join("ztunnel.sock"))?;
        loop {
            let message = timeout(TIMEOUT, events.message()).await??;
            let event = message.and_then(|message| message.event);
            let Event::Session(session) = event.context("the stream ended")? else {
                continue;
            };
            let phase = session.phase();
            if session.session_id > session_id && phase == SessionPhase::Live {
                return Ok(());
            }
        }
    }

    async fn live(&self) -> anyhow::Result<()> {
        let mut client = self.client.clone();
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let list = client.list_workloads(ListWorkloadsRequest {}).await?;
            let mut sessions = list.into_inner().sessions.into_iter();
            if sessions.any(|session| session.phase() == SessionPhase::Live) {
                return Ok(());
            }
            anyhow::ensure!(Instant::now() < deadline, "no ztunnel is live");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn start(program: &Path, dir: &Path) -> anyhow::Result<Running> {
    let mut command = Command::new(program);
    command
        .args(["--peer", "uid", "--ztunnel-peer", "uid", "--run-dir"])
        .arg(dir)
        .arg("--zds-socket")
        .arg(dir.join("ztunnel.sock"))
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .stdout(Stdio::null());
    Running::start(&mut command)
}

async fn instance_id(client: &mut ZtunnelBrokerServiceClient<Channel>) -> anyhow::Result<String> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match client.list_workloads(ListWorkloadsRequest {}).await {
            Ok(list) => return Ok(list.into_inner().instance_id),
            Err(error) if Instant::now() > deadline => return Err(error.into()),
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

fn sandbox(number: u64) -> SandboxRef {
    SandboxRef {
        network_name: "bench".to_owned(),
        container_id: format!("c{number}"),
        ifname: "eth0".to_owned(),
    }
}

fn workload(number: u64) -> anyhow::Result<Workload> {
    let netns = fs::metadata("/proc/self/ns/net")?;
    Ok(Workload {
        sandbox: Some(sandbox(number)),
        uid: format!("11111111-2222-3333-4444-{number:012}"),
        info: Some(WorkloadInfo {
            name: format!("pod-{number}"),
            namespace: "default".to_owned(),
            service_account: "default".to_owned(),
        }),
        netns: Some(NetnsId {
            device: netns.dev(),
            inode: netns.ino(),
            cookie: 1,
        }),
        revision: number,
    })
}

/// Serves claims like netconfig. Every claim is for the netns of this process, because the broker compares device and
/// inode without entering the netns.
async fn hand_out(claims: UnixListener) {
    let mut answers = JoinSet::new();
    while let Ok((stream, _)) = claims.accept().await {
        answers.spawn(answer(stream));
    }
}

/// Serves a connection, which stays open between requests.
async fn answer(mut stream: UnixStream) -> anyhow::Result<()> {
    let own = File::open("/proc/self/ns/net")?;
    loop {
        let length = stream.read_u32().await?;
        let mut request = vec![0; usize::try_from(length)?];
        stream.read_exact(&mut request).await?;
        let netns = FetchNetnsRequest::decode(&*request)?.netns;
        let netns = netns.context("it names none")?;
        let message = FetchNetnsResponse {
            result: Some(fetch_netns_response::Result::Netns(netns)),
        };
        let message = message.encode_to_vec();
        let mut packet = u32::try_from(message.len())?.to_be_bytes().to_vec();
        packet.extend(message);
        packet.push(0);
        stream.writable().await?;
        stream.send_with_fd(&packet, &[own.as_raw_fd()])?;
    }
}
