//! The gRPC server.

mod binds;
mod cni;
mod operator;
mod selection;
mod watch;

use std::{collections::BTreeSet, pin::Pin, str::FromStr, sync::Arc, time::Duration};

use futures_util::Stream;
use inpod_proto::{
    Invalid, into_status,
    podevents::v1::{self as wire, pod_events_service_server::PodEventsService},
    required,
};
use inpod_service::{ConcurrencyGroup, Readiness, Shutdown, Trace};
use inpod_types::{Failure, InvalidIdentifier, SandboxRef};
use tonic::{Request, Response, Status};

use self::selection::{Filter, Selection};
use crate::{
    clients::Clients,
    explain,
    metrics::Metrics,
    pod::PodKey,
    tasks::{Registry, Shared},
    trace,
};

#[derive(Debug)]
pub struct Server {
    pub registry: Registry,
    pub shared: Arc<Shared>,
    pub conditions: Readiness,
    pub metrics: Metrics,
    /// Istio's counters, if enabled.
    pub version: &'static str,
    /// Identifies this run of the process.
    pub instance_id: String,
    pub shutdown: Shutdown,
}

const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

fn to_status(failure: impl Into<Failure>) -> Status {
    into_status(&failure.into())
}

fn respond<T>(result: Result<T, impl Into<Failure>>) -> Result<Response<T>, Status> {
    result.map(Response::new).map_err(to_status)
}

fn parse_field<T: FromStr<Err = InvalidIdentifier>>(
    field: &'static str,
    text: &str,
) -> Result<T, Invalid> {
    text.parse()
        .map_err(|error: InvalidIdentifier| Invalid::new(field, error))
}

/// The groups of calls with a shared concurrency limit. ADDs have a separate limit; DELs share a limit with GC, so that
/// waiting ADDs block no DEL. Only ADDs can wait for long.
pub const CONCURRENCY_GROUPS: &[ConcurrencyGroup] = &[
    &["/inpod.podevents.v1.PodEventsService/AddPod"],
    &[
        "/inpod.podevents.v1.PodEventsService/DeletePod",
        "/inpod.podevents.v1.PodEventsService/CollectGarbage",
    ],
];

impl Server {
    fn clients(&self) -> &Clients {
        self.shared.clients()
    }
}

/// Returns the selected keys among all shown or recorded pods.
fn keys(shared: &Shared, registry: &Registry, selection: &Selection) -> BTreeSet<PodKey> {
    let inventory = shared.source.inventory();
    let mut keys: BTreeSet<PodKey> = inventory.pods.keys().cloned().collect();
    keys.extend(registry.keys());
    keys.retain(|key| selection.matches_key(key));
    keys
}

#[tonic::async_trait]
impl PodEventsService for Server {
    async fn add_pod(
        &self,
        request: Request<wire::AddPodRequest>,
    ) -> Result<Response<wire::AddPodResponse>, Status> {
        respond(self.add(request).await)
    }

    async fn check_pod(
        &self,
        request: Request<wire::CheckPodRequest>,
    ) -> Result<Response<wire::CheckPodResponse>, Status> {
        let sandbox: SandboxRef =
            required("sandbox", request.into_inner().sandbox).map_err(to_status)?;
        let enrollment = self.check(&sandbox).await.map_err(to_status)?;
        tracing::info!(%sandbox, %enrollment, "Checked");
        Ok(Response::new(wire::CheckPodResponse {
            enrollment: inpod_proto::types::v1::Enrollment::from(enrollment).into(),
        }))
    }

    async fn delete_pod(
        &self,
        request: Request<wire::DeletePodRequest>,
    ) -> Result<Response<wire::DeletePodResponse>, Status> {
        let trace = Trace::from_headers(request.metadata().as_ref());
        let sandbox: SandboxRef =
            required("sandbox", request.into_inner().sandbox).map_err(to_status)?;
        let deferred = trace::scope(trace, self.registry.delete(&sandbox)).await;
        Ok(Response::new(wire::DeletePodResponse { deferred }))
    }

    async fn collect_garbage(
        &self,
        request: Request<wire::CollectGarbageRequest>,
    ) -> Result<Response<wire::CollectGarbageResponse>, Status> {
        let dropped = self.collect(request.get_ref()).await;
        if let Ok(dropped) = &dropped {
            let network = &request.get_ref().network_name;
            tracing::info!(network, dropped = dropped.len(), "Collected garbage");
        }
        respond(dropped.map(|dropped| wire::CollectGarbageResponse { dropped }))
    }

    async fn get_status(
        &self,
        _: Request<wire::GetStatusRequest>,
    ) -> Result<Response<wire::GetStatusResponse>, Status> {
        Ok(Response::new(wire::GetStatusResponse {
            ready: self.conditions.is_ready(),
            node_name: self.shared.config.node_name.to_string(),
            version: self.version.to_owned(),
            conditions: explain::list_conditions(&self.conditions),
        }))
    }

    async fn explain_pod(
        &self,
        request: Request<wire::ExplainPodRequest>,
    ) -> Result<Response<wire::ExplainPodResponse>, Status> {
        let known = self.find(request.into_inner().pod).map_err(to_status)?;
        Ok(Response::new(self.explain(&known).await))
    }

    async fn list_pods(
        &self,
        request: Request<wire::ListPodsRequest>,
    ) -> Result<Response<wire::ListPodsResponse>, Status> {
        let filter = Filter::parse(request.into_inner()).map_err(to_status)?;
        let pods = self.pods(&filter.selection);
        let pods = pods.map(|known| explain::summary(&known));
        Ok(Response::new(wire::ListPodsResponse {
            pods: pods.filter(|pod| filter.matches(pod)).collect(),
        }))
    }

    type WatchEnrollmentsStream =
        Pin<Box<dyn Stream<Item = Result<wire::WatchEnrollmentsResponse, Status>> + Send>>;

    async fn watch_enrollments(
        &self,
        request: Request<wire::WatchEnrollmentsRequest>,
    ) -> Result<Response<Self::WatchEnrollmentsStream>, Status> {
        let selection = Selection::parse(request.into_inner().pod).map_err(to_status)?;
        let (shared, registry) = (Arc::clone(&self.shared), self.registry.clone());
        let events = watch::enrollments(shared, registry, self.instance_id.clone(), selection);
        Ok(Response::new(Box::pin(self.shutdown.end_stream(events))))
    }

    async fn list_binds(
        &self,
        request: Request<wire::ListBindsRequest>,
    ) -> Result<Response<wire::ListBindsResponse>, Status> {
        let pods = self.binds(request).await;
        respond(pods.map(|pods| wire::ListBindsResponse { pods }))
    }

    async fn resync(
        &self,
        request: Request<wire::ResyncRequest>,
    ) -> Result<Response<wire::ResyncResponse>, Status> {
        let selection = Selection::parse(request.into_inner().pod).map_err(to_status)?;
        let pods = self.resync_selected(&selection).await;
        respond(pods.map(|pods| wire::ResyncResponse { pods }))
    }
}
