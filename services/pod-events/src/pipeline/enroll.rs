//! Into the mesh: claim, hand-over, rules; and the undoing where that fails. A pod with a sidecar is handed to nobody.
//!
//! Listeners before rules: rules that point at a closed port reset connections.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use inpod_proto::netconfig::v1::RemovePhase;
use inpod_types::{Failure, Reason};
use tokio::time::Instant;

use super::{Pipeline, expected_netns, workload_of};
use crate::{
    admission::Permit,
    checkpoint::{Intent, Record},
    metrics::{Phase, Phases},
    timeline::Timeline,
};

/// What undoing may take, kept back from the caller's time. The broker keeps as much back for its own.
const UNDO_TIMEOUT: Duration = Duration::from_secs(3);

/// Until when steps forward may be taken for a caller who waits until `deadline`.
pub(crate) fn work_deadline(deadline: Instant) -> Instant {
    let left = deadline.saturating_duration_since(Instant::now());
    deadline - UNDO_TIMEOUT.min(left / 3)
}

/// Why an enrollment is given up before its time is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelReason {
    /// Nobody waits for it any more.
    CallerGone,
    /// Something else happened to the pod that must not wait.
    Interrupted,
}

impl From<CancelReason> for Failure {
    fn from(cancelled: CancelReason) -> Self {
        match cancelled {
            CancelReason::CallerGone => Self::new(Reason::DeadlineExceeded, "the caller went away"),
            CancelReason::Interrupted => {
                Self::new(Reason::Starting, "something else of the pod comes first")
            }
        }
    }
}

/// The time that an enrollment has, and what ends it earlier.
pub struct EnrollContext<'a> {
    /// When its caller stops waiting.
    pub deadline: Instant,
    /// Until when steps forward may begin.
    pub work_deadline: Instant,
    /// Resolves when it is to be given up.
    pub cancelled: Pin<&'a mut (dyn Future<Output = CancelReason> + Send)>,
    /// The right to work; what nobody waits for needs none.
    pub permit: Option<Permit>,
    /// What the time goes into.
    pub phases: Phases,
}

impl std::fmt::Debug for EnrollContext<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Run")
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

impl<'a> EnrollContext<'a> {
    /// One that nobody waits for.
    pub fn background(
        deadline: Instant,
        cancelled: Pin<&'a mut (dyn Future<Output = CancelReason> + Send)>,
    ) -> Self {
        Self {
            deadline,
            work_deadline: work_deadline(deadline),
            cancelled,
            permit: None,
            phases: Phases::default(),
        }
    }

    /// Takes the turn up again that was laid down.
    async fn reacquire_permit(&mut self) -> Result<(), Failure> {
        let Some(permit) = &mut self.permit else {
            return Ok(());
        };
        let _waits = self.phases.enter(Phase::Queue);
        tokio::select! {
            reacquired = permit.reacquire() => reacquired,
            reason = self.cancelled.as_mut() => Err(reason.into()),
        }
    }

    /// No step forward starts for a caller who is gone or out of time.
    fn check_deadline(&mut self) -> Result<(), Failure> {
        if let Some(reason) = self.cancelled.as_mut().now_or_never() {
            return Err(reason.into());
        }
        if Instant::now() >= self.work_deadline {
            return Err(Failure::new(
                Reason::DeadlineExceeded,
                "the caller's time is over",
            ));
        }
        Ok(())
    }
}

impl Pipeline {
    /// Writes down that steps follow. What stands in the mesh stays written down as that: only its order changes. Tells
    /// the broker's run where the pod is to be handed to it.
    ///
    /// # Errors
    ///
    /// When a service is not ready, or nothing can be written; then the record is as it was.
    pub fn begin(&self, record: &mut Record) -> Result<Option<Arc<str>>, Failure> {
        let broker = self.broker_for(record.redirection.enrollment())?;
        let mut begun = record.clone();
        begun.revision = self.revisions.next();
        if !begun.intent.was_in_mesh() {
            begun.intent = Intent::Enrolling;
        }
        self.checkpoint.write(&begun)?;
        *record = begun;
        Ok(broker)
    }

    /// Puts a sandbox into the mesh, whatever of it is there already. If that fails, what was not there before is taken
    /// back; a pod that `stood` in the mesh, leaving it or not, keeps what it has.
    ///
    /// # Errors
    ///
    /// As the first step that failed says, with what could not be undone.
    pub async fn enroll(
        &self,
        broker: Option<&str>,
        stood: Option<Intent>,
        record: &mut Record,
        log: &mut Timeline,
        context: EnrollContext<'_>,
    ) -> Result<(), Failure> {
        let Err(mut failure) = self.run_steps(broker, record, log, context).await else {
            return Ok(());
        };
        log.note(format!("failed: {failure}"));
        match stood {
            Some(before) => {
                record.intent = before;
                self.checkpoint.write(record)?;
            }
            None => failure.undo_failures = self.undo(record, log).await,
        }
        Err(failure)
    }

