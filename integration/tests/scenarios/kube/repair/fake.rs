//! A scripted pod-events with the real contract.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, UNIX_EPOCH},
};

use futures_util::{Stream, StreamExt as _, stream};
use inpod_proto::{
    podevents::v1::{
        self as wire,
        pod_events_service_server::{PodEventsService, PodEventsServiceServer},
        watch_enrollments_response::Event,
    },
    types::v1 as types,
};
use tokio::{net::UnixListener, runtime::Runtime, sync::broadcast};
use tokio_stream::wrappers::{BroadcastStream, UnixListenerStream};
use tonic::{Request, Response, Status};

type Told = Result<wire::WatchEnrollmentsResponse, Status>;

/// Each pod's state by UID, and the watchers.
struct Said {
    pods: Mutex<BTreeMap<String, wire::PodSummary>>,
    changes: broadcast::Sender<Event>,
}

impl Said {
    fn new() -> Self {
        Self {
            pods: Mutex::default(),
            changes: broadcast::channel(64).0,
        }
    }
}

pub(crate) struct Fake {
    said: Arc<Said>,
    /// `None`: it serves no socket.
    _runtime: Option<Runtime>,
}

impl Fake {
    /// The real pod-events has the socket.
    pub(crate) fn silent() -> Self {
        Self {
            said: Arc::new(Said::new()),
            _runtime: None,
        }
    }

    pub(crate) fn start(run_dir: &Path) -> Self {
        let directory = run_dir.join("pod-events");
        fs::create_dir_all(&directory).unwrap();
        let socket = directory.join("grpc.sock");
        fs::remove_file(&socket).unwrap_or_default();
        let runtime = Runtime::new().unwrap();
        let said = Arc::new(Said::new());
        let listener = runtime
            .block_on(async { UnixListener::bind(&socket) })
            .unwrap();
        let service = PodEventsServiceServer::from_arc(Arc::clone(&said));
        let server = tonic::transport::Server::builder().add_service(service);
        runtime.spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
        Self {
            said,
            _runtime: Some(runtime),
        }
    }

    /// True since a second of 1970.
    pub(crate) fn report(
        &self,
        uid: &str,
        desired: types::Enrollment,
        state: wire::PodState,
        since: u64,
    ) {
        let reason = if desired == types::Enrollment::None {
            types::Reason::NamespaceExcluded
        } else {
            types::Reason::SidecarInjected
        };
        let summary = wire::PodSummary {
            pod: Some(types::PodRef {
                namespace: "shop".to_owned(),
                name: "web".to_owned(),
                uid: uid.to_owned(),
            }),
            desired: desired.into(),
            reason: reason.into(),
            state: state.into(),
            since: Some((UNIX_EPOCH + Duration::from_secs(since)).into()),
            last_failure: (state == wire::PodState::Out).then(|| types::Failure {
                reason: types::Reason::KernelRefused.into(),
                message: "nf_tables is missing".to_owned(),
                ..types::Failure::default()
            }),
            ..wire::PodSummary::default()
        };
        let mut pods = self
            .said
            .pods
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        pods.insert(uid.to_owned(), summary.clone());
        // There may be no watcher yet.
        self.said
            .changes
            .send(Event::Pod(summary))
            .map(drop)
            .unwrap_or_default();
    }
}

fn never<T>() -> Result<Response<T>, Status> {
    Err(Status::permission_denied("repair may not call this"))
}

#[tonic::async_trait]
impl PodEventsService for Said {
    type WatchEnrollmentsStream = Pin<Box<dyn Stream<Item = Told> + Send>>;

    async fn watch_enrollments(
        &self,
        _: Request<wire::WatchEnrollmentsRequest>,
    ) -> Result<Response<Self::WatchEnrollmentsStream>, Status> {
        let changes = BroadcastStream::new(self.changes.subscribe());
        let pods = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        let pods: Vec<_> = pods.values().cloned().map(Event::Pod).collect();
        let first = stream::iter([Event::InstanceId("fake".to_owned())]);
        let complete = Event::StateComplete(wire::StateComplete {});
        let all = first
            .chain(stream::iter(pods))
            .chain(stream::iter([complete]));
        let changes = changes.filter_map(|event| std::future::ready(event.ok()));
        let reported = all
            .chain(changes)
            .map(|event| Ok(wire::WatchEnrollmentsResponse { event: Some(event) }));
        Ok(Response::new(Box::pin(reported)))
    }

    async fn list_binds(
        &self,
        _: Request<wire::ListBindsRequest>,
    ) -> Result<Response<wire::ListBindsResponse>, Status> {
        never()
    }

    async fn add_pod(
        &self,
        _: Request<wire::AddPodRequest>,
    ) -> Result<Response<wire::AddPodResponse>, Status> {
        never()
    }

    async fn check_pod(
        &self,
        _: Request<wire::CheckPodRequest>,
    ) -> Result<Response<wire::CheckPodResponse>, Status> {
        never()
    }

    async fn delete_pod(
        &self,
        _: Request<wire::DeletePodRequest>,
    ) -> Result<Response<wire::DeletePodResponse>, Status> {
        never()
    }

    async fn collect_garbage(
        &self,
        _: Request<wire::CollectGarbageRequest>,
    ) -> Result<Response<wire::CollectGarbageResponse>, Status> {
        never()
    }

    async fn get_status(
        &self,
        _: Request<wire::GetStatusRequest>,
    ) -> Result<Response<wire::GetStatusResponse>, Status> {
        never()
    }

    async fn explain_pod(
        &self,
        _: Request<wire::ExplainPodRequest>,
    ) -> Result<Response<wire::ExplainPodResponse>, Status> {
        never()
    }

    async fn list_pods(
        &self,
        _: Request<wire::ListPodsRequest>,
    ) -> Result<Response<wire::ListPodsResponse>, Status> {
        never()
    }

    async fn resync(
        &self,
        _: Request<wire::ResyncRequest>,
    ) -> Result<Response<wire::ResyncResponse>, Status> {
        never()
    }
}
