//! Reports pods to Kubernetes: the annotation `ambient.istio.io/redirection`, and Events.
//!
//! Nothing waits for the writes. `queue` schedules patches, and the module `annotations` decides on them.

pub(crate) mod condition;
mod events;
pub(crate) mod metrics;
pub(crate) mod patch;
pub(crate) mod queue;
mod rate_limit;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use inpod_types::{NodeName, PodRef, Reason};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{Client, runtime::events::Recorder};
use prometheus_client::registry::Registry;
use tokio::{sync::mpsc, time::Instant};

use crate::source::Source;
use events::{QUEUE_CAPACITY, QueuedEvent};
pub use kube::runtime::events::EventType as EventKind;
use metrics::StatusMetrics;
pub(crate) use patch::{Annotation, DesiredStatus};
use queue::PatchQueue;
use rate_limit::RateLimits;

/// The reporting controller of Events and the field manager of patches.
pub(crate) const REPORTER: &str = "inpod.io/pod-events";

#[derive(Clone, Debug, Default)]
pub struct StatusReporter {
    queue: Arc<Mutex<PatchQueue>>,
    pub(crate) metrics: StatusMetrics,
    /// `None` if the pods come from a directory: nothing is written then.
    pub(crate) api_server: Option<Arc<ApiServer>>,
}

pub(crate) struct ApiServer {
    pub(crate) client: Client,
    source: Source,
    rate_limits: Mutex<RateLimits>,
    events: mpsc::Sender<QueuedEvent>,
    node: NodeName,
}

impl fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiServer").finish_non_exhaustive()
    }
}

impl StatusReporter {
    /// Creates a reporter that writes nothing, because the pods come from a directory.
    pub fn disabled() -> Self {
        Self::default()
    }

    /// Creates a reporter that sends Events from now on, and annotations after `start`. The reporter is disabled for
    /// pods from a directory.
    pub fn for_source(source: &Source, node: &NodeName) -> Self {
        let client = source.client();
        client.map_or_else(Self::disabled, |client| Self::new(client, source, node))
    }

    pub(crate) fn new(client: Client, source: &Source, node: &NodeName) -> Self {
        let (events, queued) = mpsc::channel(QUEUE_CAPACITY);
        let metrics = StatusMetrics::default();
        let recorder = Recorder::new(client.clone(), inpod_kube::reporter(REPORTER, node));
        let sender = events::send(recorder, queued, metrics.clone());
        tokio::spawn(inpod_service::abort_on_panic("events", sender));
        let api_server = ApiServer {
            client,
            source: source.clone(),
            rate_limits: Mutex::default(),
            events,
            node: node.clone(),
        };
        Self {
            queue: Arc::default(),
            metrics,
            api_server: Some(Arc::new(api_server)),
        }
    }

    pub(crate) fn queue(&self) -> MutexGuard<'_, PatchQueue> {
        let queue = self.queue.lock();
        queue.unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of annotations that are not in sync.
    pub(crate) fn unmet(&self) -> u64 {
        self.queue().unmet(Instant::now())
    }

    /// Returns the number of annotations that the API server refuses to change, apparently for good.
    pub(crate) fn refused(&self) -> u64 {
        self.queue().refused(Instant::now())
    }

    /// Returns whether the API server refuses to withdraw the pod's annotation, apparently for good.
    pub(crate) fn is_refused(&self, pod: &PodRef) -> bool {
        self.queue().is_refused(pod, Instant::now())
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        if self.api_server.is_some() {
            let status = self.clone();
            self.metrics.register(registry, move || status.unmet());
        }
    }

    /// Returns whether peers see that the pod is not redirected: the API server has accepted the removal of the
    /// annotation, or the pod is gone.
    ///
    /// The result is false while the outcome of the last write is unknown.
    pub fn has_withdrawn(&self, pod: &PodRef) -> bool {
        let Some(api_server) = &self.api_server else {
            return true;
        };
        let inventory = api_server.source.inventory();
        match inventory.pod(&(pod.namespace.clone(), pod.name.clone())) {
            // A static pod stays the same when its mirror pod gets another UID.
            Some(shown) if shown.has_uid(&pod.uid) || shown.runtime_uid.is_some() => {
                self.queue().is_withdrawn(shown, Instant::now())
            }
            Some(_) => true,
            None => inventory.is_complete(),
        }
    }

    /// Queues an Event without waiting, and drops the Event above the rate limits.
    pub fn event(&self, pod: &PodRef, kind: EventKind, reason: Reason, message: &str) {
        let Some(api_server) = &self.api_server else {
            tracing::debug!(%pod, ?kind, %reason, message, "No Event: pods come from a directory");
            return;
        };
        tracing::debug!(%pod, ?kind, %reason, message, "Event");
        self.queue_event(
            api_server,
            inpod_kube::regarding(pod),
            kind,
            (reason, message),
        );
    }

    /// Queues a warning about this node.
    pub(crate) fn node_event(&self, reason: Reason, message: &str) {
        tracing::warn!(%reason, message, "Event about this node");
        if let Some(api_server) = &self.api_server {
            let node = inpod_kube::regarding_node(&api_server.node);
            self.queue_event(api_server, node, EventKind::Warning, (reason, message));
        }
    }

    fn queue_event(
        &self,
        api_server: &ApiServer,
        subject: ObjectReference,
        kind: EventKind,
        (reason, message): (Reason, &str),
    ) {
        let queued = QueuedEvent {
            subject,
            kind,
            reason,
            message: message.to_owned(),
            created: Instant::now(),
        };
        let limits = api_server.rate_limits.lock();
        let mut limits = limits.unwrap_or_else(PoisonError::into_inner);
        let uid = queued.subject.uid.as_deref().unwrap_or_default();
        let is_allowed = limits.allow(uid, reason, queued.created);
        if !is_allowed || api_server.events.try_send(queued).is_err() {
            self.metrics.count_event("dropped");
        }
    }
}
