//! Keeps the probe set in sync: by notifications, polls where there are none, and a limited number of repairs.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    ProbeSet, Trigger,
    notifications::{NftNotifications, Notification},
    state::READ_INTERVAL,
};

/// The same transaction or tool may cause more notifications.
const DEBOUNCE: Duration = Duration::from_millis(50);

const MAX_DEBOUNCE: Duration = Duration::from_millis(250);

/// Per [`REPAIR_WINDOW`]. More frequent changes by a process are reported.
const MAX_REPAIRS: usize = 6;
const REPAIR_WINDOW: Duration = Duration::from_secs(60);

/// For elements of an unclaimed sandbox while others are claimed. A starting pod-events claims all pods that
/// it knows within seconds.
const ORPHAN_GRACE_PERIOD: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub struct ReconcilerGuard(Arc<AtomicBool>);

impl Drop for ReconcilerGuard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Starts it in the calling thread's netns.
pub(super) fn start(probe_set: Arc<ProbeSet>) -> io::Result<ReconcilerGuard> {
    let notifications = NftNotifications::open();
    let notifications = notifications.inspect_err(|error| {
        tracing::warn!(%error, "Cannot subscribe to changes of the node's nf_tables; polling instead");
    });
    let is_stopped = Arc::new(AtomicBool::new(false));
    let guard = ReconcilerGuard(Arc::clone(&is_stopped));
    let reconciler = move || {
        let mut reconciler = Reconciler::new(probe_set, notifications.ok());
        while !is_stopped.load(Ordering::Relaxed) {
            reconciler.tick();
        }
    };
    thread::Builder::new()
        .name("probe-set".to_owned())
        .spawn(reconciler)?;
    Ok(guard)
}

struct Reconciler {
    probe_set: Arc<ProbeSet>,
    notifications: Option<NftNotifications>,
    last_read: Instant,
    read_duration: Duration,
    is_in_sync: bool,
}

impl Reconciler {
    fn new(probe_set: Arc<ProbeSet>, notifications: Option<NftNotifications>) -> Self {
        Self {
            probe_set,
            notifications,
            last_read: Instant::now(),
            read_duration: Duration::ZERO,
            is_in_sync: true,
        }
    }

    /// Waits for a notification or the next poll; reconciles if needed.
    fn tick(&mut self) {
        let notification = self.wait(self.probe_set.check_interval());
        if notification != Notification::None {
            // Bounds the share of time spent in reads, however often others make relevant changes.
            thread::sleep(
                DEBOUNCE
                    .max(self.read_duration.saturating_mul(10))
                    .min(MAX_DEBOUNCE),
            );
            self.wait(Duration::ZERO);
        }
        if self.probe_set.refresh_selection() {
            self.reconcile(Trigger::Own);
        } else if notification != Notification::None
            || !self.is_in_sync
            || self.last_read.elapsed() >= READ_INTERVAL
        {
            self.reconcile(Trigger::External);
        }
    }

    fn reconcile(&mut self, trigger: Trigger) {
        let began = Instant::now();
        self.is_in_sync = self.probe_set.reconcile(began, trigger);
        (self.last_read, self.read_duration) = (Instant::now(), began.elapsed());
    }

    fn wait(&mut self, timeout: Duration) -> Notification {
        let Some(notifications) = &mut self.notifications else {
            thread::sleep(timeout);
            return Notification::None;
        };
        let probe_set = &self.probe_set;
        let matters = |family, table: &str, port| probe_set.is_relevant(family, table, port);
        notifications.wait(timeout, matters).unwrap_or_else(|error| {
            tracing::warn!(%error, "Lost the subscription to changes of the node's nf_tables; polling instead");
            self.notifications = None;
            Notification::Loss
        })
    }
}

