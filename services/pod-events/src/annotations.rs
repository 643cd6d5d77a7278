//! Keeps pods' annotations and conditions in sync, and sends Events of their failures, when a pod's view or the source changes.
//!
//! `desired` computes a pod's annotation and condition, and selects the failures that are worth an Event.

pub(crate) mod desired;

use std::{collections::HashMap, sync::Arc};

use inpod_service::Readiness;
use inpod_types::{Failure, PodRef, Reason};
use kube::Client;
use tokio::{
    sync::{
        broadcast::{self, error::TryRecvError},
        watch,
    },
    task::{JoinError, JoinSet},
    time::{Instant, sleep_until},
};

use crate::{
    inventory::Inventory,
    pod::PodKey,
    status::{
        EventKind,
        patch::{PatchRequest, patch},
        queue::{ANNOTATION_TIMEOUT, PatchOutcome},
    },
    tasks::{Registry, Shared},
};
use desired::{PodStatus, ReportedFailure};

/// The condition that annotations can be written. The condition does not affect readiness, because ADDs do not need
/// annotations.
const CONDITION: &str = "annotations";

struct Controller {
    client: Client,
    shared: Arc<Shared>,
    registry: Registry,
    conditions: Readiness,
    adoption_done: watch::Receiver<bool>,
    failures: HashMap<PodRef, ReportedFailure>,
    in_flight: JoinSet<(PatchRequest, PatchOutcome)>,
    /// The last logged error of patches, until no patch fails.
    error: Option<String>,
}

/// Starts to keep annotations in sync. Pods without a known sandbox keep their annotation until `adoption_done`,
/// because the sandbox may not have been found yet.
pub(crate) fn start(
    shared: &Arc<Shared>,
    registry: &Registry,
    conditions: &Readiness,
    adoption_done: watch::Receiver<bool>,
) {
    let Some(api_server) = &shared.status.api_server else {
        return;
    };
    conditions.set(CONDITION, Ok(()));
    let controller = Controller {
        client: api_server.client.clone(),
        shared: Arc::clone(shared),
        registry: registry.clone(),
        conditions: conditions.clone(),
        adoption_done,
        failures: HashMap::new(),
        in_flight: JoinSet::new(),
        error: None,
    };
    // The subscription starts here rather than in the controller, so that no change is missed before the controller's
    // first poll.
    let controller = controller.run(shared.pod_changes.subscribe());
    tokio::spawn(inpod_service::abort_on_panic("status", controller));
}

impl Controller {
    async fn run(mut self, mut pod_changes: broadcast::Receiver<Arc<PodKey>>) {
        let mut inventories = self.shared.source.changes();
        let mut before = Arc::clone(&inventories.borrow_and_update());
        self.observe_all(&before);
        loop {
            // The steps share one time, so that nothing becomes due between two of them without a wakeup.
            let now = Instant::now();
            self.send(now);
            self.report_late(now);
            self.report_condition();
            let wakeup = self.shared.status.queue().next_wakeup(now);
            tokio::select! {
                changed = pod_changes.recv() => match changed {
                    Ok(key) => {
                        self.observe(&key);
                        self.observe_arrived(&mut pod_changes, &before);
                    }
                    Err(broadcast::error::RecvError::Lagged(_)) => self.observe_all(&before),
                    Err(broadcast::error::RecvError::Closed) => return,
                },
                Ok(()) = inventories.changed() => {
                    let now = Arc::clone(&inventories.borrow_and_update());
                    if now.is_complete() && !before.is_complete() {
                        self.shared.status.queue().retry_now();
                    }
                    let affected = now.affected_since(&before);
                    affected.iter().for_each(|key| self.observe(key));
                    before = now;
                }
                Ok(()) = self.adoption_done.changed() => self.observe_all(&before),
                Some(joined) = self.in_flight.join_next() => self.complete(joined),
                () = sleep_until(wakeup.unwrap_or(now)), if wakeup.is_some() => {}
            }
        }
    }

