//! The gRPC face: parse, ask, answer.

use std::{collections::BTreeSet, str::FromStr, time::Duration};

use daemon::{Lane, Readiness, Trace};
use inpod_proto::{
    Invalid, addresses_from, into_status,
    podevents::v1::{self as wire, pod_events_service_server::PodEventsService},
    required,
    types::v1 as types,
};
use tokio::time::Instant;
use tonic::{Request, Response, Status};
use workload::{
    Enrollment, Failure, InvalidIdentifier, NamespaceName, NetworkName, PodUid, Reason, SandboxRef,
};

use crate::{
    agents::Agents,
    checkpoint::{Intent, Record},
    explain,
    metrics::{Istio, Metrics, Phases},
    pipeline::forward,
    registry::Registry,
    source::{PodKey, Source},
    task::{AddCall, Shared},
    trace,
};

/// Answers for the pods of this node.
#[derive(Debug)]
pub struct Server {
    /// All tasks.
    pub registry: Registry,
    /// What tasks have in common.
    pub shared: std::sync::Arc<Shared>,
    /// What is depended on.
    pub conditions: Readiness,
    /// What is counted.
    pub metrics: Metrics,
    /// What is counted under the incumbent's names, if that is wanted.
    pub istio: Option<Istio>,
    /// The version to tell.
    pub version: &'static str,
}

/// How long a look at the other services may take.
const LOOK: Duration = Duration::from_secs(5);

fn failed(failure: impl Into<Failure>) -> Status {
    into_status(&failure.into())
}

fn invalid(field: &'static str, error: &InvalidIdentifier) -> Invalid {
    Invalid::new(field, error)
}

fn text<T: FromStr<Err = InvalidIdentifier>>(
    field: &'static str,
    text: &str,
) -> Result<T, Invalid> {
    text.parse().map_err(|error| invalid(field, &error))
}