    async fn run_steps(
        &self,
        broker: Option<&str>,
        record: &mut Record,
        log: &mut Timeline,
        mut context: EnrollContext<'_>,
    ) -> Result<(), Failure> {
        let work_deadline = context.work_deadline;
        context.check_deadline()?;
        let began = Instant::now();
        let claimed = {
            let (netns, addresses) = (expected_netns(record), &record.addresses);
            let claim = self
                .clients
                .claim(&record.sandbox, &netns, addresses, work_deadline);
            context.phases.during(Phase::Claim, claim).await?
        };
        log.note_since(format!("claimed {}", claimed.id), began);
        record.netns_id = Some(claimed.id);
        record.addresses = claimed.addresses;
        self.checkpoint.write(record)?;
        context.check_deadline()?;
        if let Some(broker) = broker {
            self.add_to_ztunnel(broker, record, log, &mut context)
                .await?;
            context.check_deadline()?;
        }
        let began = Instant::now();
        let apply = self.clients.apply(record, work_deadline);
        let fingerprint = context.phases.during(Phase::Rules, apply).await?;
        log.note_since(format!("applied rules {fingerprint}"), began);
        record.intent = Intent::Enrolled { fingerprint };
        Ok(self.checkpoint.write(record)?)
    }

    /// Gives the workload to ztunnel, and waits until one has it.
    async fn add_to_ztunnel(
        &self,
        broker: &str,
        record: &Record,
        log: &mut Timeline,
        context: &mut EnrollContext<'_>,
    ) -> Result<(), Failure> {
        let began = Instant::now();
        let workload = workload_of(record);
        // The wait for a ztunnel is nobody's work.
        if let Some(permit) = &mut context.permit {
            permit.release();
        }
        // The broker keeps its own reserve of this deadline. A call that is dropped it undoes by itself.
        let add = self
            .clients
            .add_workload(broker, &workload, context.deadline);
        tokio::select! {
            added = context.phases.during(Phase::HandOver, add) => added?,
            reason = context.cancelled.as_mut() => return Err(reason.into()),
        }
        log.note_since("acknowledged by ztunnel", began);
        context.reacquire_permit().await
    }

    /// Takes back whatever an enrollment left, in reverse. Tells what could not be taken back; while there is any, the
    /// sandbox stays written down as one of which something may be in place.
    pub async fn undo(&self, record: &mut Record, log: &mut Timeline) -> Vec<String> {
        let deadline = Instant::now() + UNDO_TIMEOUT;
        let mut failures = Vec::new();
        if record.netns_id.is_some() {
            let rules = self.remove_rules(record, deadline).await;
            failures.extend(rules.err().map(|failure| format!("rules: {failure}")));
            let workload = self.remove_workload(record, deadline).await;
            failures.extend(workload.err().map(|failure| format!("workload: {failure}")));
        }
        let claim = self.clients.release(&record.sandbox, deadline).await;
        failures.extend(claim.err().map(|failure| format!("claim: {failure}")));
        if failures.is_empty() {
            log.note("undone");
            failures.extend(
                self.mark_out(record)
                    .err()
                    .map(|failure| failure.to_string()),
            );
        } else {
            log.note(format!("undone but for {failures:?}"));
        }
        failures
    }

    /// Removes all rules. A restarted netconfig holds no claim: then the netns is claimed once more for it.
    pub(super) async fn remove_rules(
        &self,
        record: &Record,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let remove = || {
            self.clients
                .remove_rules(&record.sandbox, RemovePhase::Final, deadline)
        };
        match remove().await {
            Err(failure) if failure.reason == Reason::ClaimUnknown => {
                self.clients
                    .claim(
                        &record.sandbox,
                        &expected_netns(record),
                        &record.addresses,
                        deadline,
                    )
                    .await?;
                remove().await.map(drop)
            }
            other => other.map(drop),
        }
    }

    /// Writes down that nothing is in place.
    pub(super) fn mark_out(&self, record: &mut Record) -> Result<(), Failure> {
        record.intent = Intent::Out;
        record.netns_id = None;
        Ok(self.checkpoint.write(record)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn forward_steps_leave_three_seconds_of_thirty_for_undoing() {
        let deadline = Instant::now() + Duration::from_secs(30);
        assert_eq!(deadline - work_deadline(deadline), UNDO_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_short_deadline_is_shared_between_doing_and_undoing() {
        let deadline = Instant::now() + Duration::from_secs(3);
        assert_eq!(deadline - work_deadline(deadline), Duration::from_secs(1));
    }

    #[tokio::test]
    async fn nothing_starts_for_a_caller_who_is_gone_or_late() {
        let soon = Instant::now() + Duration::from_secs(30);
        let mut gone = Box::pin(async { CancelReason::CallerGone });
        let mut waits = Box::pin(std::future::pending::<CancelReason>());
        assert!(
            EnrollContext::background(soon, gone.as_mut())
                .check_deadline()
                .is_err()
        );
        assert!(
            EnrollContext::background(Instant::now(), waits.as_mut())
                .check_deadline()
                .is_err()
        );
        assert!(
            EnrollContext::background(soon, waits.as_mut())
                .check_deadline()
                .is_ok()
        );
    }
}
