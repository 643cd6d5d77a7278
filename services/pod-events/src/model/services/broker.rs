use std::{pin::Pin, time::Duration};

use futures_util::{FutureExt as _, Stream, StreamExt as _, stream};
use inpod_proto::{
    into_status, required,
    ztunnelbroker::v1::{
        self as wire, watch_sessions_response::Event,
        ztunnel_broker_service_server::ZtunnelBrokerService,
    },
};
use inpod_types::{Failure, Reason, SandboxRef, Workload};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status};

use super::{Answer, Services, disconnected};
use crate::model::node::{Method, Node, SharedNode, index_of};

/// The part of a caller's time that the broker reserves for undoing an add.
const UNDO_RESERVE: Duration = Duration::from_secs(3);

fn check_instance(node: &Node, given: &str) -> Result<(), Failure> {
    if node.broker.instance.borrow().to_string() == given {
        return Ok(());
    }
    Err(Failure::new(Reason::InstanceMismatch, "another run"))
}

fn check_change(node: &Node, sandbox: &SandboxRef, revision: u64) -> Result<(), Failure> {
    if !node.broker.seeded {
        return Err(Failure::new(
            Reason::NotSeeded,
            "the desired set is not known",
        ));
    }
    let entry = node.broker.entries.get(sandbox).map(|it| it.revision.0);
    if entry.max(node.broker.tombstones.get(sandbox).copied()) > Some(revision) {
        return Err(Failure::new(
            Reason::RevisionStale,
            "a newer revision is known",
        ));
    }
    Ok(())
}

/// Checks that no living pod loses the listeners to which the pod's rules point.
fn check_listeners_stay(node: &mut Node, sandbox: &SandboxRef) {
    let Some(index) = index_of(&sandbox.container_id) else {
        return;
    };
    if node.sandboxes[index].listeners_lost || !node.broker.entries.contains_key(sandbox) {
        return;
    }
    if node.is_protected(index) {
        node.violate(format!(
            "{sandbox} lost its workload, which nothing asked for"
        ));
    }
}

/// Returns whether ztunnel has acknowledged the workload; `None` while the answer is open.
fn outcome(node: &Node, added: &Workload) -> Option<Result<(), Failure>> {
    let broker = &node.broker;
    if broker.entries.get(&added.sandbox) != Some(added) {
        return Some(Err(Failure::new(Reason::RevisionStale, "superseded")));
    }
    let served = broker.serving.get(added.uid.as_str());
    if served
        .is_some_and(|(sandbox, netns)| *sandbox == added.sandbox && Some(*netns) == added.netns)
    {
        return Some(Ok(()));
    }
    let refused = broker.refused.contains(&added.sandbox);
    refused.then(|| Err(Failure::new(Reason::ZtunnelRefused, "ztunnel refused it")))
}

async fn add(
    node: SharedNode,
    instance: String,
    workload: Workload,
    until: Instant,
) -> Result<(), Failure> {
    let mut changed = {
        let mut node_now = node.lock();
        check_instance(&node_now, &instance)?;
        check_change(&node_now, &workload.sandbox, workload.revision.0)?;
        node_now.claimed(&workload.sandbox)?;
        let entries = &mut node_now.broker.entries;
        let newer =
            |known: &&Workload| known.uid == workload.uid && known.revision > workload.revision;
        if entries.values().any(|known| newer(&known)) {
            return Err(Failure::new(
                Reason::RevisionStale,
                "the pod has a newer sandbox",
            ));
        }
        entries.insert(workload.sandbox.clone(), workload.clone());
        node_now.broker.refused.remove(&workload.sandbox);
        let changed = node_now.broker.changed.subscribe();
        node_now.serve();
        changed
    };
    loop {
        changed.mark_unchanged();
        if let Some(outcome) = outcome(&node.lock(), &workload) {
            return outcome;
        }
        if timeout_at(until, changed.changed()).await.is_err() {
            return Err(Failure::new(Reason::ZtunnelSilent, "ztunnel is silent"));
        }
    }
}

#[tonic::async_trait]
impl ZtunnelBrokerService for Services {
    type WatchSessionsStream =
        Pin<Box<dyn Stream<Item = Result<wire::WatchSessionsResponse, Status>> + Send>>;

    async fn set_workloads(
        &self,
        request: Request<wire::SetWorkloadsRequest>,
    ) -> Answer<wire::SetWorkloadsResponse> {
        let request = request.into_inner();
        self.call(Method::SetWorkloads, None, move |node| {
            check_instance(node, &request.instance_id)?;
            let all = request.workloads.into_iter().map(Workload::try_from);
            let all: Vec<Workload> = all.collect::<Result<_, _>>()?;
            set(node, request.revision, all);
            Ok(wire::SetWorkloadsResponse::default())
        })
        .await
    }

