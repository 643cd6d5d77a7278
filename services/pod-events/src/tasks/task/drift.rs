//! Repair of drift: restores lost claims and changed rules.

use std::{sync::Arc, time::SystemTime};

use inpod_types::{Failure, Reason, SandboxRef};
use tokio::time::Instant;

use super::Task;
use crate::{
    drift::DriftKind,
    status,
    tasks::pipeline::{Reclaimed, is_transient},
};

impl Task {
    pub(super) async fn rules_drifted(&mut self, sandbox: &SandboxRef, kind: DriftKind) {
        if self.index_of(sandbox).is_none() {
            return;
        }
        self.drifted = Some(kind);
        // A failed repair is retried at the usual interval, however often drift is reported.
        if self.attempts == 0 || self.wake.is_none() {
            self.reconcile_now().await;
        }
    }

    /// Claims, verifies and repairs every netns that netconfig may have lost or reports as drifted. Repeated repairs
    /// are delayed more and more: two agents fighting over the rules cost the pod more than a single winner.
    pub(super) async fn repair(&mut self) -> Result<(), Failure> {
        if !self.unclaimed && self.drifted.is_none() {
            return Ok(());
        }
        let now = Instant::now();
        if !self.unclaimed
            && let Some(until) = self.repair_backoff.delayed_until(now)
        {
            self.report_contested();
            self.wake_in(until.duration_since(now));
            return Ok(());
        }
        self.reclaim().await
    }

    fn is_contested(&self) -> bool {
        let is_contested = |failure: &Failure| failure.reason == Reason::RulesContested;
        self.failure.as_ref().is_some_and(is_contested)
    }

    /// Returns until when a failure stays although the rules are repaired. Otherwise, each repair that is undone at once
    /// would show the pod as a member of the mesh for a moment.
    pub(super) fn unproven_until(&self) -> Option<Instant> {
        self.failure.as_ref()?;
        self.repair_backoff.unproven_until(Instant::now())
    }

    pub(super) fn report_contested(&mut self) {
        if self.is_contested() {
            return;
        }
        let message = "the pod's rules were repaired several times and are undone again";
        self.failure = Some(Failure::new(Reason::RulesContested, message));
        self.timeline.note(message);
        if let Some(record) = self.records.last() {
            tracing::warn!(pod = %record.pod, sandbox = %record.sandbox, "Another agent keeps undoing repairs; waiting longer");
        }
    }

    pub(super) fn record_repair(&mut self, kind: DriftKind) {
        self.repair_backoff.record_repair(Instant::now());
        *self.drift.entry(kind).or_default() += 1;
        self.shared.repairs.count(kind);
        if self.is_contested() && self.unproven_until().is_none() {
            self.failure = None;
        }
        if let Some(record) = self.records.last() {
            let message = format!("Repaired drift of kind {kind}");
            let (pod, reason) = (&record.pod, reason_of(kind));
            let status = &self.shared.status;
            status.event(pod, status::EventKind::Warning, reason, &message);
        }
    }

    /// Claims and repairs every netns in which effects may be in place. Failures are retried.
    async fn reclaim(&mut self) -> Result<(), Failure> {
        self.probe_exemption = None;
        let mut result = Ok(());
        let mut repaired = false;
        for record in self.records.iter_mut().map(Arc::make_mut) {
            if !record.intent.has_effects() || record.has_unknown_netns() {
                continue;
            }
            let pipeline = &self.shared.pipeline;
            match pipeline.reclaim(record, &mut self.timeline).await {
                Ok(Reclaimed::Intact) => {}
                Ok(Reclaimed::Repaired) => repaired = true,
                Ok(Reclaimed::Gone) => super::delete::mark_ended(record),
                Err(failure) => result = Err(failure),
            }
        }
        if repaired {
            let kind = self.drifted.unwrap_or(DriftKind::Changed);
            self.record_repair(kind);
        }
        match &result {
            Ok(()) => {
                (self.unclaimed, self.drifted) = (false, None);
                self.evidence.rules = Some(SystemTime::now());
            }
            Err(failure) if !was_refused(failure.reason) => self.unclaimed = true,
            // An impossible repair is delayed like a repeated repair.
            Err(_) => self.repair_backoff.record_repair(Instant::now()),
        }
        result
    }
}

/// Returns whether netconfig refused a repair. While netconfig is away, no other agent undoes its work.
fn was_refused(reason: Reason) -> bool {
    let is_away = matches!(
        reason,
        Reason::DependencyUnavailable | Reason::DeadlineExceeded
    );
    !is_away && !is_transient(reason)
}

fn reason_of(kind: DriftKind) -> Reason {
    match kind {
        DriftKind::Flushed | DriftKind::Replaced | DriftKind::Changed => Reason::RulesDiffer,
        DriftKind::ListenerLost => Reason::ListenerLost,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::{sync::watch, time::advance};

    use super::*;
    use crate::{
        tasks::{plan::Desired, task::interrupt::Interrupts},
        testing::{record, shared},
    };

    #[tokio::test(start_paused = true)]
    async fn contested_rules_stay_a_failure_until_a_repair_lasts() {
        let directory = tempfile::tempdir().unwrap();
        let shared = shared(directory.path()).await;
        let record = record("c1");
        let key = Arc::new((record.pod.namespace.clone(), record.pod.name.clone()));
        let interrupts = watch::channel(Interrupts::default()).1;
        let mut task = Task::new(shared, key, vec![record.into()], Arc::default(), interrupts);
        let in_sync = Desired::In { in_sync: true };
        for _ in 0..5 {
            task.record_repair(DriftKind::Flushed);
        }
        task.report_contested();
        advance(Duration::from_secs(10)).await;
        task.record_repair(DriftKind::Flushed);
        assert!(task.is_contested(), "the repair may be undone");
        // netconfig reports rules that are removed before the rules are read back.
        task.failure = Some(Failure::new(Reason::KernelRefused, "the rules differ"));
        task.clear_failure(in_sync);
        assert!(task.failure.is_some(), "the repair may be undone");
        let due = task.due().unwrap();
        let left = due.duration_since(Instant::now());
        assert_eq!(left, Duration::from_secs(10));
        tokio::time::sleep_until(due).await;
        task.clear_failure(in_sync);
        assert_eq!(task.failure, None);
    }

    #[test]
    fn only_refused_repairs_count_as_undone() {
        assert!(was_refused(Reason::KernelRefused) && was_refused(Reason::Ipv6Unavailable));
        for away in [
            Reason::DependencyUnavailable,
            Reason::DeadlineExceeded,
            Reason::ClaimUnknown,
        ] {
            assert!(!was_refused(away), "{away:?}");
        }
    }
}
