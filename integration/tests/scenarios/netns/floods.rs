//! Floods of the gRPC sockets by a process of the host: ADDs still succeed, and no service takes up the node's memory.

use std::{
    convert::Infallible,
    fs,
    io::Write as _,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use anyhow::ensure;

use crate::netns::garbage::raise_open_files;
use futures_util::StreamExt as _;
use http_body_util::StreamBody;
use hyper::body::{Bytes, Frame};
use integration::{Call, Node, Pod, SERVICES, Spec, TIMEOUT, eventually, run};
use tokio::runtime::{Builder, Runtime};
use tonic::body::Body;
use tower::{Service as _, ServiceExt as _};

/// The memory from which the chart's limits follow, in KiB.
const MAX_RESIDENT: u64 = 128 << 10;

/// The preface of HTTP/2 (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A call per service that a process of the host may make.
const CALLS: [&str; 3] = [
    "/inpod.netconfig.v1.NetconfigService/ListClaims",
    "/inpod.ztunnelbroker.v1.ZtunnelBrokerService/ListWorkloads",
    "/inpod.podevents.v1.PodEventsService/AddPod",
];

/// Sends requests that never end, until the value is dropped.
#[derive(Debug)]
struct Incomplete {
    runtime: Runtime,
    rejected: Arc<AtomicUsize>,
}

impl Incomplete {
    fn new() -> Self {
        let mut builder = Builder::new_multi_thread();
        Self {
            runtime: builder.worker_threads(1).enable_all().build().unwrap(),
            rejected: Arc::default(),
        }
    }

    /// Waits until the services have rejected so many of the requests.
    fn until_rejected(&self, wanted: usize) {
        eventually("requests are rejected", TIMEOUT, || {
            let rejected = self.rejected.load(Ordering::Relaxed);
            ensure!(rejected >= wanted, "{rejected} of {wanted}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    /// Opens a connection with a number of calls, each of which sends the bytes and no end.
    fn send(&self, socket: &Path, call: &'static str, calls: usize, bytes: usize) {
        let (socket, rejected) = (socket.to_owned(), Arc::clone(&self.rejected));
        self.runtime.spawn(async move {
            let channel = inpod_service::channel(&socket);
            let call = |_| {
                let (mut channel, part) = (channel.clone(), Bytes::from(vec![0; bytes]));
                let rejected = Arc::clone(&rejected);
                async move {
                    let begun =
                        futures_util::stream::iter([Ok::<_, Infallible>(Frame::data(part))]);
                    let body = StreamBody::new(begun.chain(futures_util::stream::pending()));
                    let request = http::Request::post(format!("http://localhost{call}"))
                        .header("content-type", "application/grpc")
                        .body(Body::new(body))
                        .unwrap();
                    // The service may reject the call or close the connection.
                    drop(channel.ready().await.unwrap().call(request).await);
                    rejected.fetch_add(1, Ordering::Relaxed);
                }
            };
            futures_util::future::join_all((0..calls).map(call)).await;
        });
    }
}

fn sockets(node: &Node) -> Vec<(&'static str, PathBuf)> {
    let socket = |service| (service, inpod_service::socket(&node.run_dir(), service));
    SERVICES.map(socket).into()
}

/// Adds and deletes the pod repeatedly, and prints the median time of an ADD.
fn add_and_delete(node: &Node, pod: &Pod) {
    let mut times = Vec::new();
    for _ in 0..11 {
        let began = Instant::now();
        node.add(pod).unwrap();
        times.push(began.elapsed());
        node.until_whole(&pod.spec).unwrap();
        let outcome = node.call(Call::del, pod).run().unwrap();
        assert_eq!(outcome.code, 0, "{outcome:?}");
    }
    times.sort_unstable();
    eprintln!("median of {} ADDs: {:?}", times.len(), times[5]);
}

fn assert_small(node: &Node) {
    for service in SERVICES {
        let resident = node.resident(service).unwrap();
        eprintln!("{service}: {resident} KiB");
        assert!(resident < MAX_RESIDENT, "{service}: {resident} KiB");
    }
}

fn node_with_pod() -> (Node, Pod) {
    let node = Node::running().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    add_and_delete(&node, &pod);
    (node, pod)
}

#[test]
fn requests_without_an_end_keep_no_add_waiting() {
    let (node, pod) = node_with_pod();
    let flood = Incomplete::new();
    for ((_, socket), call) in sockets(&node).iter().zip(CALLS) {
        for _ in 0..5 {
            flood.send(socket, call, 206, 1);
        }
    }
    add_and_delete(&node, &pod);
    assert_small(&node);
}

#[test]
fn requests_of_four_megabytes_take_up_no_memory() {
    let (node, pod) = node_with_pod();
    let flood = Incomplete::new();
    let sockets = sockets(&node);
    for ((_, socket), call) in sockets.iter().zip(CALLS) {
        flood.send(socket, call, 250, (4 << 20) - 10);
    }
    add_and_delete(&node, &pod);
    flood.until_rejected(750);
    // This request may be as large. The service keeps four incomplete ones.
    let (_, broker) = &sockets[1];
    let call = "/inpod.ztunnelbroker.v1.ZtunnelBrokerService/SetWorkloads";
    flood.send(broker, call, 54, (4 << 20) - 10);
    flood.until_rejected(800);
    add_and_delete(&node, &pod);
    assert_small(&node);
}

#[test]
fn a_service_keeps_a_bounded_number_of_connections() {
    raise_open_files();
    let (node, pod) = node_with_pod();
    let mut open = Vec::new();
    for (_, socket) in sockets(&node) {
        for _ in 0..1_800 {
            let mut stream = UnixStream::connect(&socket).unwrap();
            // The service may have closed the connection.
            stream.write_all(PREFACE).unwrap_or_default();
            open.push(stream);
        }
    }
    add_and_delete(&node, &pod);
    assert_small(&node);
    for service in SERVICES {
        let files = open_files(&node, service);
        assert!(files < 1_500, "{service} has {files} open files");
    }
}

fn open_files(node: &Node, service: &str) -> usize {
    let pid = node.pid(service).unwrap();
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

#[test]
fn idle_connections_leave_a_service_the_files_that_it_needs() {
    let node = Node::new().unwrap();
    let few = ["prlimit", "--nofile=1024:1024", "--"];
    for service in SERVICES {
        node.start_within(&few, &node.run_dir(), service, &["--peer", "uid"])
            .unwrap();
    }
    node.start_ztunnel(&[]).unwrap();
    node.ready().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let mut open = Vec::new();
    for (_, socket) in sockets(&node) {
        open.extend((0..1_100).map(|_| UnixStream::connect(&socket).unwrap()));
    }
    add_and_delete(&node, &pod);
}

#[test]
fn an_add_without_free_files_may_be_tried_again() {
    let (node, pod) = node_with_pod();
    let pid = node.pid("netconfig").unwrap().to_string();
    let files = open_files(&node, "netconfig");
    run("prlimit", &["--pid", &pid, &format!("--nofile={files}:")]).unwrap();
    let outcome = node.call(Call::add, &pod).run().unwrap();
    for part in ["\"code\":11", "OVERLOADED"] {
        assert!(outcome.stdout.contains(part), "{outcome:?}");
    }
    run("prlimit", &["--pid", &pid, "--nofile=4096:"]).unwrap();
    eventually("the ADD succeeds", TIMEOUT, || node.add(&pod)).unwrap();
}