    async fn add_workload(
        &self,
        request: Request<wire::AddWorkloadRequest>,
    ) -> Answer<wire::AddWorkloadResponse> {
        let deadline = inpod_service::deadline(&request);
        let time = deadline.saturating_duration_since(Instant::now());
        let until = deadline - UNDO_RESERVE.min(time / 2);
        let request = request.into_inner();
        let workload: Workload =
            required("workload", request.workload).map_err(|error| into_status(&error.into()))?;
        let about = Some(workload.sandbox.clone());
        self.perform(Method::AddWorkload, about, move |services| {
            async move {
                let added = add(services.0, request.instance_id, workload, until).await;
                added
                    .map(|()| wire::AddWorkloadResponse::default())
                    .map_err(|failure| into_status(&failure))
            }
            .boxed()
        })
        .await
    }

    async fn remove_workload(
        &self,
        request: Request<wire::RemoveWorkloadRequest>,
    ) -> Answer<wire::RemoveWorkloadResponse> {
        let request = request.into_inner();
        let sandbox: SandboxRef =
            required("sandbox", request.sandbox).map_err(|error| into_status(&error.into()))?;
        let about = Some(sandbox.clone());
        self.call(Method::RemoveWorkload, about, move |node| {
            check_instance(node, &request.instance_id)?;
            check_change(node, &sandbox, request.revision)?;
            check_listeners_stay(node, &sandbox);
            node.broker.entries.remove(&sandbox);
            // An earlier acknowledgement by ztunnel does not count for a later add.
            node.broker
                .serving
                .retain(|_, (served, _)| *served != sandbox);
            node.broker.tombstones.insert(sandbox, request.revision);
            node.serve();
            Ok(wire::RemoveWorkloadResponse::default())
        })
        .await
    }

    async fn list_workloads(
        &self,
        _: Request<wire::ListWorkloadsRequest>,
    ) -> Answer<wire::ListWorkloadsResponse> {
        self.call(Method::ListWorkloads, None, |node| {
            let broker = &node.broker;
            let status = |workload: &Workload| {
                let served = broker.serving.values().any(|it| it.0 == workload.sandbox);
                wire::WorkloadStatus {
                    workload: Some(workload.into()),
                    states: vec![wire::WorkloadState {
                        sandbox: Some((&workload.sandbox).into()),
                        acknowledged_at: served.then(Default::default),
                        ..wire::WorkloadState::default()
                    }],
                    ..wire::WorkloadStatus::default()
                }
            };
            Ok(wire::ListWorkloadsResponse {
                seeded: broker.seeded,
                workloads: broker.entries.values().map(status).collect(),
                ..wire::ListWorkloadsResponse::default()
            })
        })
        .await
    }

    async fn watch_sessions(
        &self,
        _: Request<wire::WatchSessionsRequest>,
    ) -> Answer<Self::WatchSessionsStream> {
        let (is_up, _) = self.is_up(Method::AddWorkload);
        if !is_up {
            return Err(disconnected());
        }
        let (sender, end) = mpsc::unbounded_channel();
        let mut node = self.0.lock();
        node.broker.watchers.push(sender);
        let instance = node.broker.instance.borrow().to_string();
        let first = wire::WatchSessionsResponse {
            event: Some(Event::InstanceId(instance)),
        };
        let end = UnboundedReceiverStream::new(end).map(|()| Err(disconnected()));
        Ok(Response::new(Box::pin(
            stream::iter([Ok(first)]).chain(end),
        )))
    }

    async fn set_ztunnels(
        &self,
        _: Request<wire::SetZtunnelsRequest>,
    ) -> Answer<wire::SetZtunnelsResponse> {
        Err(Status::unimplemented("no part of the model"))
    }
}

fn set(node: &mut Node, revision: u64, all: Vec<Workload>) {
    for index in 0..node.sandboxes.len() {
        let is_named = all
            .iter()
            .any(|it| index_of(&it.sandbox.container_id) == Some(index));
        if !is_named && !node.sandboxes[index].sidecar && node.is_protected(index) {
            node.violate(format!("the desired set lacks c{index}, which is enrolled"));
        }
    }
    let broker = &mut node.broker;
    broker.seeded = true;
    broker.entries.retain(|sandbox, known| {
        all.iter().any(|it| it.sandbox == *sandbox) || known.revision.0 > revision
    });
    for workload in all {
        let known = broker
            .entries
            .get(&workload.sandbox)
            .map(|it| it.revision.0);
        let removed = broker.tombstones.get(&workload.sandbox).copied();
        if known.max(removed) <= Some(workload.revision.0) {
            broker.entries.insert(workload.sandbox.clone(), workload);
        }
    }
    node.serve();
}
