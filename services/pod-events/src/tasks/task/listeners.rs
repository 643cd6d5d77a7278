//! Checks that the traffic of an enrolled pod reaches ztunnel: only ztunnel listens on the ports of the pod's rules, and
//! nothing in the pod stops the traffic.

use std::{
    sync::{Arc, PoisonError},
    time::{Duration, SystemTime},
};

use inpod_proto::{
    netconfig::v1::{Finding, FindingKind},
    types::v1 as types,
};
use inpod_types::{Failure, Reason};
use tokio::time::Instant;

use super::{Task, interrupt};
use crate::{
    checkpoint::{Intent, Record},
    clients::{self, deadline_in},
    drift::DriftKind,
    status::EventKind,
    tasks::pipeline::Pipeline,
};

/// The number of pods checked per period; on a node with more pods, each pod is checked less often.
const PODS_PER_PERIOD: usize = 10;

/// The delay of the first check after an enrollment: a container that stops the pod's traffic usually does so when it
/// starts.
const FIRST_CHECK_DELAY: Duration = Duration::from_secs(20);

/// The interval of checks of a blocked pod, short so that the end of the failure is soon seen.
const BLOCKED_CHECK_INTERVAL: Duration = Duration::from_secs(5);

impl Task {
    pub(super) fn check_listeners_later(&mut self) {
        let interval = self.listener_check_interval();
        let first = interval.map(|interval| interval.min(jittered(FIRST_CHECK_DELAY)));
        self.listeners_due = first.map(|delay| Instant::now() + delay);
    }

    /// Returns the interval of checks, which grows with the node's pods so that all checks together take the same time
    /// on every node.
    fn listener_check_interval(&self) -> Option<Duration> {
        let period = self.shared.config.listener_check()?;
        Some(jittered(scaled(period, self.shared.owners.len())))
    }

    /// Checks the path from the pod to ztunnel if the check is due. Sends the workload to ztunnel again if the pod's
    /// listeners are lost.
    pub(super) async fn check_path(&mut self) {
        let Some(interval) = self.listener_check_interval() else {
            return;
        };
        let is_enrolled = |record: &Arc<Record>| {
            let is_applied = matches!(record.intent, Intent::Enrolled { .. });
            is_applied && !record.redirection.is_sidecar()
        };
        if !self.records.last().is_some_and(is_enrolled) {
            (self.listeners_due, self.blocked) = (None, None);
            return;
        }
        let now = Instant::now();
        let due = *self.listeners_due.get_or_insert(now + interval);
        if due > now {
            return;
        }
        self.listeners_due = Some(now + interval);
        if let Err(failure) = self.restore_path().await {
            self.retry_later(failure);
            self.listeners_due = self.wake;
        } else if self.blocked.is_some() {
            self.listeners_due = Some(now + interval.min(BLOCKED_CHECK_INTERVAL));
        }
    }

    async fn restore_path(&mut self) -> Result<(), Failure> {
        let cancelled = interrupt::urgent(self.sent.clone(), self.seen);
        let Some(record) = self.records.last_mut().map(Arc::make_mut) else {
            return Ok(());
        };
        let pipeline = &self.shared.pipeline;
        let find = async |record: &Record| {
            let found = pipeline.clients.find_conflicts(record, deadline_in(5));
            found.await.map(Obstacles::of)
        };
        let mut obstacles = find(record).await?;
        let is_of_taken = |failure: &Failure| failure.reason == Reason::ListenerTaken;
        let was_taken = self.blocked.as_ref().is_some_and(is_of_taken);
        // Once a port is free again, ztunnel need not wait for the broker's next attempt.
        if obstacles.is_repairable() && !was_taken && will_be_sent(pipeline, record).await? {
            // The broker's reports decide about a failure.
            obstacles.lost.clear();
        }
        let is_delayed = self.repair_backoff.delayed_until(Instant::now()).is_some();
        if obstacles.is_repairable() && !is_delayed {
            let lost = obstacles.lost.join(" ");
            tracing::warn!(pod = %record.pod, sandbox = %record.sandbox, lost, "ztunnel does not listen any more");
            self.timeline.note(lost);
            pipeline
                .readd_workload(record, &mut self.timeline, cancelled)
                .await?;
            obstacles = find(record).await?;
            if obstacles.is_repairable() {
                // ztunnel acknowledges the pod and does not listen: each attempt cuts the pod's connections.
                self.repair_backoff.record_repair(Instant::now());
            } else {
                self.record_repair(DriftKind::ListenerLost);
            }
        }
        let blocked = obstacles.into_failure();
        if blocked.is_none() {
            self.evidence.path = Some(SystemTime::now());
        }
        if self.blocked != blocked {
            self.set_blocked(blocked);
        }
        Ok(())
    }

