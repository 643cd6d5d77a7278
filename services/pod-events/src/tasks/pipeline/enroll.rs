//! Enrolls a sandbox in the order of claim, workload and rules, and undoes these steps on failure. A pod with a sidecar
//! has no workload.
//!
//! The listeners come before the rules: rules that redirect to a closed port reset connections.

use std::{
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use futures_util::FutureExt as _;
use inpod_proto::netconfig::v1::RemovePhase;
use inpod_types::{Failure, Reason};
use tokio::time::{Instant, timeout};

use super::{Pipeline, is_gone, workload_of};
use crate::{
    admission::Permit,
    checkpoint::{Intent, Record},
    clients::deadline_in,
    counters::{Phase, Phases},
    timeline::Timeline,
};

/// The part of the caller's time reserved for undoing. The broker answers that much before its own deadline.
const UNDO_TIMEOUT: Duration = Duration::from_secs(3);

/// The time for which a cancelled ADD waits for netconfig's answer. Usually the answer comes in time, and the undo then
/// leaves nothing: a claim that completes after its release stays until the search for claims without a record.
const CANCEL_GRACE: Duration = Duration::from_millis(500);

/// Returns until when enrollment steps may start.
pub(crate) fn work_deadline(deadline: Instant) -> Instant {
    let left = deadline.saturating_duration_since(Instant::now());
    deadline - UNDO_TIMEOUT.min(left / 3)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CancelReason {
    CallerGone,
    /// A command for the pod must not queue behind the enrollment.
    Interrupted,
}

impl From<CancelReason> for Failure {
    fn from(cancelled: CancelReason) -> Self {
        match cancelled {
            CancelReason::CallerGone => Self::new(Reason::DeadlineExceeded, "the caller went away"),
            CancelReason::Interrupted => Self::new(
                Reason::Starting,
                "another command for the pod takes precedence",
            ),
        }
    }
}

pub(crate) struct EnrollContext<'a> {
    pub deadline: Instant,
    pub work_deadline: Instant,
    pub cancelled: Pin<&'a mut (dyn Future<Output = CancelReason> + Send)>,
    /// The permit of an ADD; background enrollments need none.
    pub permit: Option<Permit>,
    pub phases: Phases,
}

impl std::fmt::Debug for EnrollContext<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EnrollContext")
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

impl<'a> EnrollContext<'a> {
    /// Creates a context without a waiting caller.
    pub(crate) fn background(
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

    pub(crate) const fn is_background(&self) -> bool {
        self.permit.is_none()
    }

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

    /// Performs a call to netconfig. A cancelled ADD soon fails without an answer, because the end of the sandbox must
    /// not wait for netconfig: netconfig completes the call, and the undo queues behind the call. A background
    /// enrollment waits, because every change of its pod cancels the enrollment.
    async fn call<T>(
        &mut self,
        phase: Phase,
        call: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let is_add = !self.is_background();
        let mut answer = pin!(self.phases.during(phase, call));
        tokio::select! {
            biased;
            answer = answer.as_mut() => answer,
            reason = self.cancelled.as_mut(), if is_add => {
                // The effect of the call is undone with or without an answer.
                drop(timeout(CANCEL_GRACE, answer).await);
                Err(reason.into())
            }
        }
    }

    /// Fails if the caller is gone or no further step may start.
    fn check_deadline(&mut self) -> Result<(), Failure> {
        if let Some(reason) = self.cancelled.as_mut().now_or_never() {
            return Err(reason.into());
        }
        if Instant::now() >= self.work_deadline {
            return Err(Failure::new(
                Reason::DeadlineExceeded,
                "the caller's deadline has passed",
            ));
        }
        Ok(())
    }
}

impl Pipeline {
    /// Checkpoints the start of an enrollment. The intent of a pod in the mesh stays; only the revision changes.
    /// Returns the broker's instance if the pod needs a workload.
    ///
    /// # Errors
    ///
    /// If a service is not ready or the checkpoint cannot be written; the record is unchanged then.
    pub(crate) fn begin(&self, record: &mut Record) -> Result<Option<Arc<str>>, Failure> {
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

    /// Enrolls a sandbox, even if some parts are in place. A failure is undone, except for a pod that was in the mesh
    /// or joined the mesh before (`intent_before`): such a pod keeps its effects, unless the netns is gone.
    ///
    /// # Errors
    ///
    /// The first failure, together with the failures of the undo or of the checkpoint.
    pub(crate) async fn enroll(
        &self,
        broker: Option<&str>,
        intent_before: Option<Intent>,
        record: &mut Record,
        log: &mut Timeline,
        context: EnrollContext<'_>,
    ) -> Result<(), Failure> {
        let Err(mut failure) = self.run_steps(broker, record, log, context).await else {
            return Ok(());
        };
        log.note(format!("failed: {failure}"));
        let keeps = |before: &Intent| before.was_in_mesh() || !is_gone(failure.reason);
        match intent_before.filter(keeps) {
            Some(before) => {
                record.intent = before;
                if let Err(error) = self.checkpoint.write(record) {
                    let unwritten = Failure::from(error);
                    tracing::warn!(sandbox = %record.sandbox, %unwritten, "Cannot record a failed enrollment");
                    failure.message = format!("{}; {unwritten}", failure.message);
                }
            }
            None => failure.undo_failures = self.undo(record, log).await,
        }
        Err(failure)
    }

    /// Captures the connections of a running pod before any ztunnel listens: new connections are refused until then.
    ///
    /// # Errors
    ///
    /// If the netns cannot be claimed, or the checkpoint or the rules cannot be written. The step is undone if the netns
    /// is gone.
    pub(crate) async fn stop(
        &self,
        record: &mut Record,
        log: &mut Timeline,
    ) -> Result<(), Failure> {
        let Err(mut failure) = self.capture(record, log).await else {
            return Ok(());
        };
        if is_gone(failure.reason) {
            failure.undo_failures = self.undo(record, log).await;
        }
        Err(failure)
    }

    async fn capture(&self, record: &mut Record, log: &mut Timeline) -> Result<(), Failure> {
        if matches!(record.intent, Intent::Out) {
            record.intent = Intent::Enrolling;
            self.checkpoint.write(record)?;
        }
        let (deadline, began) = (deadline_in(5), Instant::now());
        let claimed = self.clients.claim(record, deadline).await?;
        (record.netns_id, record.addresses) = (Some(claimed.id), claimed.addresses);
        self.checkpoint.hold(record);
        self.clients.apply(record, false, deadline).await?;
        log.note_since(
            "connections are refused until ztunnel serves the pod",
            began,
        );
        Ok(())
    }

    /// Gives ztunnel the netns of a sandbox with another agent's rules.
    pub(crate) async fn serve(
        &self,
        record: &mut Record,
        log: &mut Timeline,
    ) -> Result<(), Failure> {
        let broker = self.broker()?;
        let (deadline, began) = (deadline_in(5), Instant::now());
        record.netns_id = Some(self.clients.claim(record, deadline).await?.id);
        let workload = workload_of(record);
        self.clients
            .add_workload(&broker, &workload, deadline)
            .await?;
        log.note_since(
            "acknowledged by ztunnel; its rules are another agent's",
            began,
        );
        record.intent = Intent::ServedLegacy;
        Ok(self.checkpoint.write(record)?)
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
        // Only a pod that does not run yet can be prepared before ztunnel serves it.
        let claimed = if broker.is_some() && !context.is_background() {
            let claim = self.clients.claim_and_prepare(record, work_deadline);
            context.call(Phase::Claim, claim).await?
        } else {
            let claim = self.clients.claim(record, work_deadline);
            context.call(Phase::Claim, claim).await?
        };
        log.note_since(format!("claimed {}", claimed.id), began);
        record.netns_id = Some(claimed.id);
        record.addresses = claimed.addresses;
        self.checkpoint.hold(record);
        context.check_deadline()?;
        if let Some(broker) = broker {
            self.add_to_ztunnel(broker, record, log, &mut context)
                .await?;
            context.check_deadline()?;
        }
        let began = Instant::now();
        let apply = self.clients.apply(record, broker.is_some(), work_deadline);
        let fingerprint = context.call(Phase::Rules, apply).await?;
        log.note_since(format!("applied rules {fingerprint}"), began);
        record.intent = Intent::Enrolled { fingerprint };
        Ok(self.checkpoint.write(record)?)
    }

    async fn add_to_ztunnel(
        &self,
        broker: &str,
        record: &Record,
        log: &mut Timeline,
        context: &mut EnrollContext<'_>,
    ) -> Result<(), Failure> {
        let began = Instant::now();
        let workload = workload_of(record);
        // The ADD releases its permit, because waiting for ztunnel is no work of this node.
        if let Some(permit) = &mut context.permit {
            permit.release();
        }
        // The broker answers early enough for the undo, which also removes the workload of a failed or dropped call.
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

    /// Undoes an enrollment in reverse order; returns the failed steps. While anything is left, the record still has
    /// effects.
    pub(crate) async fn undo(&self, record: &mut Record, log: &mut Timeline) -> Vec<String> {
        let deadline = Instant::now() + UNDO_TIMEOUT;
        let broker = self.broker_instance();
        let mut failures = Vec::new();
        if record.netns_id.is_some() {
            let rules = self.remove_rules(record, deadline).await;
            failures.extend(rules.err().map(|failure| format!("rules: {failure}")));
            let workload = self.remove_workload(record, deadline).await;
            failures.extend(workload.err().map(|failure| format!("workload: {failure}")));
        }
        let claim = self.clients.release(&record.sandbox, deadline).await;
        failures.extend(claim.err().map(|failure| format!("claim: {failure}")));
        let same = self.check_same_broker(record, broker.as_deref());
        failures.extend(same.err().map(|failure| format!("workload: {failure}")));
        if failures.is_empty() {
            log.note("undone");
            failures.extend(
                self.mark_out(record)
                    .err()
                    .map(|failure| failure.to_string()),
            );
        } else {
            log.note(format!("undone except for {failures:?}"));
        }
        failures
    }

    /// Removes all rules. The netns is claimed again for a restarted netconfig.
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
                self.clients.claim(record, deadline).await?;
                remove().await.map(drop)
            }
            other => other.map(drop),
        }
    }

    /// Records that nothing is in place. If the write fails, the record still has effects: a restarted broker is sent
    /// the checkpointed workloads, so the whole undo is repeated.
    pub(super) fn mark_out(&self, record: &mut Record) -> Result<(), Failure> {
        let mut out = record.clone();
        out.intent = Intent::Out;
        if out.netns.inode.is_none() {
            // Another netns may take the path.
            out.netns = record.expected_netns();
        }
        out.netns_id = None;
        self.checkpoint.write(&out)?;
        *record = out;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{enrolled, record, set_disk_fault, shared};

    #[tokio::test(start_paused = true)]
    async fn a_part_of_each_deadline_is_left_for_undoing() {
        for (seconds, left) in [(30, UNDO_TIMEOUT), (3, Duration::from_secs(1))] {
            let deadline = deadline_in(seconds);
            assert_eq!(deadline - work_deadline(deadline), left);
        }
    }

    #[tokio::test]
    async fn a_full_disk_does_not_hide_why_an_enrollment_failed() {
        let directory = tempfile::tempdir().unwrap();
        let shared = shared(directory.path()).await;
        set_disk_fault(|_| Some(Err(std::io::ErrorKind::StorageFull.into())));
        let mut waits = pin!(std::future::pending());
        let context = EnrollContext::background(deadline_in(30), waits.as_mut());
        let before = Some(enrolled());
        let (mut record, mut log) = (record("c1"), Timeline::default());
        let answer = shared
            .pipeline
            .enroll(None, before, &mut record, &mut log, context);
        let failure = answer.await.unwrap_err();
        assert_eq!(failure.reason, Reason::DependencyUnavailable, "{failure}");
        assert!(failure.message.contains("[CHECKPOINT_FAILED]"), "{failure}");
    }

    #[tokio::test]
    async fn nothing_starts_for_a_caller_who_is_gone_or_late() {
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut gone = Box::pin(async { CancelReason::CallerGone });
        let mut waits = Box::pin(std::future::pending::<CancelReason>());
        let gone = EnrollContext::background(deadline, gone.as_mut()).check_deadline();
        assert!(gone.is_err());
        for (deadline, is_late) in [(Instant::now(), true), (deadline, false)] {
            let waits = EnrollContext::background(deadline, waits.as_mut()).check_deadline();
            assert_eq!(waits.is_err(), is_late);
        }
    }
}