#[derive(Debug, Default)]
pub(super) struct RepairBudget {
    repairs: VecDeque<Instant>,
    is_reported: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RepairDecision {
    Allowed,
    /// First denial since the last allowed repair.
    LimitReached,
    /// Denied, as was the one before.
    Denied,
}

impl RepairBudget {
    pub(super) fn decide(&mut self, now: Instant) -> RepairDecision {
        let is_stopped = |then: &Instant| now.saturating_duration_since(*then) >= REPAIR_WINDOW;
        while self.repairs.front().is_some_and(is_stopped) {
            self.repairs.pop_front();
        }
        if self.repairs.len() < MAX_REPAIRS {
            self.repairs.push_back(now);
            self.is_reported = false;
            return RepairDecision::Allowed;
        }
        if std::mem::replace(&mut self.is_reported, true) {
            RepairDecision::Denied
        } else {
            RepairDecision::LimitReached
        }
    }
}

/// The times since when owners have been unclaimed.
#[derive(Debug, Default)]
pub(super) struct Orphans(BTreeMap<String, Instant>);

impl Orphans {
    /// Owners after their grace period, which does not run while nothing is claimed: pod-events
    /// has not reconnected yet.
    pub(super) fn due(
        &mut self,
        names: BTreeSet<String>,
        claimed: &BTreeSet<String>,
        now: Instant,
    ) -> Vec<String> {
        if claimed.is_empty() {
            self.0.clear();
            return Vec::new();
        }
        let unclaimed = names.into_iter().filter(|name| !claimed.contains(name));
        self.0 = unclaimed
            .map(|name| {
                let since = self.0.get(&name).copied().unwrap_or(now);
                (name, since)
            })
            .collect();
        let is_due = |since: &Instant| now.saturating_duration_since(*since) >= ORPHAN_GRACE_PERIOD;
        let due = self.0.iter().filter(|(_, since)| is_due(since));
        due.map(|(name, _)| name.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn a_tool_that_does_not_stop_is_not_fought_without_end() {
        let (mut budget, start) = (RepairBudget::default(), Instant::now());
        let repairs: Vec<_> = (0..10).map(|_| budget.decide(start)).collect();
        let allowed = repairs
            .iter()
            .filter(|repairs| **repairs == RepairDecision::Allowed);
        assert_eq!(allowed.count(), MAX_REPAIRS);
        assert_eq!(
            repairs[MAX_REPAIRS..MAX_REPAIRS + 2],
            [RepairDecision::LimitReached, RepairDecision::Denied]
        );
        assert_eq!(
            budget.decide(start + REPAIR_WINDOW / 2),
            RepairDecision::Denied
        );
        assert_eq!(
            budget.decide(start + REPAIR_WINDOW),
            RepairDecision::Allowed
        );
    }

    #[test]
    fn what_nobody_claims_goes_when_its_time_is_over_and_not_before() {
        let (mut orphans, start) = (Orphans::default(), Instant::now());
        let both = || names(&["a", "b"]);
        let claimed = names(&["a"]);
        assert_eq!(orphans.due(both(), &claimed, start), [""; 0]);
        assert_eq!(
            orphans.due(both(), &claimed, start + ORPHAN_GRACE_PERIOD / 2),
            [""; 0]
        );
        assert_eq!(
            orphans.due(both(), &claimed, start + ORPHAN_GRACE_PERIOD),
            ["b"]
        );
    }

    #[test]
    fn what_is_claimed_meanwhile_begins_anew() {
        let (mut orphans, start) = (Orphans::default(), Instant::now());
        orphans.due(names(&["a", "b"]), &names(&["a"]), start);
        orphans.due(
            names(&["a", "b"]),
            &names(&["a", "b"]),
            start + ORPHAN_GRACE_PERIOD / 2,
        );
        let due = orphans.due(
            names(&["a", "b"]),
            &names(&["a"]),
            start + ORPHAN_GRACE_PERIOD,
        );
        assert_eq!(due, [""; 0]);
    }

    #[test]
    fn no_time_runs_while_nothing_is_claimed_at_all() {
        let (mut orphans, start) = (Orphans::default(), Instant::now());
        orphans.due(names(&["a"]), &names(&[]), start);
        assert_eq!(
            orphans.due(names(&["a"]), &names(&[]), start + ORPHAN_GRACE_PERIOD),
            [""; 0]
        );
        let due = orphans.due(names(&["a"]), &names(&["b"]), start + ORPHAN_GRACE_PERIOD);
        assert_eq!(due, [""; 0]);
    }
}
