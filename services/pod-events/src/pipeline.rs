//! The effects on one sandbox, in their order, and their undoing.
//!
//! Listeners before rules: rules that point at a closed port reset connections. Every intent is written down before
//! the effects that it announces, and nothing here is cancelled half-way: deadlines end steps, not the pipeline.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use inpod_proto::netconfig::v1::RemovePhase;
use nix::time::{ClockId, clock_gettime};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};
use workload::{Failure, NetnsRef, Reason, Revision, Workload, WorkloadInfo};

use crate::{
    agents::Agents,
    checkpoint::{Checkpoint, CheckpointError, Intent, Record},
    timeline::Timeline,
};

/// What undoing may take, kept back from the caller's time. The broker keeps as much back for its own.
const UNDO: Duration = Duration::from_secs(3);

/// Which runs of the other services know everything that pod-events has to tell them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Synced {
    /// The run of netconfig that holds every claim.
    pub netconfig: Option<Arc<str>>,
    /// The run of the broker that has the desired set.
    pub broker: Option<Arc<str>>,
}

/// Gives out revisions. They grow within a boot, across restarts too: what they order does not outlive the boot.
#[derive(Debug, Default)]
pub struct Revisions(AtomicU64);

impl Revisions {
    /// A revision above every earlier one.
    pub fn next(&self) -> Revision {
        let clock = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from);
        let clock = u64::try_from(clock.as_nanos()).unwrap_or(u64::MAX);
        let next = |last: u64| Some(clock.max(last + 1));
        let last = self
            .0
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        Revision(clock.max(last.unwrap_or_default() + 1))
    }
}

/// Who waits for an enrolment, and how long.
#[derive(Clone, Copy)]
pub struct Caller<'a> {
    /// When the caller stops waiting.
    pub deadline: Instant,
    /// Whether the caller has gone.
    pub gone: &'a (dyn Fn() -> bool + Send + Sync),
}

impl std::fmt::Debug for Caller<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Caller")
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

impl Caller<'_> {
    /// Until when forward steps may run.
    fn forward(&self) -> Instant {
        let left = self.deadline.saturating_duration_since(Instant::now());
        self.deadline - UNDO.min(left / 3)
    }

    /// No forward step starts for a caller who is gone or out of time.
    fn still_there(&self) -> Result<(), Failure> {
        if (self.gone)() {
            return Err(Failure::new(
                Reason::DeadlineExceeded,
                "the caller went away",
            ));
        }
        if Instant::now() >= self.deadline {
            return Err(Failure::new(
                Reason::DeadlineExceeded,
                "the caller's time is over",
            ));
        }
        Ok(())
    }
}

