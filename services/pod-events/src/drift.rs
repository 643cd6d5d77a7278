//! Kinds and counts of drift, and the backoff of repairs.

use std::{collections::BTreeMap, fmt, time::Duration};

use inpod_types::Backoff;
use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use tokio::time::Instant;

use crate::counters::Metric;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DriftKind {
    /// None of inpod's rules are left.
    Flushed,
    /// The netns has a different set of inpod's rules, such as the rules of an earlier release.
    Replaced,
    /// Some of inpod's rules are missing, changed or additional.
    Changed,
    ListenerLost,
}

impl DriftKind {
    pub const ALL: [Self; 4] = [
        Self::Flushed,
        Self::Replaced,
        Self::Changed,
        Self::ListenerLost,
    ];

    pub fn classify(fingerprint: &str, intact: bool) -> Self {
        match (fingerprint.is_empty(), intact) {
            (true, _) => Self::Flushed,
            (false, true) => Self::Replaced,
            (false, false) => Self::Changed,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Flushed => "flushed",
            Self::Replaced => "replaced",
            Self::Changed => "changed",
            Self::ListenerLost => "listener-lost",
        }
    }
}

impl fmt::Display for DriftKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

pub type Drift = BTreeMap<DriftKind, u64>;

pub(crate) const DRIFT: Metric = Metric {
    name: "drift",
    labels: "kind",
    help: "Repairs of enrolled pods whose rules or listeners had drifted",
};

#[derive(Clone, Debug, Default)]
pub struct Repairs(Family<[(&'static str, &'static str); 1], Counter>);

impl Repairs {
    pub fn register(&self, registry: &mut Registry) {
        for kind in DriftKind::ALL {
            self.0.get_or_create(&[("kind", kind.name())]).inc_by(0);
        }
        registry.register(DRIFT.name, DRIFT.help, self.0.clone());
    }

    pub fn count(&self, kind: DriftKind) {
        self.0.get_or_create(&[("kind", kind.name())]).inc();
    }
}

/// The number of consecutive repairs without delay.
const IMMEDIATE_REPAIRS: u32 = 5;

/// The time, in addition to twice the last delay, within which two repairs count as consecutive.
const QUIET_PERIOD: Duration = Duration::from_secs(60);

/// The delays after the immediate repairs.
const DELAYS: Backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(300));

/// Slows repairs down when another agent keeps undoing the repairs.
#[derive(Clone, Debug, Default)]
pub struct RepairBackoff {
    repairs: u32,
    last: Option<Instant>,
}

impl RepairBackoff {
    pub fn record_repair(&mut self, now: Instant) {
        self.repairs = if self.is_quiet(now) { 0 } else { self.repairs }.saturating_add(1);
        self.last = Some(now);
    }

    /// Returns the end of the delay; `None` if a repair may be made now.
    pub fn delayed_until(&self, now: Instant) -> Option<Instant> {
        let until = self.last? + self.wait();
        (until > now).then_some(until)
    }

    /// Returns until when another agent may yet undo a repair that was delayed; `None` if no proof is missing. Another
    /// agent in a contest over the rules undoes a repair within the shortest delay.
    pub fn unproven_until(&self, now: Instant) -> Option<Instant> {
        let until = self.last? + DELAYS.first;
        (self.repairs > IMMEDIATE_REPAIRS && until > now).then_some(until)
    }

    fn wait(&self) -> Duration {
        let delayed = self.repairs.checked_sub(IMMEDIATE_REPAIRS);
        delayed.map_or(Duration::ZERO, |before| DELAYS.delay(before))
    }

    fn is_quiet(&self, now: Instant) -> bool {
        let quiet = QUIET_PERIOD + self.wait() * 2;
        self.last
            .is_none_or(|last| now.duration_since(last) >= quiet)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn made_in(repair_backoff: &mut RepairBackoff, seconds: u64) -> usize {
        let mut made = 0;
        for _ in 0..seconds {
            tokio::time::advance(Duration::from_secs(1)).await;
            if repair_backoff.delayed_until(Instant::now()).is_none() {
                repair_backoff.record_repair(Instant::now());
                made += 1;
            }
        }
        made
    }

    #[tokio::test(start_paused = true)]
    async fn a_few_repairs_are_made_at_once_and_a_fight_is_slowed_down() {
        let mut repair_backoff = RepairBackoff::default();
        assert_eq!(made_in(&mut repair_backoff, 5).await, 5);
        let next_minute = made_in(&mut repair_backoff, 60).await;
        assert!((1..=3).contains(&next_minute), "{next_minute}");
        let next_hour = made_in(&mut repair_backoff, 3600).await;
        assert!((10..=20).contains(&next_hour), "{next_hour}");
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_delayed_repair_needs_proof() {
        let mut repair_backoff = RepairBackoff::default();
        assert_eq!(made_in(&mut repair_backoff, 5).await, 5);
        assert_eq!(repair_backoff.unproven_until(Instant::now()), None);
        tokio::time::advance(DELAYS.first).await;
        repair_backoff.record_repair(Instant::now());
        let proven = Instant::now() + DELAYS.first;
        assert_eq!(repair_backoff.unproven_until(Instant::now()), Some(proven));
        assert_eq!(repair_backoff.unproven_until(proven), None);
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_quiet_time_repairs_are_made_at_once_again() {
        let mut repair_backoff = RepairBackoff::default();
        made_in(&mut repair_backoff, 600).await;
        tokio::time::advance(Duration::from_secs(1000)).await;
        assert_eq!(repair_backoff.delayed_until(Instant::now()), None);
        assert_eq!(made_in(&mut repair_backoff, 4).await, 4);
    }

    #[tokio::test(start_paused = true)]
    async fn repairs_that_are_far_apart_are_never_held() {
        let mut repair_backoff = RepairBackoff::default();
        for _ in 0..100 {
            tokio::time::advance(QUIET_PERIOD).await;
            assert_eq!(repair_backoff.delayed_until(Instant::now()), None);
            repair_backoff.record_repair(Instant::now());
        }
    }

    #[test]
    fn what_netconfig_sees_is_of_a_kind() {
        assert_eq!(DriftKind::classify("", false), DriftKind::Flushed);
        assert_eq!(DriftKind::classify("f", true), DriftKind::Replaced);
        assert_eq!(DriftKind::classify("f", false), DriftKind::Changed);
    }
}
