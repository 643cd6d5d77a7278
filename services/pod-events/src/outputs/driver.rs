//! What sets off that Kubernetes is told: a pod's view changed, the source shows something else, or time has passed.

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

use super::{
    Inner, Kind, Outputs,
    ledger::{Answer, LATE, Ledger, Look, Order},
    patch::patch,
    reports::Reports,
    wish::{Mark, Standing},
};
use crate::{
    checkpoint::Intent,
    registry::Registry,
    source::{Inventory, PodKey},
    task::Shared,
};

/// The condition that tells whether annotations can be written. Readiness does not need them: ADDs are served.
const CONDITION: &str = "annotations";

/// Has annotations and Events follow the pods.
pub(super) struct Driver {
    outputs: Outputs,
    inner: Arc<Inner>,
    shared: Arc<Shared>,
    registry: Registry,
    conditions: Readiness,
    reports: Reports,
    under_way: JoinSet<(Order, Answer)>,
    taken_over: bool,
    told: Option<(usize, String)>,
}

impl Driver {
    pub(super) fn new(
        outputs: Outputs,
        inner: Arc<Inner>,
        shared: Arc<Shared>,
        registry: Registry,
        conditions: Readiness,
    ) -> Self {
        conditions.set(CONDITION, Ok(()));
        Self {
            outputs,
            inner,
            shared,
            registry,
            conditions,
            reports: Reports::default(),
            under_way: JoinSet::new(),
            taken_over: false,
            told: None,
        }
    }

    /// Runs for ever.
    pub(super) async fn run(
        mut self,
        mut views: broadcast::Receiver<Arc<PodKey>>,
        mut taken_over: watch::Receiver<bool>,
    ) {
        let mut source = self.shared.source.changes();
        let mut before = Arc::clone(&source.borrow_and_update());
        self.taken_over = *taken_over.borrow_and_update();
        self.look_at_all(&before);
        loop {
            let due = self.inner.ledger().due(Instant::now());
            tokio::select! {
                view = views.recv() => match view {
                    Ok(key) => self.look(&key),
                    Err(RecvError::Lagged(_)) => self.look_at_all(&before),
                    Err(RecvError::Closed) => return,
                },
                Ok(()) = source.changed() => {
                    let now = Arc::clone(&source.borrow_and_update());
                    self.look_at_changes(&before, &now);
                    before = now;
                }
                Ok(()) = taken_over.changed() => {
                    self.taken_over = *taken_over.borrow_and_update();
                    self.look_at_all(&before);
                }
                Some(answered) = self.under_way.join_next() => self.answered(answered),
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    self.time_has_passed();
                }
            }
            self.send();
            self.tell_condition();
        }
    }

    fn look_at_all(&mut self, inventory: &Inventory) {
        inventory.pods.keys().for_each(|key| self.look(key));
    }

    fn look_at_changes(&mut self, before: &Inventory, now: &Inventory) {
        if now.is_complete() && !before.is_complete() {
            self.inner.ledger().hurry(Instant::now());
        }
        let touched = now.touched_since(before);
        touched.iter().for_each(|key| self.look(key));
    }

    /// What is wished and what is under way changes under one lock: whoever asks whether a pod has withdrawn sees both.
    fn look(&mut self, key: &PodKey) {
        let inventory = self.shared.source.inventory();
        let Some(pod) = inventory.pod(key) else {
            self.inner.ledger().forget(key);
            self.reports.forget(key);
            return;
        };
        let decision = self.shared.decide(pod);
        let mut ledger = self.inner.ledger();
        let view = self.registry.view(key);
        let standing = Standing::of(pod, view.as_ref(), &decision, self.taken_over);
        let look = Look {
            uid: &pod.pod.uid,
            shown: pod.redirection.as_deref(),
            wish: standing.wish(),
            serves_in: standing.serves_in(),
        };
        let now = Instant::now();
        let has_withdrawn =
            |ledger: &Ledger| ledger.has_withdrawn(key, &pod.pod.uid, look.shown, now);
        let had = has_withdrawn(&ledger);
        ledger.look(key, &look, now);
        let is_news = !had && has_withdrawn(&ledger);
        drop(ledger);
        if is_news {
            self.wake(key);
        }
        if let Some((kind, reason, message)) = self.reports.look(key, &standing) {
            self.outputs.event(&pod.pod, kind, reason, &message);
        }
    }

    /// Sends what is due, as far as there is room.
    fn send(&mut self) {
        loop {
            let Some(order) = self.inner.ledger().next(Instant::now()) else {
                return;
            };
            let client = self.inner.client.clone();
            self.under_way.spawn(async move {
                let answer = patch(client, &order).await;
                (order, answer)
            });
        }
    }

    fn answered(&mut self, answered: Result<(Order, Answer), JoinError>) {
        let Ok((order, answer)) = answered else {
            tracing::error!("A patch of an annotation has ended by a defect");
            return;
        };
        let result = match &answer {
            Answer::Accepted => "accepted",
            Answer::Gone => "gone",
            Answer::Refused(_) => "refused",
            Answer::Unanswered(_) => "unanswered",
        };
        tracing::debug!(pod = format!("{}/{}", order.key.0, order.key.1), mark = ?order.mark, result, "Patched the annotation");
        self.inner.counted.patch(result);
        let is_told =
            answer == Answer::Gone || (answer == Answer::Accepted && order.mark != Mark::Enabled);
        let met = self.inner.ledger().answered(&order, answer, Instant::now());
        if let Some(lag) = met {
            self.inner.counted.met_after(lag);
        }
        if is_told {
            self.wake(&order.key);
        }
    }

    /// The task of a pod that leaves waits for this.
    fn wake(&self, key: &PodKey) {
        let leaves = |intent: &Intent| matches!(intent, Intent::Announcing);
        let view = self.registry.view(key).unwrap_or_default();
        if view.records.iter().any(|record| leaves(&record.intent)) {
            self.registry.wake(|known| known == key);
        }
    }

    fn time_has_passed(&mut self) {
        let (late, stale) = self.inner.ledger().expired(Instant::now());
        let inventory = self.shared.source.inventory();
        for pod in late.iter().filter_map(|key| inventory.pod(key)) {
            let message = format!(
                "Ready and in the mesh, and for {} s its annotation does not say so",
                LATE.as_secs()
            );
            let reason = Reason::AnnotationLate;
            self.outputs
                .event(&pod.pod, Kind::Warning, reason, &message);
        }
        stale.iter().for_each(|key| self.look(key));
    }

    fn tell_condition(&mut self) {
        let failed = self.inner.ledger().failed();
        if failed == self.told {
            return;
        }
        let words = |told: &Option<(usize, String)>| told.as_ref().map(|(_, words)| words.clone());
        if let Some(now) = words(&failed)
            && words(&self.told).is_none_or(|before| before != now)
        {
            let failure = Failure::new(Reason::AnnotationFailed, now);
            tracing::warn!(%failure, "Cannot write annotations of pods; will try again");
        }
        let message = |(pods, words): &(usize, String)| format!("{pods} pods lack theirs: {words}");
        let message = failed.as_ref().map(message);
        self.conditions.set(CONDITION, message.map_or(Ok(()), Err));
        self.told = failed;
    }
}
