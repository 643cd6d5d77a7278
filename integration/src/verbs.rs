//! A container runtime's verbs as the plugin makes them, many at once and without a process for each.

use std::{
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use inpod_proto::{
    failure_of,
    podevents::v1::{
        AddPodRequest, AddPodResponse, DeletePodRequest, DeletePodResponse,
        pod_events_service_client::PodEventsServiceClient,
    },
    types::v1::{NetnsRef, PodSelector, SandboxRef},
};
use inpod_types::Failure;
use tokio::{runtime::Runtime, task::JoinHandle};
use tonic::{Request, Response, Status, transport::Channel};

use crate::{Pod, Spec};

/// Connections: a server takes 256 calls at once on each.
const CONNECTIONS: usize = 8;

/// What became of a verb, and how long that took.
#[derive(Clone, Debug)]
pub struct Answer<T> {
    /// From the call to its answer.
    pub took: Duration,
    /// The answer.
    pub result: Result<T, Failure>,
}

/// A verb that was called and is not awaited yet.
pub type Called<T> = JoinHandle<Answer<T>>;

/// A sandbox as a runtime names it.
#[derive(Clone, Debug)]
pub struct Named {
    /// Its pod.
    pub pod: PodSelector,
    /// The sandbox.
    pub sandbox: SandboxRef,
    /// Where its netns is.
    pub netns: NetnsRef,
    /// The addresses in it.
    pub addresses: Vec<String>,
}

impl Named {
    /// A sandbox that is there.
    pub fn of(pod: &Pod) -> Self {
        Self {
            addresses: pod.addresses().map(|address| address.to_string()).into(),
            ..Self::at(&pod.spec, &pod.container_id, pod.path())
        }
    }

    /// A sandbox of a pod whose netns is said to be at a path.
    pub fn at(spec: &Spec, container_id: &str, path: &Path) -> Self {
        Self {
            pod: PodSelector {
                namespace: spec.namespace.clone(),
                name: spec.name.clone(),
                uid: spec.uid.clone(),
            },
            sandbox: SandboxRef {
                network_name: "podnet".to_owned(),
                container_id: container_id.to_owned(),
                ifname: "eth0".to_owned(),
            },
            netns: NetnsRef {
                path: path.display().to_string(),
                ..NetnsRef::default()
            },
            addresses: vec!["10.77.0.2".to_owned()],
        }
    }
}

/// A runtime.
#[derive(Debug)]
pub struct Verbs {
    clients: [PodEventsServiceClient<Channel>; CONNECTIONS],
    next: AtomicUsize,
    runtime: Runtime,
}

impl Verbs {
    /// One that asks at a socket.
    ///
    /// # Errors
    ///
    /// When no runtime of threads can be had.
    pub fn at(socket: &Path) -> anyhow::Result<Self> {
        let runtime = Runtime::new().context("no runtime")?;
        let clients = {
            let _context = runtime.enter();
            [(); CONNECTIONS].map(|()| PodEventsServiceClient::new(inpod_service::channel(socket)))
        };
        Ok(Self {
            clients,
            next: AtomicUsize::new(0),
            runtime,
        })
    }

    fn client(&self) -> PodEventsServiceClient<Channel> {
        let next = self.next.fetch_add(1, Ordering::Relaxed) % CONNECTIONS;
        let [first, ..] = &self.clients;
        self.clients.get(next).unwrap_or(first).clone()
    }

    /// Calls ADD.
    pub fn add(&self, named: &Named, timeout: Duration) -> Called<AddPodResponse> {
        let mut client = self.client();
        let mut request = Request::new(AddPodRequest {
            sandbox: Some(named.sandbox.clone()),
            pod: Some(named.pod.clone()),
            netns: Some(named.netns.clone()),
            addresses: named.addresses.clone(),
        });
        request.set_timeout(timeout);
        self.call(async move { client.add_pod(request).await })
    }

    /// Calls DEL, with the plugin's five seconds.
    pub fn del(&self, named: &Named) -> Called<DeletePodResponse> {
        let mut client = self.client();
        let mut request = Request::new(DeletePodRequest {
            sandbox: Some(named.sandbox.clone()),
            pod: Some(named.pod.clone()),
        });
        // Longer than the plugin's: what is measured is how long it takes.
        request.set_timeout(Duration::from_secs(30));
        self.call(async move { client.delete_pod(request).await })
    }

    fn call<T: Send + 'static>(
        &self,
        answer: impl Future<Output = Result<Response<T>, Status>> + Send + 'static,
    ) -> Called<T> {
        let began = Instant::now();
        self.runtime.spawn(async move {
            let result = answer.await;
            Answer {
                took: began.elapsed(),
                result: result
                    .map(Response::into_inner)
                    .map_err(|status| failure_of(&status)),
            }
        })
    }

    /// Waits for answers, as long as they take: each has a deadline.
    ///
    /// # Errors
    ///
    /// When a client panics.
    pub fn answers<T>(&self, called: Vec<Called<T>>) -> anyhow::Result<Vec<Answer<T>>> {
        let wait = async {
            let mut answers = Vec::new();
            for call in called {
                answers.push(call.await?);
            }
            Ok(answers)
        };
        self.runtime.block_on(wait)
    }

    /// The metrics of the service at a socket.
    ///
    /// # Errors
    ///
    /// When they cannot be read.
    pub fn metrics(&self, socket: &Path) -> anyhow::Result<String> {
        let fetched = inpod_service::metrics::fetch(socket);
        self.runtime.block_on(fetched).map_err(anyhow::Error::msg)
    }
}

/// The number of a metric with exactly these labels, as `name{label="value"}`; 0 where it was never counted.
pub fn number(metrics: &str, name: &str) -> f64 {
    let line = metrics
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|number| number.parse().ok())
        .unwrap_or_default()
}
