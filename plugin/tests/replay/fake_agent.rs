//! An agent with scripted answers to `PodEventsService`.

use std::{
    future,
    sync::{Arc, Mutex, mpsc},
    thread::{self, JoinHandle},
};

use inpod_proto::podevents::v1::{
    AddPodRequest, AddPodResponse, CheckPodRequest, CheckPodResponse, CollectGarbageRequest,
    CollectGarbageResponse, DeletePodRequest, DeletePodResponse, ExplainPodRequest,
    ExplainPodResponse, GetStatusRequest, GetStatusResponse, ListBindsRequest, ListBindsResponse,
    ListPodsRequest, ListPodsResponse, ResyncRequest, ResyncResponse, WatchEnrollmentsRequest,
    WatchEnrollmentsResponse,
    pod_events_service_server::{PodEventsService, PodEventsServiceServer},
};
use tokio::{net::UnixListener, sync::Notify};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, metadata::MetadataMap, transport::Server};

use crate::node::Node;

#[derive(Clone, Debug)]
pub(crate) enum Script {
    Accept,
    Refuse(Status),
    /// Accepts the call, never answers.
    Hang,
    /// Accepts the call, then exits.
    Die,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Question {
    Add(AddPodRequest),
    Check(CheckPodRequest),
    Delete(DeletePodRequest),
    Collect(CollectGarbageRequest),
}

pub(crate) struct FakeAgent {
    received: Received,
    stop: Arc<Notify>,
    thread: Option<JoinHandle<()>>,
}

type Received = Arc<Mutex<Vec<(Question, MetadataMap)>>>;

struct Service {
    script: Script,
    received: Received,
    stop: Arc<Notify>,
}

impl FakeAgent {
    pub(crate) fn on(node: &Node, script: Script) -> Self {
        let received = Received::default();
        let stop = Arc::new(Notify::new());
        let service = Service {
            script,
            received: Arc::clone(&received),
            stop: Arc::clone(&stop),
        };
        let socket = node.socket();
        let (listening, listens) = mpsc::channel();
        let until = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let incoming = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
                listening.send(()).unwrap();
                let server = Server::builder().add_service(PodEventsServiceServer::new(service));
                tokio::select! {
                    served = server.serve_with_incoming(incoming) => served.unwrap(),
                    () = until.notified() => {}
                }
            });
            // Drops pending calls, as when a process dies.
            runtime.shutdown_background();
        });
        listens.recv().unwrap();
        Self {
            received,
            stop,
            thread: Some(thread),
        }
    }

    pub(crate) fn questions(&self) -> Vec<Question> {
        let received = self.received.lock().unwrap();
        received
            .iter()
            .map(|(question, _)| question.clone())
            .collect()
    }

    pub(crate) fn only(&self) -> (Question, MetadataMap) {
        let received = self.received.lock().unwrap();
        assert_eq!(received.len(), 1, "{received:?}");
        received[0].clone()
    }
}

impl Drop for FakeAgent {
    fn drop(&mut self) {
        self.stop.notify_one();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Service {
    async fn answer<Q, A: Default>(
        &self,
        request: Request<Q>,
        kind: fn(Q) -> Question,
    ) -> Result<Response<A>, Status> {
        let metadata = request.metadata().clone();
        let question = kind(request.into_inner());
        self.received.lock().unwrap().push((question, metadata));
        match &self.script {
            Script::Accept => Ok(Response::new(A::default())),
            Script::Refuse(status) => Err(status.clone()),
            Script::Hang => future::pending().await,
            Script::Die => {
                self.stop.notify_one();
                future::pending().await
            }
        }
    }
}

#[tonic::async_trait]
impl PodEventsService for Service {
    async fn add_pod(
        &self,
        request: Request<AddPodRequest>,
    ) -> Result<Response<AddPodResponse>, Status> {
        self.answer(request, Question::Add).await
    }

    async fn check_pod(
        &self,
        request: Request<CheckPodRequest>,
    ) -> Result<Response<CheckPodResponse>, Status> {
        self.answer(request, Question::Check).await
    }

    async fn delete_pod(
        &self,
        request: Request<DeletePodRequest>,
    ) -> Result<Response<DeletePodResponse>, Status> {
        self.answer(request, Question::Delete).await
    }

    async fn collect_garbage(
        &self,
        request: Request<CollectGarbageRequest>,
    ) -> Result<Response<CollectGarbageResponse>, Status> {
        self.answer(request, Question::Collect).await
    }

    async fn get_status(
        &self,
        _: Request<GetStatusRequest>,
    ) -> Result<Response<GetStatusResponse>, Status> {
        Err(Status::unimplemented("the plugin never asks"))
    }

    async fn explain_pod(
        &self,
        _: Request<ExplainPodRequest>,
    ) -> Result<Response<ExplainPodResponse>, Status> {
        Err(Status::unimplemented("the plugin never asks"))
    }

    async fn list_pods(
        &self,
        _: Request<ListPodsRequest>,
    ) -> Result<Response<ListPodsResponse>, Status> {
        Err(Status::unimplemented("the plugin never asks"))
    }

    type WatchEnrollmentsStream = tokio_stream::Empty<Result<WatchEnrollmentsResponse, Status>>;

    async fn watch_enrollments(
        &self,
        _: Request<WatchEnrollmentsRequest>,
    ) -> Result<Response<Self::WatchEnrollmentsStream>, Status> {
        Err(Status::unimplemented("the plugin never asks"))
    }

    async fn list_binds(
        &self,
        _: Request<ListBindsRequest>,
    ) -> Result<Response<ListBindsResponse>, Status> {
        Err(Status::unimplemented("the plugin never asks"))
    }

    async fn resync(&self, _: Request<ResyncRequest>) -> Result<Response<ResyncResponse>, Status> {
        Err(Status::unimplemented("the plugin never asks"))
    }
}
