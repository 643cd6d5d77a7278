//! A stock ztunnel beside the reference one: its answer to an Add, and a pod's ADD and DEL.

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
use integration::{Call, Node, Pod, SERVICES, Spec, eventually};
use prost::Message as _;
use tokio::{runtime::Runtime, time::timeout};
use tokio_seqpacket::{UnixSeqpacket, UnixSeqpacketListener, ancillary::AncillaryMessageWriter};

use crate::{
    table::{Row, record, table},
    verbs::{known, took},
};

const TIMEOUT: Duration = Duration::from_secs(20);

const NAME: &str = "ztunnel";

/// The ztunnel to start.
#[derive(Clone, Copy)]
enum Kind {
    Reference,
    Stock,
}

impl Kind {
    fn start(self, node: &Node) -> anyhow::Result<()> {
        match self {
            Self::Reference => node.start_ztunnel(&[]),
            Self::Stock => {
                node.configure_stock_ztunnels(&[], &[])?;
                node.start_stock_ztunnel(&[], NAME)
            }
        }
    }
}

pub(crate) fn stock(samples: usize) -> anyhow::Result<()> {
    answers(samples)?;
    verbs(samples)
}

/// Sends a packet and receives ztunnel's answer.
struct Bare {
    socket: UnixSeqpacket,
    node: Node,
}

impl Bare {
    async fn connect(kind: Kind) -> anyhow::Result<Self> {
        let node = Node::new()?;
        let path = node.zds_socket();
        fs::create_dir_all(path.parent().context("a directory")?)?;
        let mut listener = UnixSeqpacketListener::bind(&path)?;
        kind.start(&node)?;
        let socket = timeout(TIMEOUT, listener.accept()).await??;
        timeout(TIMEOUT, socket.recv(&mut [0; 1024])).await??;
        let bare = Self { socket, node };
        bare.ask(Payload::SnapshotSent(SnapshotSent {}), None)
            .await?;
        Ok(bare)
    }

    async fn ask(&self, payload: Payload, netns: Option<&Netns>) -> anyhow::Result<Duration> {
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

    async fn pod(&self, number: usize) -> anyhow::Result<[Duration; 2]> {
        let pod = self.node.sandbox(Spec::new(&format!("pod-{number}")))?;
        let Spec {
            namespace,
            name,
            uid,
            ..
        } = pod.spec.clone();
        let add = AddWorkload {
            uid: uid.clone(),
            workload_info: Some(WorkloadInfo {
                service_account: format!("sa-{name}"),
                name,
                namespace,
            }),
        };
        let times = [
            self.ask(Payload::Add(add), Some(&pod.netns)).await?,
            self.ask(Payload::Del(DelWorkload { uid }), None).await?,
        ];
        pod.unmount()?;
        Ok(times)
    }
}

fn answers(samples: usize) -> anyhow::Result<()> {
    let mut rows = [
        Row::new("the reference ztunnel's answer to an Add"),
        Row::new("stock ztunnel's answer to an Add"),
        Row::new("the reference ztunnel's answer to a Del"),
        Row::new("stock ztunnel's answer to a Del"),
    ];
    let runtime = Runtime::new()?;
    let _inside = runtime.enter();
    let reference = runtime.block_on(Bare::connect(Kind::Reference))?;
    let stock = runtime.block_on(Bare::connect(Kind::Stock))?;
    for number in 0..samples {
        let [reference_add, reference_del] = runtime.block_on(reference.pod(number))?;
        let [stock_add, stock_del] = runtime.block_on(stock.pod(number))?;
        record(
            &mut rows,
            [reference_add, stock_add, reference_del, stock_del],
        );
    }
    table("ZDS alone: from a packet to its answer", &rows)
}

fn node(kind: Kind) -> anyhow::Result<Node> {
    let node = Node::new()?;
    SERVICES
        .iter()
        .try_for_each(|service| node.start(service))?;
    kind.start(&node)?;
    node.ready()?;
    Ok(node)
}

fn verbs(samples: usize) -> anyhow::Result<()> {
    let mut rows = [
        Row::new("ADD of an enrolled pod, with the reference ztunnel"),
        Row::new("the same with stock ztunnel"),
        Row::new("its DEL, with the reference ztunnel"),
        Row::new("the same with stock ztunnel"),
    ];
    let nodes = [node(Kind::Reference)?, node(Kind::Stock)?];
    for _ in 0..samples {
        let [first, second] = [come_and_go(&nodes[0])?, come_and_go(&nodes[1])?];
        record(&mut rows, [first[0], second[0], first[1], second[1]]);
    }
    table("CNI verbs, exec to exit", &rows)
}

/// Its listeners exist when the ADD ends.
fn come_and_go(node: &Node) -> anyhow::Result<[Duration; 2]> {
    let pod = node.sandbox(Spec::new("one").ambient())?;
    known(node, &pod.spec)?;
    let add = took(&node.call(Call::add, &pod))?;
    serves(&pod)?;
    let del = took(&node.call(Call::del, &pod))?;
    pod.unmount()?;
    eventually("it is forgotten", TIMEOUT, || {
        let known = node.api().workloads()?.workloads.len();
        ensure!(known == 0, "{known}");
        anyhow::Ok(())
    })?;
    Ok([add, del])
}

/// Does not wait: an ADD must not return before its pod is served.
fn serves(pod: &Pod) -> anyhow::Result<()> {
    let listening = pod.exec(&["ss", "-Hltn", "sport", "=", ":15008"])?;
    ensure!(!listening.is_empty(), "ADD has ended and nothing listens");
    Ok(())
}
