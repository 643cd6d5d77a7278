//! Reads a claimed netns under its lock, and publishes a changed state.

use std::sync::Arc;

use inpod_types::{SandboxRef, with_causes};
use tokio::{sync::OwnedMutexGuard, task::spawn_blocking};

use crate::{
    apply::{Observation, Writer},
    claims::{Claim, Claims, State},
    error::VerifyError,
    metrics::DriftMetrics,
};

#[derive(Clone, Debug)]
pub(crate) struct Reader {
    claims: Arc<Claims>,
    writer: Arc<Writer>,
    counts: DriftMetrics,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadOutcome {
    Busy,
    /// Read, or no longer claimed.
    Read,
    /// The kernel failed, or concurrent changes voided every attempt.
    Failed,
}

impl Reader {
    pub(crate) fn new(claims: Arc<Claims>, writer: Arc<Writer>, counts: DriftMetrics) -> Self {
        Self {
            claims,
            writer,
            counts,
        }
    }

    pub(crate) fn claims(&self) -> &Arc<Claims> {
        &self.claims
    }

    /// Waits for the lock. `None` without a claim.
    pub(crate) async fn read(&self, sandbox: &SandboxRef) -> Option<Arc<State>> {
        let claim = self.claims.find(sandbox)?;
        let change_lock = Arc::clone(&claim.change_lock).lock_owned().await;
        self.read_locked(change_lock, claim).await.0
    }

    pub(super) async fn try_read(&self, claim: Arc<Claim>) -> ReadOutcome {
        let Ok(change_lock) = Arc::clone(&claim.change_lock).try_lock_owned() else {
            return ReadOutcome::Busy;
        };
        self.read_locked(change_lock, claim).await.1
    }

    /// Keeps the lock until the kernel has replied, even if the caller's future is dropped.
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

    fn read_now(&self, claim: &Claim) -> (Option<Arc<State>>, ReadOutcome) {
        self.counts.read();
        match self.writer.observe(&claim.netns) {
            Ok(observation) => (self.publish(claim, observation), ReadOutcome::Read),
            Err(error) => {
                let text = with_causes(&error);
                tracing::warn!(sandbox = %claim.sandbox, error = text, "Cannot read a netns");
                (self.publish_failure(claim, &error), ReadOutcome::Failed)
            }
        }
    }

    /// Publishes an unreadable netns as one without rules. Failure by concurrent changes proves nothing:
    /// the last state stays.
    fn publish_failure(&self, claim: &Claim, error: &VerifyError) -> Option<Arc<State>> {
        let is_race = matches!(error, VerifyError::Backend(error) if error.is_race());
        let known = self.claims.last_published(claim).filter(|_| is_race);
        known.or_else(|| self.publish(claim, Observation::default()))
    }

    fn publish(&self, claim: &Claim, observation: Observation) -> Option<Arc<State>> {
        let (state, is_new) = self.claims.publish(claim, observation)?;
        if is_new {
            self.counts.published();
        }
        Some(state)
    }
}