/// What the effects need.
#[derive(Debug)]
pub struct Pipeline {
    /// The other services.
    pub agents: Agents,
    /// What is remembered.
    pub checkpoint: Checkpoint,
    /// Who knows everything.
    pub synced: watch::Receiver<Synced>,
    /// The order of changes.
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

/// The workload of a sandbox.
pub fn workload_of(record: &Record) -> Workload {
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

/// Where a netns is, with everything that is known of it.
fn believed(record: &Record) -> NetnsRef {
    NetnsRef {
        cookie: record.netns_id.map(|id| id.cookie).or(record.netns.cookie),
        ..record.netns.clone()
    }
}

fn soon(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}

impl Pipeline {
    /// Puts a sandbox into the mesh, whatever of it is there already. If that fails, what was not there before is
    /// taken back; a sandbox that was enrolled before stays so.
    ///
    /// # Errors
    ///
    /// As the first step that failed says, with what could not be undone.
    pub async fn enroll(
        &self,
        record: &mut Record,
        log: &mut Timeline,
        caller: Caller<'_>,
    ) -> Result<(), Failure> {
        let stood = matches!(record.intent, Intent::Enrolled { .. });
        let mut result = self.put_in_place(record, log, caller).await;
        if matches!(&result, Err(failure) if is_restart(failure.reason)) {
            log.note("a service was restarted meanwhile: once more");
            result = self.put_in_place(record, log, caller).await;
        }
        let Err(mut failure) = result else {
            return Ok(());
        };
        log.note(format!("failed: {failure}"));
        if !stood {
            failure.undo_failures = self.undo(record, log).await;
        }
        Err(failure)
    }

    async fn put_in_place(
        &self,
        record: &mut Record,
        log: &mut Timeline,
        caller: Caller<'_>,
    ) -> Result<(), Failure> {
        let forward = caller.forward();
        let broker = self.ready(forward).await?;
        caller.still_there()?;
        self.intend(record)?;
        let began = Instant::now();
        let claimed = self
            .agents
            .claim(
                &record.sandbox,
                &believed(record),
                &record.addresses,
                forward,
            )
            .await?;
        log.note_since(format!("claimed {}", claimed.id), began);
        record.netns_id = Some(claimed.id);
        record.addresses = claimed.addresses;
        self.checkpoint.write(record)?;
        caller.still_there()?;
        let began = Instant::now();
        // The broker keeps its own reserve of this deadline.
        self.agents
            .add_workload(&broker, &workload_of(record), caller.deadline)
            .await?;
        log.note_since("acknowledged by ztunnel", began);
        caller.still_there()?;
        let began = Instant::now();
        let fingerprint = self.agents.apply(&record.sandbox, forward).await?;
        log.note_since(format!("applied rules {fingerprint}"), began);
        record.intent = Intent::Enrolled { fingerprint };
        Ok(self.checkpoint.write(record)?)
    }

    /// Writes down that steps follow. What is enrolled stays written down as enrolled: only its order changes.
    fn intend(&self, record: &mut Record) -> Result<(), Failure> {
        record.revision = self.revisions.next();
        if !matches!(record.intent, Intent::Enrolled { .. }) {
            record.intent = Intent::Enrolling;
        }
        Ok(self.checkpoint.write(record)?)
    }

    /// Waits until both services know everything; tells the broker's run.
    async fn ready(&self, deadline: Instant) -> Result<Arc<str>, Failure> {
        let mut synced = self.synced.clone();
        let both = synced.wait_for(|synced| synced.netconfig.is_some() && synced.broker.is_some());
        if let Ok(Ok(both)) = timeout_at(deadline, both).await
            && let Some(broker) = &both.broker
        {
            return Ok(Arc::clone(broker));
        }
        let missing = if self.synced.borrow().netconfig.is_none() {
            "netconfig"
        } else {
            "ztunnel-broker"
        };
        let message = format!("{missing} is not there, or has not been told its state yet");
        Err(Failure::new(Reason::DependencyUnavailable, message)
            .retry_after(Duration::from_secs(5)))
    }

    /// Takes back whatever an enrolment left, in reverse. Tells what could not be taken back.
    pub async fn undo(&self, record: &mut Record, log: &mut Timeline) -> Vec<String> {
        let deadline = Instant::now() + UNDO;
        let mut failures = Vec::new();
        if record.netns_id.is_some() {
            let rules = self.remove_rules(record, deadline).await;
            failures.extend(rules.err().map(|failure| format!("rules: {failure}")));
            let workload = self.remove_workload(record, deadline).await;
            failures.extend(workload.err().map(|failure| format!("workload: {failure}")));
        }
        let claim = self.agents.release(&record.sandbox, deadline).await;
        failures.extend(claim.err().map(|failure| format!("claim: {failure}")));
        log.note(if failures.is_empty() {
            "undone".to_owned()
        } else {
            format!("undone but for {failures:?}")
        });
        self.out(record)
            .unwrap_or_else(|failure| failures.push(failure.to_string()));
        failures
    }

    /// Removes all rules. A restarted netconfig holds no claim: then the netns is claimed once more for it.
    async fn remove_rules(&self, record: &Record, deadline: Instant) -> Result<(), Failure> {
        let removed = self
            .agents
            .remove_rules(&record.sandbox, RemovePhase::Final, deadline)
            .await;
        match removed {
            Err(failure) if failure.reason == Reason::ClaimUnknown => {
                self.agents
                    .claim(
                        &record.sandbox,
                        &believed(record),
                        &record.addresses,
                        deadline,
                    )
                    .await?;
                self.agents
                    .remove_rules(&record.sandbox, RemovePhase::Final, deadline)
                    .await
                    .map(drop)
            }
            other => other.map(drop),
        }
    }

    async fn remove_workload(&self, record: &mut Record, deadline: Instant) -> Result<(), Failure> {
        let Some(broker) = self.synced.borrow().broker.clone() else {
            return Err(Failure::new(
                Reason::DependencyUnavailable,
                "ztunnel-broker is not there",
            ));
        };
        record.revision = self.revisions.next();
        self.agents
            .remove_workload(&broker, &record.sandbox, record.revision, deadline)
            .await
    }

    fn out(&self, record: &mut Record) -> Result<(), Failure> {
        record.intent = Intent::Out;
        record.netns_id = None;
        Ok(self.checkpoint.write(record)?)
    }

    /// Writes down that peers are told that the pod leaves.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn start_leaving(&self, record: &mut Record, log: &mut Timeline) -> Result<(), Failure> {
        log.note("leaving: peers are told");
        record.intent = Intent::Leaving {
            since: SystemTime::now(),
        };
        Ok(self.checkpoint.write(record)?)
    }

    /// Lets new connections go direct.
    ///
    /// # Errors
    ///
    /// As netconfig says.
    pub async fn drain(&self, record: &mut Record, log: &mut Timeline) -> Result<(), Failure> {
        let flows = self
            .agents
            .remove_rules(&record.sandbox, RemovePhase::Drain, soon(5))
            .await?;
        log.note(format!("draining {flows} captured connections"));
        record.intent = Intent::Draining {
            since: SystemTime::now(),
        };
        Ok(self.checkpoint.write(record)?)
    }

    /// Takes the rest away once no captured connection is left, or at once. Tells whether it is done.
    ///
    /// # Errors
    ///
    /// As the services say.
    pub async fn finish(
        &self,
        record: &mut Record,
        log: &mut Timeline,
        overdue: bool,
    ) -> Result<bool, Failure> {
        let flows = self
            .agents
            .inspect(&record.sandbox, soon(5))
            .await?
            .captured_flows;
        if flows > 0 && !overdue {
            return Ok(false);
        }
        self.remove_workload(record, soon(5)).await?;
        self.remove_rules(record, soon(5)).await?;
        self.agents.release(&record.sandbox, soon(5)).await?;
        log.note(format!("left the mesh, {flows} captured connections cut"));
        tracing::info!(pod = %record.pod, sandbox = %record.sandbox, cut = flows, "Withdrew");
        self.out(record)?;
        Ok(true)
    }

    /// Whether a sandbox has ended: its path is gone, or no process but its own is left in its netns.
    ///
    /// # Errors
    ///
    /// When netconfig is not there.
    pub async fn has_ended(&self, record: &Record) -> Result<bool, Failure> {
        let seen = match self.agents.inspect(&record.sandbox, soon(2)).await {
            Err(failure) if failure.reason == Reason::ClaimUnknown => {
                match self
                    .agents
                    .claim(
                        &record.sandbox,
                        &believed(record),
                        &record.addresses,
                        soon(2),
                    )
                    .await
                {
                    Err(failure) if is_gone(failure.reason) => return Ok(true),
                    claimed => claimed?,
                };
                self.agents.inspect(&record.sandbox, soon(2)).await?
            }
            seen => seen?,
        };
        Ok(!seen.path_intact || seen.processes.iter().all(|process| process.sandbox_own))
    }

    /// Forgets a sandbox that has ended, everywhere. Rules die with the netns.
    ///
    /// # Errors
    ///
    /// When one of the services could not be told.
    pub async fn forget(&self, record: &mut Record) -> Result<(), Failure> {
        let sandbox = record.sandbox.clone();
        let release = self.agents.release(&sandbox, soon(2));
        let (workload, claim) = if matches!(record.intent, Intent::Out) && record.netns_id.is_none()
        {
            (Ok(()), Ok(()))
        } else {
            let remove = self.remove_workload(record, soon(2));
            tokio::join!(remove, release)
        };
        workload.and(claim)?;
        Ok(self.checkpoint.remove(&sandbox)?)
    }

    /// Claims a sandbox's netns again for a restarted netconfig and mends its rules. Tells whether the sandbox is
    /// still there.
    ///
    /// # Errors
    ///
    /// As netconfig says.
    pub async fn reclaim(&self, record: &mut Record, log: &mut Timeline) -> Result<bool, Failure> {
        match self
            .agents
            .claim(
                &record.sandbox,
                &believed(record),
                &record.addresses,
                soon(5),
            )
            .await
        {
            Err(failure) if is_gone(failure.reason) => return Ok(false),
            claimed => record.netns_id = Some(claimed?.id),
        }
        if !matches!(
            record.intent,
            Intent::Enrolled { .. } | Intent::Leaving { .. }
        ) {
            return Ok(true);
        }
        let differences = self
            .agents
            .verify(&record.sandbox, soon(5))
            .await?
            .differences;
        if !differences.is_empty() {
            tracing::warn!(pod = %record.pod, ?differences, "Mending rules");
            let fingerprint = self.agents.apply(&record.sandbox, soon(5)).await?;
            log.note(format!(
                "mended rules, now {fingerprint}: {}",
                differences.join("; ")
            ));
        }
        Ok(true)
    }
}

/// Whether a service lost its memory between two steps.
fn is_restart(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::ClaimUnknown | Reason::InstanceMismatch | Reason::NotSeeded
    )
}

