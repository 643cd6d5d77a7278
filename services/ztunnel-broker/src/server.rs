//! The RPCs: parse the request, call the hub, convert the result.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt as _, stream};
use inpod_proto::{
    Invalid, into_status, required,
    ztunnelbroker::v1::{
        AddWorkloadRequest, AddWorkloadResponse, ListWorkloadsRequest, ListWorkloadsResponse,
        RemoveWorkloadRequest, RemoveWorkloadResponse, Session, SetWorkloadsRequest,
        SetWorkloadsResponse, SetZtunnelsRequest, SetZtunnelsResponse, StateComplete,
        WatchSessionsRequest, WatchSessionsResponse, Workload as WireWorkload,
        watch_sessions_response::Event, ztunnel_broker_service_server::ZtunnelBrokerService,
    },
};
use inpod_service::Shutdown;
use inpod_types::{Failure, InvalidIdentifier, PodUid, Reason, Revision, Workload};
use tokio::time::Instant;
use tokio_stream::wrappers::{BroadcastStream, errors::BroadcastStreamRecvError};
use tonic::{Request, Response, Status};

use crate::{
    hub::{self, Hub},
    session::SessionId,
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

    fn check_instance(&self, expected: &str) -> Result<(), Failure> {
        if expected.is_empty() {
            return Err(Invalid::new("instance_id", "instance_id is required").into());
        }
        let own = &self.instance_id;
        if expected == own {
            return Ok(());
        }
        let message = format!("this run of the broker is {own}, not the one in the request");
        Err(Failure::new(Reason::InstanceMismatch, message))
    }

    fn set(&self, request: SetWorkloadsRequest) -> Result<SetWorkloadsResponse, Failure> {
        self.check_instance(&request.instance_id)?;
        let revision = parse_revision(request.revision)?;
        let all: Result<Vec<_>, Invalid> = (0..).zip(request.workloads).map(parse).collect();
        let all = all?;
        tracing::info!(
            revision = request.revision,
            workloads = all.len(),
            "Stored the desired set"
        );
        self.hub.set(revision, all);
        let instance_id = self.instance_id.clone();
        Ok(SetWorkloadsResponse { instance_id })
    }

    async fn add(
        &self,
        request: Request<AddWorkloadRequest>,
    ) -> Result<AddWorkloadResponse, Failure> {
        let caller_deadline = inpod_service::deadline(&request);
        let deadline = add_deadline(Instant::now(), caller_deadline, self.undo_reserve);
        let request = request.into_inner();
        self.check_instance(&request.instance_id)?;
        let workload = required("workload", request.workload)?;
        let added = self.hub.add(workload, deadline).await;
        let SessionId(session_id) = added.map_err(|it| within("cannot add the workload", it))?;
        let instance_id = self.instance_id.clone();
        Ok(AddWorkloadResponse {
            instance_id,
            session_id,
        })
    }

    fn remove(&self, request: RemoveWorkloadRequest) -> Result<RemoveWorkloadResponse, Failure> {
        self.check_instance(&request.instance_id)?;
        let sandbox = required("sandbox", request.sandbox)?;
        let revision = parse_revision(request.revision)?;
        let removed = self.hub.state().remove(&sandbox, revision, hub::now());
        removed.map_err(|it| within("cannot remove the workload", it))?;
        let instance_id = self.instance_id.clone();
        Ok(RemoveWorkloadResponse { instance_id })
    }

    fn replace_ztunnels(
        &self,
        request: SetZtunnelsRequest,
    ) -> Result<SetZtunnelsResponse, Failure> {
        self.check_instance(&request.instance_id)?;
        let pods: Result<_, Invalid> = (0..).zip(request.pod_uids).map(parse_uid).collect();
        self.hub.set_ztunnels(pods?);
        let instance_id = self.instance_id.clone();
        Ok(SetZtunnelsResponse { instance_id })
    }

    /// Streams the initial state, its end and then every change. A watcher that falls behind is disconnected, because
    /// the watcher would miss changes.
    fn events(&self) -> impl Stream<Item = Result<Event, Status>> + use<> {
        let (seeded, sessions, changes) = self.hub.watch();
        let mut state = vec![Event::InstanceId(self.instance_id.clone())];
        state.extend(sessions.into_iter().map(Event::Session));
        state.push(Event::StateComplete(StateComplete { seeded }));
        let changes = BroadcastStream::new(changes).scan(false, |cut, change| {
            let next = (!*cut).then(|| to_event(change));
            *cut = matches!(next, Some(Err(_)));
            std::future::ready(next)
        });
        stream::iter(state.into_iter().map(Ok)).chain(changes)
    }
}

