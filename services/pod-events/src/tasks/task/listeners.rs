//! Checks that ztunnel listens on the ports to which a pod's rules redirect. Without listeners, the pod's connections
//! are refused.

use std::{sync::Arc, time::Duration};

use inpod_proto::{netconfig::v1::list_listeners_request::Target, types::v1 as types};
use inpod_types::Failure;
use tokio::time::Instant;

use super::{Task, interrupt};
use crate::{
    binds::{Socket, ZTUNNEL_TCP_PORTS},
    checkpoint::{Intent, Record},
    clients::{self, deadline_in},
    drift::DriftKind,
    pod::Protocol,
    tasks::pipeline::Pipeline,
};

/// The number of pods checked per period; on a node with more pods, each pod is checked less often.
const PODS_PER_PERIOD: usize = 10;

impl Task {
    pub(super) fn check_listeners_later(&mut self) {
        let interval = self.listener_check_interval();
        self.listeners_due = interval.map(|interval| Instant::now() + interval);
    }

    /// Returns the interval of checks, which grows with the node's pods so that all checks together take the same time
    /// on every node.
    fn listener_check_interval(&self) -> Option<Duration> {
        let period = self.shared.config.listener_check()?;
        Some(jittered(scaled(period, self.shared.owners.len())))
    }

    /// Sends the workload to ztunnel again if the pod's listeners are lost.
    pub(super) async fn check_listeners(&mut self) {
        let Some(interval) = self.listener_check_interval() else {
            return;
        };
        let is_enrolled = |record: &Arc<Record>| {
            let is_applied = matches!(record.intent, Intent::Enrolled { .. });
            is_applied && !record.redirection.is_sidecar()
        };
        if !self.records.last().is_some_and(is_enrolled) {
            self.listeners_due = None;
            return;
        }
        let now = Instant::now();
        let due = *self.listeners_due.get_or_insert(now + interval);
        if due > now {
            return;
        }
        self.listeners_due = Some(now + interval);
        if let Err(failure) = self.restore_listeners().await {
            self.retry_later(failure);
            self.listeners_due = self.wake;
        }
    }

    async fn restore_listeners(&mut self) -> Result<(), Failure> {
        let cancelled = interrupt::urgent(self.sent.clone(), self.seen);
        let Some(record) = self.records.last_mut().map(Arc::make_mut) else {
            return Ok(());
        };
        let pipeline = &self.shared.pipeline;
        let target = Target::Sandbox((&record.sandbox).into());
        let sockets = pipeline.clients.sockets(target, deadline_in(5)).await?;
        let lost = lost(&sockets);
        if lost.is_empty() || will_be_sent(pipeline, record).await? {
            return Ok(());
        }
        if self.repair_backoff.delayed_until(Instant::now()).is_some() {
            self.report_contested();
            return Ok(());
        }
        tracing::warn!(pod = %record.pod, sandbox = %record.sandbox, ports = ?lost, "ztunnel does not listen any more");
        self.timeline
            .note(format!("ztunnel does not listen on {lost:?} any more"));
        pipeline
            .readd_workload(record, &mut self.timeline, cancelled)
            .await?;
        self.record_repair(DriftKind::ListenerLost);
        Ok(())
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

fn lost(sockets: &[Socket]) -> Vec<u16> {
    let is_bound = |port: u16| {
        sockets
            .iter()
            .any(|socket| socket.port == (Protocol::Tcp, port))
    };
    let ports = ZTUNNEL_TCP_PORTS.into_iter();
    ports.filter(|port| !is_bound(*port)).collect()
}

fn scaled(period: Duration, pods: usize) -> Duration {
    let periods = pods.div_ceil(PODS_PER_PERIOD).max(1);
    period.saturating_mul(u32::try_from(periods).unwrap_or(u32::MAX))
}

/// Returns 75 % to 125 % of the period, so that a node's pods are not all checked at once.
fn jittered(period: Duration) -> Duration {
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
