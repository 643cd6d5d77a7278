use std::{
    pin::pin,
    sync::Arc,
    time::{Duration, SystemTime},
};

use inpod_service::UninstallMode;
use inpod_types::{Backoff, Enrollment, Failure, Reason};
use tokio::time::Instant;

use super::{Evidence, POLL_INTERVAL, Step, Task, interrupt, listeners::jittered};
use crate::{
    boottime::BootInstant,
    checkpoint::{Intent, Record},
    decide::Demand,
    tasks::{
        pipeline::{EnrollContext, is_gone, is_transient},
        plan::{Action, Desired, next},
    },
    trace,
};

/// The interval of checking that the withdrawal is announced.
const ANNOUNCEMENT_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The delay after an interrupted enrollment. The interrupting command usually reconciles earlier.
const INTERRUPTED_RETRY_INTERVAL: Duration = Duration::from_secs(5);

const RETRY: Backoff = Backoff::new(POLL_INTERVAL, Duration::from_secs(30));

const BACKGROUND_ENROLL_TIMEOUT: Duration = Duration::from_secs(15);

impl Task {
    pub(super) fn desired(&mut self, record: &Record) -> Desired {
        let inventory = self.shared.source.inventory();
        let Some(pod) = inventory
            .pod(&self.key)
            .filter(|pod| record.belongs_to(pod))
        else {
            // A pod that the source has never shown is not gone.
            if !inventory.is_complete() || record.admitted_unenrolled {
                return Desired::Unknown;
            }
            return Desired::Gone {
                since: *self.gone_since.get_or_insert_with(BootInstant::now),
            };
        };
        self.gone_since = None;
        let decision = self.shared.decide(pod);
        let enrollment = decision.enrollment;
        if record.uses_sidecar() {
            return self.desired_for_sidecar(record, pod, enrollment);
        }
        let is_kept = decision.is_unmet() && decision.reason != Reason::NodeLeaves;
        let is_applied = matches!(record.intent, Intent::Enrolled { .. });
        match enrollment {
            // A pod that demands the mesh leaves it only with inpod.
            Enrollment::None if is_kept && is_applied => Desired::In { in_sync: true },
            // The redirection to ztunnel is first withdrawn in order.
            Enrollment::Sidecar if record.intent.has_effects() => Desired::Out {
                is_announced: self.is_announced(record),
            },
            Enrollment::Ambient | Enrollment::Sidecar => Desired::In {
                in_sync: self.is_in_sync(record, pod, enrollment),
            },
            Enrollment::None => Desired::Out {
                is_announced: self.is_announced(record),
            },
            Enrollment::Unknown => Desired::Unknown,
        }
    }

    /// Returns whether peers see that the pod leaves, or never will see so while the node is uninstalled.
    fn is_announced(&self, record: &Record) -> bool {
        let status = &self.shared.status;
        let is_uninstalling = || self.shared.leave_mode.is(UninstallMode::Uninstall);
        status.has_withdrawn(&record.pod) || (status.is_refused(&record.pod) && is_uninstalling())
    }

    /// Returns whether the pod is left to another agent. Started changes are completed first.
    fn is_handed_over(&self) -> bool {
        let is_stable = |record: &Arc<Record>| record.intent.is_stable();
        self.shared.leave_mode.is(UninstallMode::Handover)
            && self.records.last().is_none_or(is_stable)
    }

