//! The RPCs: parse the request, call the hub, convert the result.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures_util::Stream;
use inpod_proto::{
    Invalid, required,
    ztunnelbroker::v1::{
        self as broker, AddWorkloadRequest, AddWorkloadResponse, ListWorkloadsRequest,
        ListWorkloadsResponse, RemoveWorkloadRequest, RemoveWorkloadResponse, SetWorkloadsRequest,
        SetWorkloadsResponse, SetZtunnelsRequest, SetZtunnelsResponse, WatchSessionsRequest,
        WatchSessionsResponse, ztunnel_broker_service_server::ZtunnelBrokerService,
    },
};
use inpod_service::Shutdown;
use inpod_types::{PodUid, Revision, Workload};
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use crate::{
    error::{AddError, InstanceMismatch, RemoveError, SetError, SetZtunnelsError, into_status},
    hub::Hub,
    watch,
};

#[derive(Debug)]
pub struct Handler {
    hub: Arc<Hub>,
    instance_id: String,
    undo_reserve: Duration,
    shutdown: Shutdown,
}

impl Handler {
    /// Creates a handler. `instance_id` identifies this run of the broker. A failed add leaves `undo_reserve` of its
    /// caller's deadline.
    pub fn new(
        hub: Arc<Hub>,
        instance_id: &str,
        undo_reserve: Duration,
        shutdown: Shutdown,
    ) -> Self {
        Self {
            hub,
            instance_id: instance_id.to_owned(),
            undo_reserve,
            shutdown,
        }
    }

    fn check_instance(&self, expected: &str) -> Result<(), InstanceMismatch> {
        if expected == self.instance_id {
            return Ok(());
        }
        let instance_id = self.instance_id.clone();
        Err(InstanceMismatch { instance_id })
    }

    fn set(&self, request: SetWorkloadsRequest) -> Result<(), SetError> {
        self.check_instance(&request.instance_id)?;
        require_revision(request.revision)?;
        let all: Result<Vec<_>, Invalid> = (0..).zip(request.workloads).map(parse).collect();
        let all = all?;
        tracing::info!(
            revision = request.revision,
            workloads = all.len(),
            "Stored the desired set"
        );
        self.hub.set(Revision(request.revision), all);
        Ok(())
    }

    async fn add(&self, request: Request<AddWorkloadRequest>) -> Result<u64, AddError> {
        let deadline = add_deadline(
            Instant::now(),
            inpod_service::deadline(&request),
            self.undo_reserve,
        );
        let request = request.into_inner();
        self.check_instance(&request.instance_id)?;
        let workload = required("workload", request.workload)?;
        Ok(self.hub.add(workload, deadline).await?.0)
    }

    fn remove(&self, request: RemoveWorkloadRequest) -> Result<(), RemoveError> {
        self.check_instance(&request.instance_id)?;
        let sandbox = required("sandbox", request.sandbox)?;
        require_revision(request.revision)?;
        Ok(self.hub.remove(&sandbox, Revision(request.revision))?)
    }

    fn replace_ztunnels(&self, request: SetZtunnelsRequest) -> Result<(), SetZtunnelsError> {
        self.check_instance(&request.instance_id)?;
        let pods: Result<_, Invalid> = (0..).zip(request.pod_uids).map(parse_uid).collect();
        self.hub.set_ztunnels(pods?);
        Ok(())
    }
}

fn parse_uid((index, uid): (u32, String)) -> Result<PodUid, Invalid> {
    let field = format!("pod_uids[{index}]");
    uid.parse()
        .map_err(|error: inpod_types::InvalidIdentifier| Invalid::new(&field, error.to_string()))
}

fn require_revision(revision: u64) -> Result<(), Invalid> {
    if revision == 0 {
        return Err(Invalid::new("revision", "revision is required, from 1"));
    }
    Ok(())
}

fn parse((index, workload): (u32, broker::Workload)) -> Result<Workload, Invalid> {
    let within = |invalid: Invalid| invalid.within(&format!("workloads[{index}]"));
    workload.try_into().map_err(within)
}

/// Returns when an add gives up: early enough for the undo before the caller's deadline. A caller with little time gets
/// half of the time.
fn add_deadline(now: Instant, caller_deadline: Instant, reserve: Duration) -> Instant {
    let time = caller_deadline.saturating_duration_since(now);
    caller_deadline - reserve.min(time / 2)
}

#[tonic::async_trait]
impl ZtunnelBrokerService for Handler {
    type WatchSessionsStream =
        Pin<Box<dyn Stream<Item = Result<WatchSessionsResponse, Status>> + Send>>;

    async fn set_workloads(
        &self,
        request: Request<SetWorkloadsRequest>,
    ) -> Result<Response<SetWorkloadsResponse>, Status> {
        self.set(request.into_inner()).map_err(into_status)?;
        let instance_id = self.instance_id.clone();
        Ok(Response::new(SetWorkloadsResponse { instance_id }))
    }

    async fn add_workload(
        &self,
        request: Request<AddWorkloadRequest>,
    ) -> Result<Response<AddWorkloadResponse>, Status> {
        let session_id = self.add(request).await.map_err(into_status)?;
        Ok(Response::new(AddWorkloadResponse {
            instance_id: self.instance_id.clone(),
            session_id,
        }))
    }

    async fn remove_workload(
        &self,
        request: Request<RemoveWorkloadRequest>,
    ) -> Result<Response<RemoveWorkloadResponse>, Status> {
        self.remove(request.into_inner()).map_err(into_status)?;
        let instance_id = self.instance_id.clone();
        Ok(Response::new(RemoveWorkloadResponse { instance_id }))
    }

    async fn set_ztunnels(
        &self,
        request: Request<SetZtunnelsRequest>,
    ) -> Result<Response<SetZtunnelsResponse>, Status> {
        self.replace_ztunnels(request.into_inner())
            .map_err(into_status)?;
        let instance_id = self.instance_id.clone();
        Ok(Response::new(SetZtunnelsResponse { instance_id }))
    }

    async fn list_workloads(
        &self,
        _: Request<ListWorkloadsRequest>,
    ) -> Result<Response<ListWorkloadsResponse>, Status> {
        let (status, workloads) = self.hub.list();
        Ok(Response::new(ListWorkloadsResponse {
            instance_id: self.instance_id.clone(),
            seeded: status.seeded,
            workloads: workloads.into_iter().map(Into::into).collect(),
            sessions: status.sessions.into_iter().map(Into::into).collect(),
        }))
    }

    async fn watch_sessions(
        &self,
        _: Request<WatchSessionsRequest>,
    ) -> Result<Response<Self::WatchSessionsStream>, Status> {
        let sessions = watch::sessions(&self.hub, &self.instance_id);
        Ok(Response::new(Box::pin(self.shutdown.end_stream(sessions))))
    }
}

#[cfg(test)]
mod tests;
