//! Reports pods to Kubernetes: the annotation `ambient.istio.io/redirection`, and Events.
//!
//! Nothing waits for the writes. `queue` schedules patches, and the module `annotations` decides on them.

mod annotation;
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
use kube::Client;
use prometheus_client::registry::Registry as Metrics;
use tokio::{sync::mpsc, time::Instant};

use crate::source::Source;
pub(crate) use annotation::Annotation;
use events::{QUEUE_CAPACITY, QueuedEvent};
use metrics::StatusMetrics;
use queue::PatchQueue;
use rate_limit::RateLimits;

/// The reporting controller of Events and the field manager of patches.
const REPORTER: &str = "inpod.io/pod-events";

#[derive(Clone, Debug, Default)]
pub struct StatusReporter(Option<Arc<Inner>>);

pub(crate) struct Inner {
    pub(crate) client: Client,
    source: Source,
    queue: Mutex<PatchQueue>,
    rate_limits: Mutex<RateLimits>,
    event_queue: mpsc::Sender<QueuedEvent>,
    pub(crate) metrics: StatusMetrics,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner").finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    Normal,
    Warning,
}

impl StatusReporter {
    /// Creates a reporter that writes nothing, because the pods come from a directory.
    pub fn disabled() -> Self {
        Self(None)
    }

    /// Creates a reporter that sends Events from now on, and annotations after `start`. The reporter is disabled for
    /// pods from a directory.
    pub fn for_source(source: &Source, node: &NodeName) -> Self {
        source
            .client()
            .map_or_else(Self::disabled, |client| Self::new(client, source, node))
    }

    pub(crate) fn new(client: Client, source: &Source, node: &NodeName) -> Self {
        let (event_queue, queued) = mpsc::channel(QUEUE_CAPACITY);
        let metrics = StatusMetrics::default();
        let events = events::send(client.clone(), node.clone(), queued, metrics.clone());
        tokio::spawn(inpod_service::abort_on_panic("events", events));
        Self(Some(Arc::new(Inner {
            client,
            source: source.clone(),
            queue: Mutex::default(),
            rate_limits: Mutex::default(),
            event_queue,
            metrics,
        })))
    }

    pub(crate) fn inner(&self) -> Option<&Arc<Inner>> {
        self.0.as_ref()
    }

    pub(crate) fn unmet(&self) -> u64 {
        self.0.as_ref().map_or(0, |inner| inner.queue().unmet())
    }

    /// Returns the number of annotations that the API server refuses to change, apparently for good.
    pub(crate) fn refused(&self) -> u64 {
        self.0.as_ref().map_or(0, |inner| inner.queue().refused())
    }

    /// Returns whether the API server refuses to withdraw the pod's annotation, apparently for good.
    pub(crate) fn is_refused(&self, pod: &PodRef) -> bool {
        let Some(inner) = &self.0 else { return false };
        let key = (pod.namespace.clone(), pod.name.clone());
        inner.queue().is_refused(&key, &pod.uid, Instant::now())
    }

    pub(crate) fn register(&self, metrics: &mut Metrics) {
        let Some(inner) = &self.0 else { return };
        let counted = Arc::clone(inner);
        inner
            .metrics
            .register(metrics, move || counted.queue().unmet());
    }

    /// Returns whether peers see that the pod is not redirected: the API server has accepted the removal of the
    /// annotation, or the pod is gone.
    ///
    /// The result is false while the outcome of the last write is unknown. The pod's task is woken when the result
    /// becomes true, if the task published the intent to leave before asking.
    pub fn has_withdrawn(&self, pod: &PodRef) -> bool {
        let Some(inner) = &self.0 else { return true };
        let inventory = inner.source.inventory();
        let key = (pod.namespace.clone(), pod.name.clone());
        // A static pod stays the same when its mirror pod gets another UID.
        let is_same_pod =
            |shown: &&crate::pod::Pod| shown.has_uid(&pod.uid) || shown.runtime_uid.is_some();
        match inventory.pod(&key).filter(is_same_pod) {
            Some(shown) => {
                let redirection = shown.redirection.as_deref();
                inner
                    .queue()
                    .is_withdrawn(&key, &shown.pod.uid, redirection, Instant::now())
            }
            None => inventory.is_complete() || inventory.pods.contains_key(&key),
        }
    }

    /// Queues an Event without waiting, and drops the Event above the rate limits.
    pub fn event(&self, pod: &PodRef, kind: EventKind, reason: Reason, message: &str) {
        let Some(inner) = &self.0 else {
            tracing::debug!(%pod, ?kind, %reason, message, "No Event: pods come from a directory");
            return;
        };
        tracing::debug!(%pod, ?kind, %reason, message, "Event");
        let queued = QueuedEvent {
            pod: pod.clone(),
            kind,
            reason,
            message: message.to_owned(),
            created: Instant::now(),
        };
        let is_allowed = inner
            .rate_limits
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .allow(&pod.uid, reason, Instant::now());
        if !is_allowed || inner.event_queue.try_send(queued).is_err() {
            inner.metrics.event("dropped");
        }
    }
}

impl Inner {
    pub(crate) fn queue(&self) -> MutexGuard<'_, PatchQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
