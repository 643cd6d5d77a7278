//! Keeps the probe set in sync by polls, with a limited number of repairs.

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

use super::{ProbeSet, Trigger};

/// The interval of polling the tables. Probes must succeed soon after a firewall is reloaded: the kubelet restarts a
/// container after three failures, by default ten seconds apart.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The number of repairs that are allowed per [`REPAIR_WINDOW`]. More frequent changes by a process are reported.
const MAX_REPAIRS: usize = 6;
const REPAIR_WINDOW: Duration = Duration::from_secs(60);

/// The time after which the elements of an unclaimed sandbox are removed. A starting pod-events claims all known pods
/// within seconds.
const ORPHAN_GRACE_PERIOD: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub struct ReconcilerGuard(Arc<AtomicBool>);

impl Drop for ReconcilerGuard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Starts the reconciler's thread in the calling thread's netns.
pub(super) fn start(
    probe_set: Arc<ProbeSet>,
    read_interval: Duration,
) -> io::Result<ReconcilerGuard> {
    let is_stopped = Arc::new(AtomicBool::new(false));
    let guard = ReconcilerGuard(Arc::clone(&is_stopped));
    let reconcile = move || {
        let (mut last_read, mut is_in_sync) = (Instant::now(), true);
        while !is_stopped.load(Ordering::Relaxed) {
            thread::sleep(CHECK_INTERVAL);
            let is_due = !is_in_sync || last_read.elapsed() >= read_interval;
            if is_due || probe_set.has_changed() {
                last_read = Instant::now();
                is_in_sync = probe_set.reconcile(last_read, Trigger::External);
            }
        }
    };
    thread::Builder::new()
        .name("probe-set".to_owned())
        .spawn(reconcile)?;
    Ok(guard)
}

#[derive(Debug, Default)]
pub(super) struct RepairBudget(VecDeque<Instant>);

impl RepairBudget {
    /// Returns whether another repair is allowed now, and counts an allowed repair.
    pub(super) fn allows(&mut self, now: Instant) -> bool {
        let is_over = |then: &Instant| now.saturating_duration_since(*then) >= REPAIR_WINDOW;
        while self.0.front().is_some_and(is_over) {
            self.0.pop_front();
        }
        let is_allowed = self.0.len() < MAX_REPAIRS;
        if is_allowed {
            self.0.push_back(now);
        }
        is_allowed
    }
}

/// The unclaimed owners, each with the time of the first check that found no claim.
#[derive(Debug, Default)]
pub(super) struct Orphans(BTreeMap<String, Instant>);

impl Orphans {
    /// Returns the owners whose grace period is over. The period does not run while nothing is claimed, because
    /// pod-events has not reconnected yet.
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
        let allowed = (0..10).filter(|_| budget.allows(start)).count();
        assert_eq!(allowed, MAX_REPAIRS);
        assert!(!budget.allows(start + REPAIR_WINDOW / 2));
        assert!(budget.allows(start + REPAIR_WINDOW));
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
