//! The steps of a pod's current sandbox towards what is wanted of it.

use std::{pin::pin, sync::Arc, time::Duration};

use inpod_service::Leave;
use inpod_types::{Enrollment, Failure, Reason};
use tokio::time::Instant;

use super::{POLL_INTERVAL, Step, Task, interrupt};
use crate::{
    boottime::BootInstant,
    checkpoint::{Intent, Record},
    pipeline::{EnrollContext, is_transient},
    plan::{Action, Desired, next},
    trace,
};

/// How often it is looked whether peers have been told that a pod leaves. Whoever tells them wakes the task, too.
const ANNOUNCEMENT_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// An enrollment that was interrupted is taken up by what interrupted it, or after this long.
const INTERRUPTED_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The longest wait between two attempts.
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// How long an enrollment may take that no caller waits for. It is tried again.
const BACKGROUND_ENROLL_TIMEOUT: Duration = Duration::from_secs(15);

impl Task {
    /// What is wanted of the current sandbox.
    pub(super) fn desired(&mut self, record: &Record) -> Desired {
        let inventory = self.shared.source.inventory();
        let Some(pod) = inventory
            .pod(&self.key)
            .filter(|pod| record.belongs_to(pod))
        else {
            // A pod that nobody has shown yet is not gone.
            if !inventory.is_complete() || record.admitted_unenrolled {
                return Desired::Unknown;
            }
            return Desired::Gone {
                since: *self.gone_since.get_or_insert_with(BootInstant::now),
            };
        };
        self.gone_since = None;
        let enrollment = self.shared.decide(pod).enrollment;
        if record.uses_sidecar() {
            return self.desired_for_sidecar(record, pod, enrollment);
        }
        match enrollment {
            // What is in place for ztunnel leaves in order first.
            Enrollment::Sidecar if record.intent.has_effects() => Desired::Out {
                is_announced: self.shared.outputs.has_withdrawn(&record.pod),
            },
            Enrollment::Ambient | Enrollment::Sidecar => Desired::In {
                in_sync: self.is_in_sync(record, pod, enrollment),
            },
            Enrollment::None => Desired::Out {
                is_announced: self.shared.outputs.has_withdrawn(&record.pod),
            },
            Enrollment::Unknown => Desired::Unknown,
        }
    }

    /// Whether the pod is to be left as it is, for another agent. What was begun of it is brought to an end first.
    fn is_handed_over(&self) -> bool {
        let rests = |record: &Record| record.intent.is_stable();
        self.shared.leave_mode.is(Leave::Handover) && self.records.last().is_none_or(rests)
    }

    /// Takes the current sandbox the next steps towards what is wanted, and sets when to look again.
    pub(super) async fn advance(&mut self) {
        (self.wake, self.next) = (None, None);
        if self.is_handed_over() {
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
        // Each action leads to another state; five are more than any path has.
        for _ in 0..5 {
            if let Err(failure) = self.identify() {
                return self.retry_later(failure);
            }
            let Some(current) = self.records.last().cloned() else {
                // The ADD of its successor may have been missed.
                match self.discover().await {
                    Ok(()) if self.records.is_empty() => return,
                    Ok(()) => continue,
                    Err(failure) => return self.retry_later(failure),
                }
            };
            let desired = self.desired(&current);
            let action = next(
                &current.intent,
                desired,
                BootInstant::now(),
                self.shared.timing(),
            );
            self.next = Some(action);
            match self.act(action).await {
                Ok(Step::Continue) => {
                    self.attempts = 0;
                    // Whoever tells others of the pod hears of each step.
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
                        .any(Record::has_unknown_netns)
                    {
                        // The one that stands has taken its place.
                        self.wake_in(POLL_INTERVAL);
                    }
                    return self.check_listeners().await;
                }
                Ok(Step::Wait(wait)) => return self.wake_in(wait),
                Err(failure) => return self.retry_later(failure),
            }
        }
        self.wake_in(POLL_INTERVAL);
    }

    async fn act(&mut self, action: Action) -> Result<Step, Failure> {
        if self.needs_netns_lookup(action) {
            return self.locate_netns(action).await;
        }
        let Some(record) = self.records.last_mut() else {
            return Ok(Step::Done);
        };
        let (pipeline, log) = (&self.shared.pipeline, &mut self.timeline);
        match action {
            Action::Idle => Ok(Step::Done),
            Action::WaitUntil(then) => Ok(Step::Wait(then.since(BootInstant::now()))),
            Action::Enroll => self.enroll_in_background().await,
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

    /// Enrols the current sandbox because it is wanted, and nobody waits. Anything new of the pod comes first.
    async fn enroll_in_background(&mut self) -> Result<Step, Failure> {
        let mut cancelled = pin!(interrupt::any(self.sent.clone(), self.seen));
        let context = EnrollContext::background(
            Instant::now() + BACKGROUND_ENROLL_TIMEOUT,
            cancelled.as_mut(),
        );
        match self.enroll(context).await {
            Ok(()) => Ok(Step::Continue),
            // A look follows when that has passed.
            Err(failure)
                if failure.reason == Reason::Starting && failure.undo_failures.is_empty() =>
            {
                Ok(Step::Wait(INTERRUPTED_RETRY_INTERVAL))
            }
            Err(failure) => Err(failure),
        }
    }

    /// Enrols the current sandbox.
    pub(super) async fn enroll(&mut self, context: EnrollContext<'_>) -> Result<(), Failure> {
        let shared = Arc::clone(&self.shared);
        self.update_redirection()?;
        let Some(record) = self.records.last_mut() else {
            return Ok(());
        };
        let stood = Some(record.intent.clone()).filter(Intent::was_in_mesh);
        let broker = shared.pipeline.begin(record)?;
        self.publish_view();
        let Some(record) = self.records.last_mut() else {
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
        self.failure = None;
        if !record.redirection.is_sidecar() {
            shared.report_not_permitted(&self.key, record);
            self.check_listeners_later();
        }
        Ok(())
    }

    /// Nothing is left to do. What failed before has been done since, or is not wanted any more.
    fn clear_failure(&mut self, desired: Desired) {
        let is_known = !matches!(desired, Desired::Gone { .. } | Desired::Unknown);
        if is_known && self.drifted.is_none() {
            self.failure = None;
        }
    }

    pub(super) fn wake_in(&mut self, wait: Duration) {
        let then = Instant::now() + wait;
        self.wake = Some(self.wake.map_or(then, |wake| wake.min(then)));
    }

    /// The wait doubles with each failure; a new event cuts it short.
    pub(super) fn retry_later(&mut self, failure: Failure) {
        let wait = POLL_INTERVAL
            .saturating_mul(1 << self.attempts.min(6))
            .min(MAX_RETRY_INTERVAL)
            // Pods that failed together do not come back together.
            .mul_f64(0.75 + fastrand::f64() / 2.0);
        if is_transient(failure.reason) {
            tracing::debug!(pod = format!("{}/{}", self.key.0, self.key.1), %failure, "Will try again");
        } else {
            tracing::warn!(pod = format!("{}/{}", self.key.0, self.key.1), %failure, "Will try again");
        }
        self.shared.counters.retry(failure.reason);
        self.attempts = self.attempts.saturating_add(1);
        self.failure = Some(failure);
        self.wake_in(wait);
    }
}
