//! The end of sandboxes, reported by the runtime or the source, or found by inspection.

use std::{sync::Arc, time::Duration};

use inpod_types::{Enrollment, Failure, NetnsId, Reason, SandboxRef};

use super::{POLL_INTERVAL, Step, Task};
use crate::{
    boottime::BootInstant,
    checkpoint::{Intent, Record},
    pod::Pod,
    status::EventKind,
    tasks::pipeline::NetnsState,
    trace,
};

/// The interval of checking the netns of a pod that is outside the mesh and missing from the source.
const GONE_POLL_INTERVAL: Duration = Duration::from_secs(30);

/// The longest interval between two inspections of the processes in an ending netns.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(5);

const FORGET_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// A pod with running processes is reported as a failure so long after the DEL.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);

impl Task {
    /// Returns whether the deletion was deferred.
    pub(super) async fn delete(&mut self, sandbox: &SandboxRef) -> bool {
        let Some(index) = self.index_of(sandbox) else {
            return false;
        };
        let pipeline = &self.shared.pipeline;
        if let Some(record) = self.records.get_mut(index).map(Arc::make_mut) {
            if record.is_bare() && pipeline.forget(record).await.is_ok() {
                let trace = trace::current();
                tracing::info!(pod = %record.pod, %sandbox, trace_id = trace.id(), "Deleted");
                self.records.remove(index);
                return false;
            }
            // The first DEL counts: repeated DELs would keep a pod that runs on from being enrolled again.
            let since = deleted_since(record).unwrap_or_else(BootInstant::now);
            record.intent = Intent::Deleting { since };
            if let Err(error) = pipeline.checkpoint.write(record) {
                // A DEL never fails: the task keeps the intent in memory and acts on the intent anyway.
                tracing::error!(
                    error = format!("{:#}", anyhow::Error::from(error)),
                    "Cannot checkpoint a deletion"
                );
            }
        }
        self.timeline.note(format!("sandbox {sandbox} ends"));
        self.delete_now(index).await;
        let deferred = self.index_of(sandbox).is_some();
        if deferred {
            tracing::warn!(%sandbox, "Deferred a deletion: the sandbox still runs or a service is unavailable");
        }
        deferred
    }

    /// Deletes as much as possible now. The caller does not wait for the rest.
    async fn delete_now(&mut self, index: usize) {
        self.attempts = 0;
        if index + 1 < self.records.len() {
            self.forget_superseded().await;
            return self.wake_in(Duration::ZERO);
        }
        match self.try_delete(false).await {
            Ok(Step::Continue | Step::Done) => self.wake_in(Duration::ZERO),
            Ok(Step::Wait(wait)) => self.wake_in(wait),
            Err(failure) => self.retry_later(failure),
        }
    }

    /// Forgets the current sandbox if it has ended. If the source agrees that the pod ends, a DEL is proof enough.
    /// Otherwise, a DEL does not end a sandbox in which processes run; the inspection takes time in proportion to the
    /// processes of the node.
    pub(super) async fn try_delete(&mut self, overdue: bool) -> Result<Step, Failure> {
        let inventory = self.shared.source.inventory();
        let Some(record) = self.records.last_mut().map(Arc::make_mut) else {
            return Ok(Step::Done);
        };
        let pipeline = &self.shared.pipeline;
        let pod = inventory
            .pod(&self.key)
            .filter(|pod| record.belongs_to(pod) && !pod.terminal);
        let ends = pod.map_or_else(|| inventory.is_complete(), |pod| pod.is_terminating);
        if !ends && pipeline.netns_state(record).await? == NetnsState::InUse {
            // Before the source has shown its pods, nothing is known, so the pod stays unchanged.
            let Some(pod) = pod else {
                return Ok(Step::Wait(poll_interval(deleted_since(record))));
            };
            if overdue {
                return self.reject_delete(pod);
            }
            if is_late(record) {
                let message = "its runtime deleted the sandbox, but the pod runs in it";
                self.failure = Some(Failure::new(Reason::DeleteRejected, message));
            }
            return Ok(Step::Wait(poll_interval(deleted_since(record))));
        }
        self.forget_current().await
    }

    /// Continues with a sandbox whose DEL was wrong: processes run in the sandbox, and the source shows the pod. The
    /// next steps verify the enrollment, or undo it if the pod is not to be in the mesh.
    fn reject_delete(&mut self, pod: &Pod) -> Result<Step, Failure> {
        let Some(record) = self.records.last_mut().map(Arc::make_mut) else {
            return Ok(Step::Done);
        };
        // A redirection to a sidecar stays while the pod runs, even outside the mesh.
        let stays = record.redirection.is_sidecar()
            || self.shared.decide(pod).enrollment != Enrollment::None;
        let continued = Record {
            intent: if stays && record.netns_id.is_some() {
                Intent::Adopted
            } else {
                Intent::Enrolling
            },
            ..record.clone()
        };
        self.shared.pipeline.checkpoint.write(&continued)?;
        *record = continued;
        let message =
            "its runtime deleted the sandbox, but the pod runs in it; inpod manages it again";
        let pod = &pod.pod;
        tracing::warn!(%pod, sandbox = %record.sandbox, message, "Rejected a deletion");
        // An attempted deletion may have released the claim.
        self.unclaimed = true;
        self.timeline.note(message);
        let (status, reason) = (&self.shared.status, Reason::DeleteRejected);
        status.event(pod, EventKind::Warning, reason, message);
        Ok(Step::Continue)
    }