    pub(super) async fn reconcile(&mut self) {
        (self.wake, self.next) = (None, None);
        if self.is_handed_over() {
            // The end of the handover schedules the next check.
            self.listeners_due = None;
            #[cfg(test)]
            self.compare_with_new_core(Desired::Out { is_announced: true }, Action::Idle);
            return;
        }
        self.reattach();
        if let Err(failure) = self.repair().await {
            return self.retry_later(failure);
        }
        self.forget_superseded().await;
        if self.records.is_empty()
            && let Err(failure) = self.discover().await
        {
            return self.retry_later(failure);
        }
        // Each action leads to another state, and no path is longer than five.
        for _ in 0..5 {
            if let Err(failure) = self.identify() {
                return self.retry_later(failure);
            }
            let Some(current) = self.records.last().cloned() else {
                // The ADD of the pod's successor may have been missed.
                match self.discover().await {
                    Ok(()) if self.records.is_empty() => return,
                    Ok(()) => continue,
                    Err(failure) => return self.retry_later(failure),
                }
            };
            let (desired, action) = self.plan(&current);
            match self.execute(action).await {
                Ok(Step::Continue) => {
                    self.attempts = 0;
                    // Reporters to other systems see every step.
                    self.publish_view();
                }
                Ok(Step::Done) => {
                    self.attempts = 0;
                    self.clear_failure(desired);
                    if self
                        .records
                        .iter()
                        .rev()
                        .skip(1)
                        .any(|record| record.has_unknown_netns())
                    {
                        self.wake_in(POLL_INTERVAL);
                    }
                    return self.check_path().await;
                }
                Ok(Step::Wait(wait)) => return self.wake_in(wait),
                Err(failure) => return self.retry_later(failure),
            }
        }
        self.wake_in(POLL_INTERVAL);
    }

    fn plan(&mut self, current: &Record) -> (Desired, Action) {
        let desired = self.desired(current);
        let (now, timing) = (BootInstant::now(), self.shared.timing());
        let action = next(&current.intent, desired, now, timing);
        self.next = Some(action);
        #[cfg(test)]
        self.compare_with_new_core(desired, action);
        (desired, action)
    }

    async fn execute(&mut self, action: Action) -> Result<Step, Failure> {
        if self.needs_netns_lookup(action) {
            return self.locate_netns(action).await;
        }
        if matches!(action, Action::Enroll | Action::Serve) {
            self.exempt_probes().await?;
        } else {
            // Other actions may end the exemption.
            self.probe_exemption = None;
        }
        let Some(record) = self.records.last_mut().map(Arc::make_mut) else {
            return Ok(Step::Done);
        };
        let (pipeline, log) = (&self.shared.pipeline, &mut self.timeline);
        match action {
            Action::Idle => Ok(Step::Done),
            Action::WaitUntil(then) => Ok(Step::Wait(then.since(BootInstant::now()))),
            Action::Enroll => self.enroll_in_background().await,
            Action::Serve => pipeline.serve(record, log).await.map(|()| Step::Continue),
            Action::Update => self.update().await,
            Action::Detach => pipeline.detach(record, log).await.map(|()| Step::Continue),
            Action::AwaitAnnouncement => Ok(Step::Wait(ANNOUNCEMENT_POLL_INTERVAL)),
            Action::AwaitPropagation => pipeline
                .start_propagation(record, log)
                .map(|()| Step::Continue),
            Action::Undo => {
                let failures = pipeline.undo(record, log).await;
                let left = || Failure::new(Reason::DependencyUnavailable, failures.join("; "));
                if failures.is_empty() {
                    Ok(Step::Continue)
                } else {
                    Err(left())
                }
            }
            Action::StartWithdrawal => pipeline
                .start_withdrawal(record, log)
                .map(|()| Step::Continue),
            Action::Drain => pipeline.drain(record, log).await.map(|()| Step::Continue),
            Action::Finish { overdue } => {
                let done = pipeline.finish(record, log, overdue).await?;
                Ok(if done {
                    Step::Continue
                } else {
                    Step::Wait(POLL_INTERVAL)
                })
            }
            Action::Delete { overdue } => self.try_delete(overdue).await,
            Action::GarbageCollect { overdue } => self.garbage_collect(overdue).await,
        }
    }

    /// Enrolls without a waiting caller. Any new command interrupts the enrollment.
    async fn enroll_in_background(&mut self) -> Result<Step, Failure> {
        let mut cancelled = pin!(interrupt::any(self.sent.clone(), self.seen));
        let context = EnrollContext::background(
            Instant::now() + BACKGROUND_ENROLL_TIMEOUT,
            cancelled.as_mut(),
        );
        match self.enroll(context).await {
            Ok(()) => Ok(Step::Continue),
            // The interrupting command reconciles again.
            Err(failure)
                if failure.reason == Reason::Starting && failure.undo_failures.is_empty() =>
            {
                Ok(Step::Wait(INTERRUPTED_RETRY_INTERVAL))
            }
            // The sandbox has ended, and another sandbox may run without an ADD.
            Err(failure) if is_gone(failure.reason) && self.is_current_out() => {
                self.forget_current().await
            }
            Err(failure) => Err(failure),
        }
    }

