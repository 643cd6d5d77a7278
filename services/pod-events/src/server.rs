//! The gRPC face: parse, ask, answer.

mod binds;
mod people;
mod selection;
mod verbs;
mod watch;

use std::{collections::BTreeSet, pin::Pin, str::FromStr, sync::Arc, time::Duration};

use futures_util::Stream;
use inpod_proto::{
    Invalid, into_status,
    podevents::v1::{self as wire, pod_events_service_server::PodEventsService},
    required,
};
use inpod_service::{Lane, Readiness, Shutdown, Trace};
use inpod_types::{Enrollment, Failure, InvalidIdentifier, Reason, SandboxRef};
use tonic::{Request, Response, Status};

use self::selection::{Filter, Selection};
use crate::{
    clients::Clients,
    explain,
    metrics::{Istio, Metrics},
    registry::Registry,
    source::PodKey,
    task::Shared,
    trace,
};

/// Answers for the pods of this node.
#[derive(Debug)]
pub struct Server {
    /// All tasks.
    pub registry: Registry,
    /// What tasks have in common.
    pub shared: Arc<Shared>,
    /// What is depended on.
    pub conditions: Readiness,
    /// What is counted.
    pub metrics: Metrics,
    /// What is counted under the incumbent's names, if that is wanted.
    pub istio: Option<Istio>,
    /// The version to tell.
    pub version: &'static str,
    /// This run of the process.
    pub instance_id: String,
    /// When streams end.
    pub shutdown: Shutdown,
}

/// How long a look at the other services may take.
const LOOK: Duration = Duration::from_secs(5);

fn failed(failure: impl Into<Failure>) -> Status {
    into_status(&failure.into())
}

fn text<T: FromStr<Err = InvalidIdentifier>>(
    field: &'static str,
    text: &str,
) -> Result<T, Invalid> {
    text.parse()
        .map_err(|error: InvalidIdentifier| Invalid::new(field, error))
}

/// The verbs of the runtime neither take places from each other nor from those who look: a DEL is not refused because
/// ADDs wait. Only the first can wait long.
pub const LANES: &[Lane] = &[
    &["/inpod.podevents.v1.PodEventsService/AddPod"],
    &[
        "/inpod.podevents.v1.PodEventsService/DeletePod",
        "/inpod.podevents.v1.PodEventsService/CollectGarbage",
    ],
];

impl Server {
    fn clients(&self) -> &Clients {
        &self.shared.pipeline.clients
    }

    fn count(&self, added: Result<Enrollment, Reason>) {
        if let Some(istio) = &self.istio {
            istio.added(added);
        }
    }

    fn keys(&self, selection: &Selection) -> BTreeSet<PodKey> {
        keys(&self.shared, &self.registry, selection)
    }
}

/// Every pod that the source shows or the checkpoint knows, of those that are selected.
fn keys(shared: &Shared, registry: &Registry, selection: &Selection) -> BTreeSet<PodKey> {
    let inventory = shared.source.inventory();
    let mut keys: BTreeSet<PodKey> = inventory.pods.keys().cloned().collect();
    keys.extend(registry.keys());
    keys.retain(|key| selection.takes(key));
    keys
}

#[tonic::async_trait]
impl PodEventsService for Server {
    async fn add_pod(
        &self,
        request: Request<wire::AddPodRequest>,
    ) -> Result<Response<wire::AddPodResponse>, Status> {
        let added = self.add(request).await.map_err(failed)?;
        Ok(Response::new(added))
    }

    async fn check_pod(
        &self,
        request: Request<wire::CheckPodRequest>,
    ) -> Result<Response<wire::CheckPodResponse>, Status> {
        let sandbox: SandboxRef =
            required("sandbox", request.into_inner().sandbox).map_err(failed)?;
        let enrollment = self.check(&sandbox).await.map_err(failed)?;
        Ok(Response::new(wire::CheckPodResponse {
            enrollment: inpod_proto::types::v1::Enrollment::from(enrollment).into(),
        }))
    }

    async fn delete_pod(
        &self,
        request: Request<wire::DeletePodRequest>,
    ) -> Result<Response<wire::DeletePodResponse>, Status> {
        let trace = Trace::of(request.metadata().as_ref()).here();
        let sandbox: SandboxRef =
            required("sandbox", request.into_inner().sandbox).map_err(failed)?;
        let deferred = trace::on_behalf_of(trace, self.registry.delete(&sandbox)).await;
        Ok(Response::new(wire::DeletePodResponse { deferred }))
    }

    async fn collect_garbage(
        &self,
        request: Request<wire::CollectGarbageRequest>,
    ) -> Result<Response<wire::CollectGarbageResponse>, Status> {
        let dropped = self.collect(request.get_ref()).await.map_err(failed)?;
        Ok(Response::new(wire::CollectGarbageResponse { dropped }))
    }

    async fn get_status(
        &self,
        _: Request<wire::GetStatusRequest>,
    ) -> Result<Response<wire::GetStatusResponse>, Status> {
        Ok(Response::new(wire::GetStatusResponse {
            ready: self.conditions.is_ready(),
            node_name: self.shared.config.node_name.to_string(),
            version: self.version.to_owned(),
            conditions: explain::conditions(&self.conditions),
        }))
    }

    async fn explain_pod(
        &self,
        request: Request<wire::ExplainPodRequest>,
    ) -> Result<Response<wire::ExplainPodResponse>, Status> {
        let known = self.find(request.into_inner().pod).map_err(failed)?;
        Ok(Response::new(self.explain(&known).await))
    }

    async fn list_pods(
        &self,
        request: Request<wire::ListPodsRequest>,
    ) -> Result<Response<wire::ListPodsResponse>, Status> {
        let filter = Filter::parse(request.into_inner()).map_err(failed)?;
        let pods = self.summaries(&filter.selection);
        Ok(Response::new(wire::ListPodsResponse {
            pods: pods.filter(|pod| filter.takes(pod)).collect(),
        }))
    }

    type WatchEnrollmentsStream =
        Pin<Box<dyn Stream<Item = Result<wire::WatchEnrollmentsResponse, Status>> + Send>>;

    async fn watch_enrollments(
        &self,
        request: Request<wire::WatchEnrollmentsRequest>,
    ) -> Result<Response<Self::WatchEnrollmentsStream>, Status> {
        let selection = Selection::parse(request.into_inner().pod).map_err(failed)?;
        let (shared, registry) = (Arc::clone(&self.shared), self.registry.clone());
        let told = watch::enrollments(shared, registry, self.instance_id.clone(), selection);
        Ok(Response::new(Box::pin(self.shutdown.end(told))))
    }

    async fn list_binds(
        &self,
        request: Request<wire::ListBindsRequest>,
    ) -> Result<Response<wire::ListBindsResponse>, Status> {
        let pods = self.binds(request).await.map_err(failed)?;
        Ok(Response::new(wire::ListBindsResponse { pods }))
    }

    async fn resync(
        &self,
        request: Request<wire::ResyncRequest>,
    ) -> Result<Response<wire::ResyncResponse>, Status> {
        let selection = Selection::parse(request.into_inner().pod).map_err(failed)?;
        let pods = self.look_anew(&selection).await.map_err(failed)?;
        Ok(Response::new(wire::ResyncResponse { pods }))
    }
}