/// A pod's name, and its UID where that is said.
fn selected(selector: Option<types::PodSelector>) -> Result<(PodKey, Option<PodUid>), Invalid> {
    let selector = selector.ok_or_else(|| Invalid::new("pod", "pod is required"))?;
    let key = (
        text("pod.namespace", &selector.namespace)?,
        text("pod.name", &selector.name)?,
    );
    let uid = Some(selector.uid).filter(|uid| !uid.is_empty());
    Ok((key, uid.map(|uid| text("pod.uid", &uid)).transpose()?))
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

fn add_call(request: Request<wire::AddPodRequest>) -> Result<(PodKey, AddCall), Invalid> {
    let (phases, trace) = (Phases::default(), Trace::of(request.metadata().as_ref()));
    let deadline = daemon::deadline(&request);
    let message = request.into_inner();
    let (key, uid) = selected(message.pod)?;
    let call = AddCall {
        sandbox: required("sandbox", message.sandbox)?,
        uid,
        netns: required("netns", message.netns)?,
        addresses: addresses_from(&message.addresses, "addresses")?,
        deadline,
        forward: forward(deadline),
        trace,
        phases,
    };
    Ok((key, call))
}

fn attachments(
    message: &wire::CollectGarbageRequest,
) -> Result<(NetworkName, BTreeSet<SandboxRef>), Invalid> {
    let network: NetworkName = text("network_name", &message.network_name)?;
    if network.as_str().is_empty() {
        return Err(Invalid::new("network_name", "network_name is required"));
    }
    let sandbox = |attachment: &wire::Attachment| {
        Ok(SandboxRef {
            network_name: network.clone(),
            container_id: text("valid_attachments.container_id", &attachment.container_id)?,
            ifname: text("valid_attachments.ifname", &attachment.ifname)?,
        })
    };
    let valid = message
        .valid_attachments
        .iter()
        .map(sandbox)
        .collect::<Result<_, Invalid>>()?;
    Ok((network, valid))
}

impl Server {
    fn agents(&self) -> &Agents {
        &self.shared.pipeline.agents
    }

    fn count(&self, added: Result<Enrollment, Reason>) {
        if let Some(istio) = &self.istio {
            istio.added(added);
        }
    }

    fn source(&self) -> &Source {
        &self.shared.source
    }

    async fn check(&self, sandbox: &SandboxRef) -> Result<Enrollment, Failure> {
        let unknown = || {
            Failure::new(
                Reason::SandboxUnknown,
                format!("sandbox {sandbox} is not recorded"),
            )
        };
        let record = self.registry.record(sandbox).ok_or_else(unknown)?;
        if !matches!(record.intent, Intent::Enrolled { .. }) {
            return Ok(Enrollment::None);
        }
        let deadline = Instant::now() + LOOK;
        let differences = self.agents().verify(&record, deadline).await?.differences;
        if !differences.is_empty() {
            return Err(Failure::new(Reason::RulesDiffer, differences.join("; ")));
        }
        self.served(&record, deadline)
            .await
            .map(|()| Enrollment::Ambient)
    }

    /// Whether a ztunnel has acknowledged the sandbox.
    async fn served(&self, record: &Record, deadline: Instant) -> Result<(), Failure> {
        let workloads = self.agents().workloads(deadline).await?;
        let reports = explain::ztunnels(&workloads, record);
        if reports
            .iter()
            .any(|report| report.acknowledged_at.is_some())
        {
            return Ok(());
        }
        Err(Failure::new(
            Reason::ZtunnelSilent,
            format!("no ztunnel has acknowledged {}", record.pod),
        ))
    }

    /// The key of a pod that is named or given by its UID.
    fn find(&self, selector: Option<types::PodSelector>) -> Result<PodKey, Failure> {
        let by_uid = selector
            .as_ref()
            .filter(|selector| selector.name.is_empty() && !selector.uid.is_empty());
        let Some(selector) = by_uid else {
            return Ok(selected(selector).map(|(key, _)| key)?);
        };
        let uid: PodUid = text("pod.uid", &selector.uid)?;
        let recorded = self
            .registry
            .records()
            .into_iter()
            .map(|record| record.pod)
            .find(|pod| pod.uid == uid);
        let shown = self
            .source()
            .inventory()
            .pod_of_uid(&uid)
            .map(|pod| pod.pod.clone());
        let unknown = || Failure::new(Reason::PodUnknown, format!("no pod of UID {uid} is known"));
        let pod = shown.or(recorded).ok_or_else(unknown)?;
        Ok((pod.namespace, pod.name))
    }

    async fn explain(&self, key: &PodKey) -> Result<wire::ExplainPodResponse, Failure> {
        let unknown = || {
            Failure::new(
                Reason::PodUnknown,
                format!("no pod {}/{} is known", key.0, key.1),
            )
        };
        let mut known = explain::of(&self.shared, &self.registry, key).ok_or_else(unknown)?;
        let deadline = Instant::now() + LOOK;
        if let Some(record) = self
            .registry
            .view(key)
            .and_then(|mut view| view.records.pop())
            && !matches!(record.intent, Intent::Out)
        {
            let (rules, seen, workloads) = tokio::join!(
                self.agents().verify(&record, deadline),
                self.agents().inspect(&record.sandbox, deadline),
                self.agents().workloads(deadline),
            );
            known.rules = rules
                .ok()
                .zip(seen.ok())
                .map(|(rules, seen)| explain::rules(rules, seen));
            known.ztunnels = workloads
                .map(|all| explain::ztunnels(&all, &record))
                .unwrap_or_default();
        }
        Ok(known)
    }
}

#[tonic::async_trait]
impl PodEventsService for Server {
    async fn add_pod(
        &self,
        request: Request<wire::AddPodRequest>,
    ) -> Result<Response<wire::AddPodResponse>, Status> {
        let parsed = add_call(request).inspect_err(|_| self.count(Err(Reason::InvalidField)));
        let (key, call) = parsed.map_err(failed)?;
        let timer = self.metrics.add(call.phases.clone());
        let added = self.registry.add(&key, call).await;
        timer.answered(&added);
        let kind = added.as_ref().map(|added| added.enrollment);
        self.count(kind.map_err(|failure| failure.reason));
        let added = added.map_err(failed)?;
        Ok(Response::new(wire::AddPodResponse {
            enrollment: types::Enrollment::from(added.enrollment).into(),
            reason: added.reason.number(),
            pod: Some((&added.pod).into()),
        }))
    }

    async fn check_pod(
        &self,
        request: Request<wire::CheckPodRequest>,
    ) -> Result<Response<wire::CheckPodResponse>, Status> {
        let sandbox: SandboxRef =
            required("sandbox", request.into_inner().sandbox).map_err(failed)?;
        let enrollment = self.check(&sandbox).await.map_err(failed)?;
        Ok(Response::new(wire::CheckPodResponse {
            enrollment: types::Enrollment::from(enrollment).into(),
        }))
    }

    async fn delete_pod(
        &self,
        request: Request<wire::DeletePodRequest>,
    ) -> Result<Response<wire::DeletePodResponse>, Status> {
        let trace = Trace::of(request.metadata().as_ref());
        let sandbox: SandboxRef =
            required("sandbox", request.into_inner().sandbox).map_err(failed)?;
        let deferred = trace::on_behalf_of(trace, self.registry.delete(&sandbox)).await;
        Ok(Response::new(wire::DeletePodResponse { deferred }))
    }

    async fn collect_garbage(
        &self,
        request: Request<wire::CollectGarbageRequest>,
    ) -> Result<Response<wire::CollectGarbageResponse>, Status> {
        let (network, valid) = attachments(request.get_ref()).map_err(failed)?;
        let stale = self
            .registry
            .sandboxes_of(&network)
            .into_iter()
            .filter(|sandbox| !valid.contains(sandbox));
        let mut dropped = Vec::new();
        for sandbox in stale {
            self.registry.delete(&sandbox).await;
            dropped.push((&sandbox).into());
        }
        Ok(Response::new(wire::CollectGarbageResponse { dropped }))
    }

    async fn get_status(
        &self,
        _: Request<wire::GetStatusRequest>,
    ) -> Result<Response<wire::GetStatusResponse>, Status> {
        let synced = self.shared.pipeline.synced.borrow().clone();
        Ok(Response::new(wire::GetStatusResponse {
            ready: synced.netconfig.is_some() && synced.broker.is_some(),
            node_name: self.shared.config.node_name.to_string(),
            version: self.version.to_owned(),
            conditions: explain::conditions(&self.conditions),
        }))
    }

    async fn explain_pod(
        &self,
        request: Request<wire::ExplainPodRequest>,
    ) -> Result<Response<wire::ExplainPodResponse>, Status> {
        let key = self.find(request.into_inner().pod).map_err(failed)?;
        self.explain(&key).await.map(Response::new).map_err(failed)
    }

    async fn list_pods(
        &self,
        request: Request<wire::ListPodsRequest>,
    ) -> Result<Response<wire::ListPodsResponse>, Status> {
        let namespace = request.into_inner().pod.unwrap_or_default().namespace;
        let namespace = Some(namespace).filter(|namespace| !namespace.is_empty());
        let namespace = namespace.map(|name| text::<NamespaceName>("namespace", &name));
        let namespace = namespace.transpose().map_err(failed)?;
        let mut keys: BTreeSet<PodKey> = self.source().inventory().pods.keys().cloned().collect();
        keys.extend(self.registry.views().into_keys());
        let wanted = keys
            .iter()
            .filter(|key| namespace.as_ref().is_none_or(|wanted| key.0 == *wanted));
        let pods = wanted.filter_map(|key| explain::of(&self.shared, &self.registry, key));
        Ok(Response::new(wire::ListPodsResponse {
            pods: pods.map(explain::summary).collect(),
        }))
    }

    type WatchEnrollmentsStream =
        tokio_stream::Empty<Result<wire::WatchEnrollmentsResponse, Status>>;

    async fn watch_enrollments(
        &self,
        _: Request<wire::WatchEnrollmentsRequest>,
    ) -> Result<Response<Self::WatchEnrollmentsStream>, Status> {
        Err(Status::unimplemented("not yet"))
    }

    async fn resync(
        &self,
        _: Request<wire::ResyncRequest>,
    ) -> Result<Response<wire::ResyncResponse>, Status> {
        Err(Status::unimplemented("not yet"))
    }
}