    /// Forgets an ended sandbox of a pod missing from the source, and withdraws a running one after the timeout.
    pub(super) async fn garbage_collect(&mut self, overdue: bool) -> Result<Step, Failure> {
        let Some(record) = self.records.last_mut().map(Arc::make_mut) else {
            return Ok(Step::Done);
        };
        let pipeline = &self.shared.pipeline;
        if matches!(
            pipeline.netns_state(record).await?,
            NetnsState::Gone | NetnsState::Empty
        ) {
            return self.forget_current().await;
        }
        if !record.intent.has_effects() {
            return Ok(Step::Wait(GONE_POLL_INTERVAL));
        }
        if overdue && !record.is_legacy() {
            pipeline.withdraw_now(record).await?;
            tracing::info!(pod = %record.pod, sandbox = %record.sandbox, "Withdrew a pod that is gone from the source");
        }
        Ok(Step::Wait(poll_interval(self.gone_since)))
    }

    pub(super) async fn forget_current(&mut self) -> Result<Step, Failure> {
        let Some(record) = self.records.last() else {
            return Ok(Step::Done);
        };
        self.shared.pipeline.forget(record).await?;
        tracing::info!(pod = %record.pod, sandbox = %record.sandbox, trace_id = trace::current().id(), "Deleted");
        self.records.pop();
        self.failure = None;
        Ok(Step::Continue)
    }

    /// Forgets earlier sandboxes of the pod.
    ///
    /// A sandbox is forgotten at once after its DEL: the broker knows that the pod's UID belongs to a later sandbox. A
    /// sandbox with an unknown netns is forgotten once the current sandbox is settled: until then, the broker may know
    /// the pod only by the earlier sandbox. A sandbox of an earlier pod of the same name is forgotten when it has
    /// ended, even without a DEL.
    pub(super) async fn forget_superseded(&mut self) {
        let current = self.records.pop();
        let settled = current
            .as_ref()
            .is_some_and(|current| current.intent.is_settled());
        let mut kept = Vec::new();
        for record in std::mem::take(&mut self.records) {
            let is_ending = matches!(record.intent, Intent::Deleting { .. });
            let stays = if record.has_unknown_netns() {
                !settled
            } else {
                !is_ending && !self.has_ended(&record).await
            };
            if stays {
                kept.push(record);
            } else if let Err(failure) = self.shared.pipeline.forget(&record).await {
                tracing::warn!(sandbox = %record.sandbox, %failure, "Cannot forget an earlier sandbox yet");
                self.wake_in(FORGET_RETRY_INTERVAL);
                kept.push(record);
            }
        }
        self.records = kept;
        self.records.extend(current);
    }

    /// Returns whether a sandbox that a newer one of the same pod has replaced has ended; otherwise requests another
    /// check. For a claimed sandbox netconfig reports the end, so nothing is checked here, unless another pod has taken
    /// the name of the sandbox's pod. The netns is inspected for sandboxes that may have no claim: after an interrupted
    /// enrollment or adoption, or with a sidecar after an uninstall.
    async fn has_ended(&mut self, record: &Record) -> bool {
        let inventory = self.shared.source.inventory();
        let successor = inventory
            .pod(&self.key)
            .filter(|pod| !record.belongs_to(pod));
        let held =
            record.is_managed() && !matches!(record.intent, Intent::Enrolling | Intent::Adopted);
        if held && successor.is_none() {
            return false;
        }
        let life = self.shared.pipeline.netns_state(record).await;
        let has_ended = matches!(life, Ok(NetnsState::Gone | NetnsState::Empty));
        if !has_ended {
            self.wake_in(if held {
                POLL_INTERVAL
            } else {
                GONE_POLL_INTERVAL
            });
        }
        has_ended
    }

    /// Handles the release of a netns by netconfig. An earlier undo may have requested the release, so the sandbox only
    /// counts as ended if its netns cannot be claimed again.
    pub(super) async fn netns_released(&mut self, sandbox: &SandboxRef, netns: NetnsId) {
        let matches = |index: &usize| {
            let record = self.records.get(*index);
            record.is_some_and(|record| {
                // The sandbox's own deletion causes the release, which must not repeat the deletion.
                let ends = matches!(record.intent, Intent::Deleting { .. });
                record.netns_id == Some(netns) && record.intent.has_effects() && !ends
            })
        };
        if self.index_of(sandbox).filter(matches).is_some() {
            self.unclaimed = true;
            // A failed release or removal is retried at the usual interval, although the attempts themselves cause this
            // event.
            if self.attempts == 0 || self.wake.is_none() {
                self.reconcile_now().await;
            }
        }
    }
}

fn deleted_since(record: &Record) -> Option<BootInstant> {
    let Intent::Deleting { since } = record.intent else {
        return None;
    };
    Some(since)
}

fn is_late(record: &Record) -> bool {
    let since = deleted_since(record);
    since.is_some_and(|since| BootInstant::now().since(since) >= REPORT_TIMEOUT)
}

/// Returns an interval that grows with the time waited for the sandbox, because each inspection takes time in
/// proportion to the node's processes.
fn poll_interval(since: Option<BootInstant>) -> Duration {
    let waited = since.map_or(Duration::ZERO, |since| BootInstant::now().since(since));
    (waited / 10).clamp(POLL_INTERVAL, MAX_POLL_INTERVAL)
}

/// Marks a sandbox that ended unnoticed, to be forgotten at once.
pub(super) fn mark_ended(record: &mut Record) {
    record.intent = Intent::Deleting {
        since: BootInstant::BOOT,
    };
}
