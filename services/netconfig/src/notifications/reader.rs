//! Reads a claimed netns under its lock, and publishes a changed state.

use std::{sync::Arc, time::Instant};

use inpod_types::{NetnsId, SandboxRef};
use tokio::{sync::OwnedMutexGuard, task::spawn_blocking};

use super::Subscriptions;
use crate::read_queue::Queue;
use crate::{
    apply::{Observation, Writer},
    claims::{Claim, Claims, State},
    error::{Failed, KernelError},
    netns_session::{Prepared, Visit},
    notifications::DriftMetrics,
};

#[derive(Clone, Debug)]
pub(crate) struct Reader {
    claims: Arc<Claims>,
    writer: Arc<Writer>,
    subscriptions: Arc<Subscriptions>,
    queue: Arc<Queue>,
    counts: DriftMetrics,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadOutcome {
    Busy,
    /// The netns was read, or is no longer claimed.
    Read,
    /// The kernel failed, concurrent changes voided every attempt, or later changes will not be notified.
    Failed,
}

impl Reader {
    pub(crate) fn new(
        claims: Arc<Claims>,
        writer: Arc<Writer>,
        subscriptions: Subscriptions,
        queue: Arc<Queue>,
        counts: DriftMetrics,
    ) -> Self {
        Self {
            claims,
            writer,
            subscriptions: Arc::new(subscriptions),
            queue,
            counts,
        }
    }

    pub(crate) fn claims(&self) -> &Arc<Claims> {
        &self.claims
    }

    /// Returns the last published state if no change was notified since, and otherwise reads the netns after
    /// waiting for the lock. Returns `None` without a claim.
    pub(crate) async fn state(&self, sandbox: &SandboxRef) -> Option<Arc<State>> {
        let claim = self.claims.find(sandbox)?;
        if self.queue.is_read(sandbox)
            && let Some(published) = self.claims.last_published(&claim)
        {
            return Some(published);
        }
        let change_lock = Arc::clone(&claim.change_lock).lock_owned().await;
        self.read_locked(change_lock, claim).await.0
    }

    pub(super) async fn try_read(&self, claim: Arc<Claim>) -> ReadOutcome {
        let Ok(change_lock) = Arc::clone(&claim.change_lock).try_lock_owned() else {
            return ReadOutcome::Busy;
        };
        self.read_locked(change_lock, claim).await.1
    }

    /// Reads a netns, and keeps the lock until the kernel has replied, even if the caller's future is dropped.
    async fn read_locked(
        &self,
        change_lock: OwnedMutexGuard<()>,
        claim: Arc<Claim>,
    ) -> (Option<Arc<State>>, ReadOutcome) {
        let reader = self.clone();
        let read = spawn_blocking(move || {
            let found = reader.read_now(&claim);
            drop(change_lock);
            found
        });
        read.await.unwrap_or_else(|error| {
            tracing::error!(%error, "The read of a netns failed");
            (None, ReadOutcome::Failed)
        })
    }

    /// Subscribes and then reads, so that no change in between is missed.
    fn read_now(&self, claim: &Claim) -> (Option<Arc<State>>, ReadOutcome) {
        self.counts.read();
        // The prepared state is older than the state about to be read.
        drop(claim.take_prepared());
        let outcome = if self.subscriptions.subscribe(claim) {
            ReadOutcome::Read
        } else {
            ReadOutcome::Failed
        };
        match self.writer.observe(&claim.netns) {
            Ok(observation) => (self.publish(claim, observation), outcome),
            Err(error) => {
                tracing::warn!(sandbox = %claim.sandbox, %error, "Cannot read a netns");
                (self.publish_failure(claim, &error), ReadOutcome::Failed)
            }
        }
    }

    pub(super) fn unsubscribe(&self, sandbox: &SandboxRef, netns: NetnsId) {
        self.subscriptions.unsubscribe(sandbox, netns);
    }

    /// Reads a netns through the visit of its claim, which saves a separate visit soon after, and keeps visit and
    /// state for the operation that follows. If reading fails, the scheduled read takes over. The caller holds the
    /// claim's `change_lock`.
    pub(crate) fn read_visited(&self, claim: &Claim, visit: Visit) {
        if !self.subscriptions.subscribe(claim) {
            return;
        }
        let started = Instant::now();
        if let Ok((prepared, observation)) = self.writer.prepare(&claim.netns, visit) {
            claim.set_prepared(prepared);
            self.queue.mark_read(&claim.sandbox, started);
            self.publish(claim, observation);
        }
    }

    /// Returns what the claim prepared; without its state, if a change from outside was notified since.
    pub(crate) fn take_prepared(&self, claim: &Claim) -> Option<Prepared> {
        let prepared = claim.take_prepared()?;
        let is_current = self.queue.is_read(&claim.sandbox);
        Some(if is_current {
            prepared
        } else {
            prepared.without_state()
        })
    }

    /// Publishes an unreadable netns as a netns without rules. A failure by concurrent changes proves nothing, so
    /// the last state stays.
    fn publish_failure(&self, claim: &Claim, error: &Failed) -> Option<Arc<State>> {
        let is_race = error.cause().is_some_and(KernelError::is_race);
        let known = self.claims.last_published(claim).filter(|_| is_race);
        known.or_else(|| self.publish(claim, Observation::default()))
    }

    /// Publishes the state after a change through the claim. Schedules a read if the state is unknown.
    pub(crate) fn republish(&self, claim: &Claim, observation: Option<Observation>) {
        self.claims.unpublish(claim);
        match observation {
            Some(observation) => drop(self.publish(claim, observation)),
            None => self.queue.mark_changed(&claim.sandbox),
        }
    }

    fn publish(&self, claim: &Claim, mut observation: Observation) -> Option<Arc<State>> {
        if let Some(counter) = observation.uncaptured_udp_flows.take() {
            let flows = claim.uncaptured_udp_since_last_read(counter);
            self.counts.add_uncaptured_udp(flows);
        }
        let (state, is_new) = self.claims.publish(claim, observation)?;
        if is_new {
            self.counts.published();
        }
        Some(state)
    }
}
