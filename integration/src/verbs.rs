//! Calls pod-events like the plugin, many times at once and without processes.

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

/// The number of connections; a server accepts 256 concurrent calls on each.
const CONNECTIONS: usize = 8;

#[derive(Clone, Debug)]
pub struct Answer<T> {
    pub took: Duration,
    pub result: Result<T, Failure>,
}

pub type Called<T> = JoinHandle<Answer<T>>;

#[derive(Clone, Debug)]
pub struct Named {
    pub pod: PodSelector,
    pub sandbox: SandboxRef,
    pub netns: NetnsRef,
    pub addresses: Vec<String>,
}

impl Named {
    pub fn of(pod: &Pod) -> Self {
        Self {
            addresses: pod.addresses().map(|address| address.to_string()).into(),
            ..Self::at(&pod.spec, &pod.container_id, pod.path())
        }
    }

    /// Returns a sandbox whose netns is claimed to be at a path.
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

#[derive(Debug)]
pub struct Verbs {
    clients: [PodEventsServiceClient<Channel>; CONNECTIONS],
    next: AtomicUsize,
    runtime: Runtime,
}

impl Verbs {
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

    /// Calls DEL, with a longer time limit than the plugin's five seconds.
    pub fn del(&self, named: &Named) -> Called<DeletePodResponse> {
        let mut client = self.client();
        let mut request = Request::new(DeletePodRequest {
            sandbox: Some(named.sandbox.clone()),
            pod: Some(named.pod.clone()),
        });
        // The longer limit allows measuring the duration.
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

    pub fn metrics(&self, socket: &Path) -> anyhow::Result<String> {
        let fetched = inpod_service::metrics::fetch(socket);
        self.runtime.block_on(fetched).map_err(anyhow::Error::msg)
    }
}

/// Returns the value of a metric by `name{label="value"}` with all labels; 0 if the metric was never counted.
pub fn number(metrics: &str, name: &str) -> f64 {
    let line = metrics
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|number| number.parse().ok())
        .unwrap_or_default()
}