    fn set_blocked(&mut self, blocked: Option<Failure>) {
        self.timeline.note(match &blocked {
            Some(failure) => failure.to_string(),
            None => "its traffic reaches ztunnel again".to_owned(),
        });
        let is_hidden = {
            let view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
            view.unserved.is_some()
        };
        // Events report the failure that is shown, which is then ztunnel's refusal; the process is in this one.
        if let (Some(failure), Some(record), true) = (&blocked, self.records.last(), is_hidden) {
            let (pod, warning) = (&record.pod, EventKind::Warning);
            let status = &self.shared.status;
            status.event(pod, warning, failure.reason, &failure.message);
        }
        self.blocked = blocked;
    }
}

/// Returns whether the pod is desired and no ztunnel has acknowledged the pod: the next ztunnel receives the pod
/// anyway.
async fn will_be_sent(pipeline: &Pipeline, record: &Record) -> Result<bool, Failure> {
    let all = pipeline.clients.list_workloads(deadline_in(5)).await?;
    let sandbox = types::SandboxRef::from(&record.sandbox);
    let mut desired = all.workloads.iter().filter_map(|it| it.workload.as_ref());
    let is_in_set = desired.any(|workload| workload.sandbox.as_ref() == Some(&sandbox));
    let mut reports = clients::ztunnels(&all, record).into_iter();
    Ok(is_in_set && !reports.any(|report| report.acknowledged_at.is_some()))
}

/// The findings that keep a pod's traffic from ztunnel, as sentences.
#[derive(Debug, Default)]
struct Obstacles {
    /// Foreign listeners on ztunnel's ports.
    taken: Vec<String>,
    /// Ports without ztunnel's listener.
    lost: Vec<String>,
    /// Other conditions that stop connections.
    stopped: Vec<String>,
    /// Uses of ztunnel's mark by the pod.
    bypassed: Vec<String>,
}

impl Obstacles {
    fn of(findings: Vec<Finding>) -> Self {
        let mut obstacles = Self::default();
        for finding in findings {
            let kind = finding.kind();
            if kind == FindingKind::ListenerTaken {
                obstacles.taken.push(finding.sentence);
            } else if kind == FindingKind::ListenerMissing {
                obstacles.lost.push(finding.sentence);
            } else if finding.blocks {
                obstacles.stopped.push(finding.sentence);
            } else if matches!(
                kind,
                FindingKind::MarkedConnection | FindingKind::MarkingChain
            ) {
                obstacles.bypassed.push(finding.sentence);
            }
        }
        obstacles
    }

    /// Returns whether sending the pod again may bring the listeners back.
    fn is_repairable(&self) -> bool {
        self.taken.is_empty() && !self.lost.is_empty()
    }

    fn into_failure(self) -> Option<Failure> {
        let (reason, sentences) = [
            (Reason::ListenerTaken, self.taken),
            (Reason::ListenerLost, self.lost),
            (Reason::TrafficBlocked, self.stopped),
            (Reason::TrafficBypassed, self.bypassed),
        ]
        .into_iter()
        .find(|(_, sentences)| !sentences.is_empty())?;
        Some(Failure::new(reason, sentences.join(" ")))
    }
}

fn scaled(period: Duration, pods: usize) -> Duration {
    let periods = pods.div_ceil(PODS_PER_PERIOD).max(1);
    period.saturating_mul(u32::try_from(periods).unwrap_or(u32::MAX))
}

/// Returns 75 % to 125 % of the period, so that a node's pods are not all served at once.
pub(super) fn jittered(period: Duration) -> Duration {
    period.mul_f64(0.75 + fastrand::f64() / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_node_makes_no_more_checks_than_one_with_ten_pods() {
        let minute = Duration::from_secs(60);
        for (pods, minutes) in [(0, 1), (1, 1), (10, 1), (11, 2), (500, 50)] {
            assert_eq!(scaled(minute, pods), minute * minutes, "{pods} pods");
        }
    }
}