fn to_event(change: Result<Session, BroadcastStreamRecvError>) -> Result<Event, Status> {
    change.map(Event::Session).map_err(|lagged| {
        let BroadcastStreamRecvError::Lagged(missed) = lagged;
        let message = format!("the watcher fell behind by {missed} changes; read again");
        into_status(&Failure::new(Reason::Overloaded, message))
    })
}

/// Prepends to a failure what was attempted, unless the failure concerns a field of the request.
fn within(attempt: &str, failure: Failure) -> Failure {
    if failure.reason == Reason::InvalidField {
        return failure;
    }
    let message = format!("{attempt}: {}", failure.message);
    Failure { message, ..failure }
}

fn parse_uid((index, uid): (u32, String)) -> Result<PodUid, Invalid> {
    let invalid = |error: InvalidIdentifier| Invalid::new(format!("pod_uids[{index}]"), error);
    uid.parse().map_err(invalid)
}

fn parse_revision(revision: u64) -> Result<Revision, Invalid> {
    if revision == 0 {
        return Err(Invalid::new("revision", "revision is required, from 1"));
    }
    Ok(Revision(revision))
}

fn parse((index, workload): (u32, WireWorkload)) -> Result<Workload, Invalid> {
    let within = |invalid: Invalid| invalid.within(&format!("workloads[{index}]"));
    workload.try_into().map_err(within)
}

/// Returns when an add gives up: early enough for the undo before the caller's deadline. A caller with little time gets
/// half of the time.
fn add_deadline(now: Instant, caller_deadline: Instant, reserve: Duration) -> Instant {
    let time = caller_deadline.saturating_duration_since(now);
    caller_deadline - reserve.min(time / 2)
}

fn respond<T>(result: Result<T, Failure>) -> Result<Response<T>, Status> {
    result
        .map(Response::new)
        .map_err(|failure| into_status(&failure))
}

#[tonic::async_trait]
impl ZtunnelBrokerService for Handler {
    type WatchSessionsStream =
        Pin<Box<dyn Stream<Item = Result<WatchSessionsResponse, Status>> + Send>>;

    async fn set_workloads(
        &self,
        request: Request<SetWorkloadsRequest>,
    ) -> Result<Response<SetWorkloadsResponse>, Status> {
        respond(self.set(request.into_inner()))
    }

    async fn add_workload(
        &self,
        request: Request<AddWorkloadRequest>,
    ) -> Result<Response<AddWorkloadResponse>, Status> {
        respond(self.add(request).await)
    }

    async fn remove_workload(
        &self,
        request: Request<RemoveWorkloadRequest>,
    ) -> Result<Response<RemoveWorkloadResponse>, Status> {
        respond(self.remove(request.into_inner()))
    }

    async fn set_ztunnels(
        &self,
        request: Request<SetZtunnelsRequest>,
    ) -> Result<Response<SetZtunnelsResponse>, Status> {
        respond(self.replace_ztunnels(request.into_inner()))
    }

    async fn list_workloads(
        &self,
        _: Request<ListWorkloadsRequest>,
    ) -> Result<Response<ListWorkloadsResponse>, Status> {
        Ok(Response::new(ListWorkloadsResponse {
            instance_id: self.instance_id.clone(),
            ..self.hub.list()
        }))
    }

    async fn watch_sessions(
        &self,
        _: Request<WatchSessionsRequest>,
    ) -> Result<Response<Self::WatchSessionsStream>, Status> {
        let events = self.events().map(|event| {
            let event = Some(event?);
            Ok(WatchSessionsResponse { event })
        });
        Ok(Response::new(Box::pin(self.shutdown.end_stream(events))))
    }
}

#[cfg(test)]
mod tests;