/// Whether a netns is known to be no more.
fn is_gone(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::NetnsMissing | Reason::NetnsMismatch | Reason::NetnsNotANetns
    )
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

    #[tokio::test(start_paused = true)]
    async fn forward_steps_leave_three_seconds_of_thirty_for_undoing() {
        let deadline = Instant::now() + Duration::from_secs(30);
        let caller = Caller {
            deadline,
            gone: &|| false,
        };
        assert_eq!(deadline - caller.forward(), UNDO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_short_deadline_is_shared_between_doing_and_undoing() {
        let deadline = Instant::now() + Duration::from_secs(3);
        let caller = Caller {
            deadline,
            gone: &|| false,
        };
        assert_eq!(deadline - caller.forward(), Duration::from_secs(1));
    }

    #[tokio::test]
    async fn nothing_starts_for_a_caller_who_is_gone_or_late() {
        let soon = Instant::now() + Duration::from_secs(30);
        assert!(
            Caller {
                deadline: soon,
                gone: &|| true
            }
            .still_there()
            .is_err()
        );
        assert!(
            Caller {
                deadline: Instant::now(),
                gone: &|| false
            }
            .still_there()
            .is_err()
        );
        assert!(
            Caller {
                deadline: soon,
                gone: &|| false
            }
            .still_there()
            .is_ok()
        );
    }
}