    /// Observes the changes that have arrived, because the steps after a change pass over all entries of the queue.
    fn observe_arrived(
        &mut self,
        pod_changes: &mut broadcast::Receiver<Arc<PodKey>>,
        inventory: &Inventory,
    ) {
        loop {
            match pod_changes.try_recv() {
                Ok(key) => self.observe(&key),
                Err(TryRecvError::Lagged(_)) => self.observe_all(inventory),
                Err(TryRecvError::Empty | TryRecvError::Closed) => return,
            }
        }
    }

    fn observe_all(&mut self, inventory: &Inventory) {
        inventory.pods.keys().for_each(|key| self.observe(key));
    }

    fn observe(&mut self, key: &PodKey) {
        let inventory = self.shared.source.inventory();
        // The lock is taken before the view is read, so that `StatusReporter::has_withdrawn` sees a consistent state.
        let mut queue = self.shared.status.queue();
        let shown = inventory.pod(key);
        let is_known = |pod: &PodRef| {
            let has_name = pod.namespace == key.0 && pod.name == key.1;
            !has_name || shown.is_some_and(|shown| shown.pod == *pod)
        };
        self.failures.retain(|pod, _| is_known(pod));
        let Some(pod) = shown else {
            return queue.forget(key);
        };
        let view = self.registry.view(key).unwrap_or_default();
        let adopted = *self.adoption_done.borrow();
        let decision = self.shared.decide(pod);
        let is_selected = decision.reason == Reason::SandboxedRuntime
            && !inventory.is_namespace_unknown(&pod.pod.namespace);
        let status = PodStatus {
            sandboxed_class: pod.runtime_class.as_deref().filter(|_| is_selected),
            ..PodStatus::of(pod, &view, &decision, adopted)
        };
        let (desired, serving_sandbox) = (status.desired(), status.serving_sandbox());
        queue.observe(pod, desired, serving_sandbox, Instant::now());
        drop(queue);
        let failure = self.failures.entry(pod.pod.clone()).or_default();
        let event = status.event(failure);
        if failure.is_empty() {
            self.failures.remove(&pod.pod);
        }
        if let Some((kind, reason, message)) = event {
            self.shared.status.event(&pod.pod, kind, reason, &message);
        }
    }

    /// Sends due patches, up to the limit in flight.
    fn send(&mut self, now: Instant) {
        while let Some(request) = self.shared.status.queue().next(now) {
            self.in_flight.spawn(patch(self.client.clone(), request));
        }
    }

    fn complete(&mut self, joined: Result<(PatchRequest, PatchOutcome), JoinError>) {
        let Ok((request, outcome)) = joined else {
            tracing::error!("The task that patches an annotation panicked");
            return;
        };
        let result = outcome.name();
        tracing::debug!(pod = %request.pod, status = ?request.status, result, "Patched the status");
        self.shared.status.metrics.count_patch(result);
        let now = Instant::now();
        let lag = self.shared.status.queue().complete(&request, outcome, now);
        if let Some(lag) = lag {
            self.shared.status.metrics.lag.observe(lag.as_secs_f64());
        }
    }

    fn report_late(&self, now: Instant) {
        let late = self.shared.status.queue().take_late(now);
        for pod in late {
            let seconds = ANNOTATION_TIMEOUT.as_secs();
            let message = format!("Ready and in the mesh, but not annotated for {seconds} s");
            let (kind, reason) = (EventKind::Warning, Reason::AnnotationLate);
            self.shared.status.event(&pod, kind, reason, &message);
        }
    }

    fn report_condition(&mut self) {
        let failures = self.shared.status.queue().failures();
        let condition = match &failures {
            Some((pods, error)) => Err(format!("cannot write the status of {pods} pods: {error}")),
            None => Ok(()),
        };
        self.conditions.set(CONDITION, condition);
        let error = failures.map(|(_, error)| error);
        if let Some(message) = error.clone().filter(|_| error != self.error) {
            let failure = Failure::new(Reason::AnnotationFailed, message);
            tracing::warn!(%failure, "Cannot write the status of pods; will retry");
        }
        self.error = error;
    }
}
