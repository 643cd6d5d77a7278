//! The effects on a sandbox: enrolling, withdrawing and deleting.
//!
//! Every intent is checkpointed before its effects. No step waits for a restarted service: the step fails at once with
//! a transient reason ([`is_transient`]), and callers that can wait repeat the whole operation.

mod enroll;
mod find;
mod lifecycle;
mod update;
mod withdraw;

pub(crate) use enroll::{CancelReason, EnrollContext, work_deadline};
pub(crate) use lifecycle::{NetnsState, Reclaimed, is_gone};

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use inpod_types::{Enrollment, Failure, Reason, Revision, Workload, WorkloadInfo};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

use crate::{
    boottime::BootInstant,
    checkpoint::{Checkpoint, CheckpointError, Record},
    clients::Clients,
};

/// The service instances that have received everything from pod-events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Synced {
    pub netconfig: Option<Arc<str>>,
    pub broker: Option<Arc<str>>,
}

/// Issues revisions. Revisions increase within a boot, even across restarts of pod-events; no ordered effect outlives
/// the boot.
#[derive(Debug, Default)]
pub(super) struct Revisions(AtomicU64);

impl Revisions {
    /// Returns a greater revision than all earlier revisions.
    pub(super) fn next(&self) -> Revision {
        let clock = u64::try_from(BootInstant::now().since_boot().as_nanos()).unwrap_or(u64::MAX);
        let next = |last: u64| Some(clock.max(last + 1));
        let last = self
            .0
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        Revision(clock.max(last.unwrap_or_default() + 1))
    }
}

#[derive(Debug)]
pub(super) struct Pipeline {
    pub clients: Clients,
    pub checkpoint: Checkpoint,
    pub synced: watch::Receiver<Synced>,
    pub revisions: Revisions,
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        Self::new(
            Reason::CheckpointFailed,
            format!("{:#}", anyhow::Error::from(error)),
        )
    }
}

pub(super) fn workload_of(record: &Record) -> Workload {
    Workload {
        sandbox: record.sandbox.clone(),
        uid: record.pod.uid.clone(),
        info: WorkloadInfo {
            name: record.pod.name.clone(),
            namespace: record.pod.namespace.clone(),
            service_account: record.service_account.clone(),
        },
        netns: record.netns_id,
        revision: record.revision,
    }
}

/// Returns whether retrying resolves a failure: a service restarted or is not synced yet, or another command for the
/// pod took precedence.
pub(crate) fn is_transient(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::Starting
            | Reason::ClaimUnknown
            | Reason::InstanceMismatch
            | Reason::NotSeeded
            | Reason::RevisionStale
    )
}

impl Pipeline {
    /// Returns the broker's instance.
    ///
    /// # Errors
    ///
    /// STARTING, at once, if a service is not synced.
    pub(super) fn broker(&self) -> Result<Arc<str>, Failure> {
        let synced = self.synced.borrow();
        let known = synced.broker.clone().filter(|_| synced.netconfig.is_some());
        known.ok_or_else(|| Failure::new(Reason::Starting, describe_missing(&synced)))
    }

    /// Returns the broker's instance, or `None` for a sidecar, which needs netconfig alone.
    ///
    /// # Errors
    ///
    /// STARTING, at once, if a needed service is not synced.
    pub(super) fn broker_for(&self, enrollment: Enrollment) -> Result<Option<Arc<str>>, Failure> {
        if enrollment != Enrollment::Sidecar {
            return self.broker().map(Some);
        }
        let synced = self.synced.borrow();
        let netconfig = synced.netconfig.is_some();
        let not_ready = || Failure::new(Reason::Starting, describe_missing(&synced));
        netconfig.then_some(None).ok_or_else(not_ready)
    }

    /// Waits until the needed services are synced. A pod's task must not await this function: syncing netconfig
    /// requires every task to claim its netns.
    pub(super) async fn wait_ready(
        &self,
        enrollment: Enrollment,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let mut synced = self.synced.clone();
        let needs_broker = enrollment != Enrollment::Sidecar;
        let all = synced.wait_for(|synced| {
            synced.netconfig.is_some() && (synced.broker.is_some() || !needs_broker)
        });
        if let Ok(Ok(_)) = timeout_at(deadline, all).await {
            return Ok(());
        }
        let failure = Failure::new(
            Reason::DependencyUnavailable,
            describe_missing(&self.synced.borrow()),
        );
        Err(failure.retry_after(Duration::from_secs(5)))
    }

    /// Removes a sandbox's workload from the desired set, which never contains the pod of a sidecar. The record keeps
    /// the revision of the workload's last addition, which decides the later of a pod's two sandboxes.
    async fn remove_workload(&self, record: &Record, deadline: Instant) -> Result<(), Failure> {
        if record.redirection.is_sidecar() {
            return Ok(());
        }
        let broker = self.synced.borrow().broker.clone();
        let away = || {
            Failure::new(
                Reason::DependencyUnavailable,
                "ztunnel-broker is unavailable",
            )
        };
        let broker = broker.ok_or_else(away)?;
        self.clients
            .remove_workload(&broker, &record.sandbox, self.revisions.next(), deadline)
            .await
    }

    fn broker_instance(&self) -> Option<Arc<str>> {
        self.synced.borrow().broker.clone()
    }

    /// Fails if ztunnel-broker was restarted while a sandbox was removed.
    fn check_same_broker(&self, record: &Record, before: Option<&str>) -> Result<(), Failure> {
        if record.redirection.is_sidecar() || self.broker_instance().as_deref() == before {
            return Ok(());
        }
        let message = "ztunnel-broker was restarted, and may have been sent the sandbox again";
        Err(Failure::new(Reason::Starting, message))
    }
}

fn describe_missing(synced: &Synced) -> String {
    let name = if synced.netconfig.is_none() {
        "netconfig"
    } else {
        "ztunnel-broker"
    };
    format!("{name} is unavailable or not synchronized yet")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn revisions_grow_also_across_a_restart_of_the_process() {
        let before = Revisions::default();
        let last = (0..1000).map(|_| before.next()).max().unwrap();
        assert!(Revisions::default().next() > last);
    }
}