    fn is_current_out(&self) -> bool {
        let current = self.records.last();
        current.is_some_and(|record| record.intent == Intent::Out)
    }

    pub(super) async fn enroll(&mut self, context: EnrollContext<'_>) -> Result<(), Failure> {
        let shared = Arc::clone(&self.shared);
        self.update_redirection()?;
        let stops = context.is_background() && self.demands_stop();
        let Some(record) = self.records.last_mut().map(Arc::make_mut) else {
            return Ok(());
        };
        // An enrollment begun by an earlier run of pod-events may have captured connections already.
        let is_resumed = record.intent == Intent::Enrolling;
        // A sidecar serves a running pod as soon as the rules are in place, and nothing else keeps the pod from sending
        // plain text. Rules without ztunnel refuse the connections of a pod that demands so.
        let keeps =
            context.is_background() && (is_resumed || stops || record.redirection.is_sidecar());
        if stops {
            shared.pipeline.stop(record, &mut self.timeline).await?;
        }
        let in_mesh = Some(record.intent.clone()).filter(Intent::was_in_mesh);
        let stood = in_mesh.or_else(|| keeps.then_some(Intent::Enrolling));
        let broker = shared.pipeline.begin(record)?;
        self.publish_view();
        let Some(record) = self.records.last_mut().map(Arc::make_mut) else {
            return Ok(());
        };
        shared
            .pipeline
            .enroll(
                broker.as_deref(),
                stood,
                record,
                &mut self.timeline,
                context,
            )
            .await?;
        let trace = trace::current();
        tracing::info!(
            pod = %record.pod, uid = %record.pod.uid, sandbox = %record.sandbox, trace_id = trace.id(),
            "Enrolled",
        );
        (self.failure, self.blocked) = (None, None);
        let now = Some(SystemTime::now());
        // netconfig refuses rules to a port without ztunnel's listener.
        self.evidence = Evidence {
            rules: now,
            path: now,
        };
        if !record.redirection.is_sidecar() {
            shared.report_not_permitted(&self.key, record);
            self.check_listeners_later();
        }
        Ok(())
    }

    /// Returns whether connections of the running pod are refused until ztunnel serves the pod.
    fn demands_stop(&self) -> bool {
        let inventory = self.shared.source.inventory();
        let pod = inventory.pod(&self.key);
        pod.is_some_and(|pod| {
            let decision = self.shared.decide(pod);
            decision.enrollment == Enrollment::Ambient && decision.demand == Demand::MeshOrStop
        })
    }

    /// Clears the failure, because the failed action was done since, or is no longer desired.
    pub(super) fn clear_failure(&mut self, desired: Desired) {
        let is_known = !matches!(desired, Desired::Gone { .. } | Desired::Unknown);
        if self.records.last().is_some_and(|record| record.is_legacy()) {
            let message = "another agent redirected the pod by iptables' legacy tables";
            self.failure = Some(Failure::new(Reason::LegacyRules, message));
        } else if let Some(until) = self.unproven_until() {
            self.wake_in(until.duration_since(Instant::now()));
        } else if is_known && self.drifted.is_none() {
            self.failure = None;
        }
    }

    pub(super) fn wake_in(&mut self, wait: Duration) {
        let then = Instant::now() + wait;
        self.wake = Some(self.wake.map_or(then, |wake| wake.min(then)));
    }

    /// Schedules a retry. The wait doubles with each failure, and any event ends the wait early.
    pub(super) fn retry_later(&mut self, failure: Failure) {
        // Pods that failed together must not retry together.
        let wait = jittered(RETRY.delay(self.attempts));
        if is_transient(failure.reason) {
            tracing::debug!(pod = format!("{}/{}", self.key.0, self.key.1), %failure, "Will retry");
        } else {
            tracing::warn!(pod = format!("{}/{}", self.key.0, self.key.1), %failure, "Will retry");
        }
        self.shared.counters.retry(failure.reason);
        self.attempts = self.attempts.saturating_add(1);
        self.failure = Some(failure);
        self.wake_in(wait);
    }
}
