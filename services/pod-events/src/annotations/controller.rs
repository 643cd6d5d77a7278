//! Keeps annotations in sync and sends Events when a pod's view or the source changes.

use std::sync::Arc;

use inpod_service::Readiness;
use inpod_types::{Failure, Reason};
use tokio::{
    sync::{
        broadcast::{self, error::RecvError},
        watch,
    },
    task::{JoinError, JoinSet},
    time::{Instant, sleep_until},
};

use super::{desired::PodStatus, failure_events::FailureEvents};
use crate::{
    checkpoint::Intent,
    inventory::Inventory,
    pod::PodKey,
    registry::Registry,
    status::{
        Annotation, EventKind, Inner,
        patch::patch,
        queue::{ANNOTATION_TIMEOUT, PatchOutcome, PatchQueue, PatchRequest, PodObservation},
    },
    task::Shared,
};

/// The condition that annotations can be written. The condition does not affect readiness, because ADDs do not need
/// annotations.
const CONDITION: &str = "annotations";

pub(super) struct Controller {
    inner: Arc<Inner>,
    shared: Arc<Shared>,
    registry: Registry,
    conditions: Readiness,
    failure_events: FailureEvents,
    in_flight: JoinSet<(PatchRequest, PatchOutcome)>,
    adoption_done: bool,
    reported: Option<(usize, String)>,
}

impl Controller {
    pub(super) fn new(
        inner: Arc<Inner>,
        shared: Arc<Shared>,
        registry: Registry,
        conditions: Readiness,
    ) -> Self {
        conditions.set(CONDITION, Ok(()));
        Self {
            inner,
            shared,
            registry,
            conditions,
            failure_events: FailureEvents::default(),
            in_flight: JoinSet::new(),
            adoption_done: false,
            reported: None,
        }
    }

    pub(super) async fn run(
        mut self,
        mut pod_changes: broadcast::Receiver<Arc<PodKey>>,
        mut adoption_done: watch::Receiver<bool>,
    ) {
        let mut inventories = self.shared.source.changes();
        let mut before = Arc::clone(&inventories.borrow_and_update());
        self.adoption_done = *adoption_done.borrow_and_update();
        self.observe_all(&before);
        loop {
            let wakeup = self.inner.queue().next_wakeup(Instant::now());
            tokio::select! {
                changed = pod_changes.recv() => match changed {
                    Ok(key) => self.observe(&key),
                    Err(RecvError::Lagged(_)) => self.observe_all(&before),
                    Err(RecvError::Closed) => return,
                },
                Ok(()) = inventories.changed() => {
                    let now = Arc::clone(&inventories.borrow_and_update());
                    self.observe_changes(&before, &now);
                    before = now;
                }
                Ok(()) = adoption_done.changed() => {
                    self.adoption_done = *adoption_done.borrow_and_update();
                    self.observe_all(&before);
                }
                Some(joined) = self.in_flight.join_next() => self.complete(joined),
                () = sleep_until(wakeup.unwrap_or_else(Instant::now)), if wakeup.is_some() => {
                    self.handle_timers();
                }
            }
            self.send();
            self.report_condition();
        }
    }

    fn observe_all(&mut self, inventory: &Inventory) {
        inventory.pods.keys().for_each(|key| self.observe(key));
    }

    fn observe_changes(&mut self, before: &Inventory, now: &Inventory) {
        if now.is_complete() && !before.is_complete() {
            self.inner.queue().retry_now(Instant::now());
        }
        let touched = now.affected_since(before);
        touched.iter().for_each(|key| self.observe(key));
    }

    /// Updates the queue and compares under one lock, so that [`StatusReporter::has_withdrawn`]
    /// sees a consistent state.
    fn observe(&mut self, key: &PodKey) {
        let inventory = self.shared.source.inventory();
        let Some(pod) = inventory.pod(key) else {
            self.inner.queue().remove(key);
            self.failure_events.remove(key);
            return;
        };
        let decision = self.shared.decide(pod);
        let mut queue = self.inner.queue();
        let view = self.registry.view(key);
        let status = PodStatus::of(pod, view.as_ref(), &decision, self.adoption_done);
        let observation = PodObservation {
            uid: &pod.pod.uid,
            observed: pod.redirection.as_deref(),
            desired: status.desired(),
            serving_sandbox: status.serving_sandbox(),
        };
        let now = Instant::now();
        let is_withdrawn =
            |queue: &PatchQueue| queue.is_withdrawn(key, &pod.pod.uid, observation.observed, now);
        let was_withdrawn = is_withdrawn(&queue);
        queue.observe(key, &observation, now);
        let is_newly_withdrawn = !was_withdrawn && is_withdrawn(&queue);
        drop(queue);
        if is_newly_withdrawn {
            self.wake(key);
        }
        if let Some((kind, reason, message)) = self.failure_events.event_for(key, &status) {
            self.shared.status.event(&pod.pod, kind, reason, &message);
        }
    }

    /// Sends due patches, up to the limit in flight.
    fn send(&mut self) {
        loop {
            let Some(request) = self.inner.queue().next(Instant::now()) else {
                return;
            };
            let client = self.inner.client.clone();
            self.in_flight.spawn(async move {
                let outcome = patch(client, &request).await;
                (request, outcome)
            });
        }
    }

    fn complete(&mut self, joined: Result<(PatchRequest, PatchOutcome), JoinError>) {
        let Ok((request, outcome)) = joined else {
            tracing::error!("The task that patches an annotation panicked");
            return;
        };
        let result = match &outcome {
            PatchOutcome::Accepted => "accepted",
            PatchOutcome::Gone => "gone",
            PatchOutcome::Refused(_) => "refused",
            PatchOutcome::Unanswered(_) => "unanswered",
        };
        tracing::debug!(pod = format!("{}/{}", request.key.0, request.key.1), annotation = ?request.annotation, result, "Patched the annotation");
        self.inner.metrics.patch(result);
        let is_withdrawn = outcome == PatchOutcome::Gone
            || (outcome == PatchOutcome::Accepted && request.annotation != Annotation::Enabled);
        let lag = self
            .inner
            .queue()
            .complete(&request, outcome, Instant::now());
        if let Some(lag) = lag {
            self.inner.metrics.observe_lag(lag);
        }
        if is_withdrawn {
            self.wake(&request.key);
        }
    }

    /// Wakes the task of a pod that waits for the announcement of its withdrawal.
    fn wake(&self, key: &PodKey) {
        let leaves = |intent: &Intent| matches!(intent, Intent::Announcing);
        let view = self.registry.view(key).unwrap_or_default();
        if view.records.iter().any(|record| leaves(&record.intent)) {
            self.registry.wake(|known| known == key);
        }
    }

    fn handle_timers(&mut self) {
        let (late, stale) = self.inner.queue().expired(Instant::now());
        let inventory = self.shared.source.inventory();
        for pod in late.iter().filter_map(|key| inventory.pod(key)) {
            let message = format!(
                "Ready and in the mesh, but not annotated for {} s",
                ANNOTATION_TIMEOUT.as_secs()
            );
            let reason = Reason::AnnotationLate;
            self.shared
                .status
                .event(&pod.pod, EventKind::Warning, reason, &message);
        }
        stale.iter().for_each(|key| self.observe(key));
    }

    fn report_condition(&mut self) {
        let failures = self.inner.queue().failures();
        if failures == self.reported {
            return;
        }
        let message = |failures: &Option<(usize, String)>| {
            failures.as_ref().map(|(_, message)| message.clone())
        };
        if let Some(now) = message(&failures)
            && message(&self.reported).is_none_or(|before| before != now)
        {
            let failure = Failure::new(Reason::AnnotationFailed, now);
            tracing::warn!(%failure, "Cannot write annotations of pods; will retry");
        }
        let message =
            |(pods, message): &(usize, String)| format!("cannot annotate {pods} pods: {message}");
        let message = failures.as_ref().map(message);
        self.conditions.set(CONDITION, message.map_or(Ok(()), Err));
        self.reported = failures;
    }
}
