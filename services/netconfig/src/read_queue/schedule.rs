//! Decides when to read each claimed netns, without any I/O.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use inpod_types::{NetnsId, SandboxRef};

/// The delay from the first notification to the read: a transaction causes several notifications, and an apply
/// several transactions.
const COALESCE_DELAY: Duration = Duration::from_millis(20);

/// The minimum interval between reads of one netns, so that a pod that keeps changing its own netns does not keep
/// netconfig busy.
const MIN_READ_INTERVAL: Duration = Duration::from_millis(200);

/// The minimum interval between reads of all netns.
const MIN_FULL_READ_INTERVAL: Duration = Duration::from_secs(1);

/// The number of claims read once in the configured period. With more claims the period grows, which keeps the idle
/// cost of a node constant.
const CLAIMS_PER_PERIOD: usize = 75;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// The claim ended, and its subscription has to be closed, since it may hold the netns.
    Ended(SandboxRef, NetnsId),
    Read(SandboxRef),
}

#[derive(Debug)]
pub(super) struct Schedule {
    claims: BTreeMap<SandboxRef, ReadTimes>,
    /// The claims by their next read, so that finding the next claim does not become slower with each pod.
    due: BTreeMap<(Instant, u64), SandboxRef>,
    added: u64,
    ended: VecDeque<(SandboxRef, NetnsId)>,
    /// The configured period of reads without a notification.
    period: Duration,
    /// The time of the last or next read of all netns.
    full_read: Option<Instant>,
}

#[derive(Debug)]
struct ReadTimes {
    /// The number of the claim, in the order of addition.
    number: u64,
    requested: Option<Instant>,
    /// The time at which the last request was made.
    requested_at: Instant,
    periodic: Instant,
    last_read: Option<Instant>,
}

impl ReadTimes {
    fn due(&self) -> Instant {
        let requested = self.requested.unwrap_or(self.periodic);
        requested.min(self.periodic)
    }

    /// Requests a read at a time, and keeps an earlier request.
    fn request_read(&mut self, at: Instant, now: Instant) {
        self.requested_at = now;
        self.requested = Some(self.requested.map_or(at, |requested| requested.min(at)));
    }
}

impl Schedule {
    pub(super) fn new(period: Duration) -> Self {
        Self {
            claims: BTreeMap::new(),
            due: BTreeMap::new(),
            added: 0,
            ended: VecDeque::new(),
            period,
            full_read: None,
        }
    }

    /// Schedules a read soon, and then periodic reads at an offset of their own: `phase` thousandths of the period.
    pub(super) fn add(&mut self, sandbox: SandboxRef, phase: u32, now: Instant) {
        self.unschedule(&sandbox);
        self.added += 1;
        let times = ReadTimes {
            number: self.added,
            requested: Some(now + COALESCE_DELAY),
            requested_at: now,
            periodic: now + self.period() / 1000 * phase,
            last_read: None,
        };
        self.due
            .insert((times.due(), times.number), sandbox.clone());
        self.claims.insert(sandbox, times);
    }

    fn period(&self) -> Duration {
        let factor = self.claims.len().div_ceil(CLAIMS_PER_PERIOD).max(1);
        self.period
            .saturating_mul(u32::try_from(factor).unwrap_or(u32::MAX))
    }

    fn unschedule(&mut self, sandbox: &SandboxRef) {
        if let Some(times) = self.claims.remove(sandbox) {
            self.due.remove(&(times.due(), times.number));
        }
    }

    /// Changes the times of a claim, and returns whether the next read is now sooner.
    fn change(&mut self, sandbox: &SandboxRef, change: impl FnOnce(&mut ReadTimes)) -> bool {
        let Some(times) = self.claims.get_mut(sandbox) else {
            return false;
        };
        let before = times.due();
        change(times);
        let after = times.due();
        if let Some(sandbox) = self.due.remove(&(before, times.number)) {
            self.due.insert((after, times.number), sandbox);
        }
        after < before
    }

    pub(super) fn remove(&mut self, sandbox: &SandboxRef, netns: NetnsId) {
        self.unschedule(sandbox);
        self.ended.push_back((sandbox.clone(), netns));
    }

    /// Requests a read after a change, and returns whether the next read is now sooner.
    pub(super) fn mark_changed(&mut self, sandbox: &SandboxRef, now: Instant) -> bool {
        self.change(sandbox, |times| {
            let earliest = times.last_read.map_or(now, |read| read + MIN_READ_INTERVAL);
            times.request_read(earliest.max(now + COALESCE_DELAY), now);
        })
    }

    /// Cancels requests made before a read that began at `started`.
    pub(super) fn mark_read(&mut self, sandbox: &SandboxRef, started: Instant) {
        self.change(sandbox, |times| {
            times.last_read = Some(started);
            if times.requested_at <= started {
                times.requested = None;
            }
        });
    }

    pub(super) fn is_read(&self, sandbox: &SandboxRef) -> bool {
        let times = self.claims.get(sandbox);
        times.is_some_and(|times| times.requested.is_none() && times.last_read.is_some())
    }

    /// Requests a read at a time, and returns whether the next read is now sooner.
    pub(super) fn request_read(&mut self, sandbox: &SandboxRef, at: Instant, now: Instant) -> bool {
        self.change(sandbox, |times| times.request_read(at, now))
    }

    pub(super) fn mark_all_changed(&mut self, now: Instant) {
        let at = match self.full_read {
            Some(pending) if pending > now => pending,
            Some(last) => (last + MIN_FULL_READ_INTERVAL).max(now + COALESCE_DELAY),
            None => now + COALESCE_DELAY,
        };
        self.full_read = Some(at);
        for times in self.claims.values_mut() {
            times.request_read(at, now);
        }
        let due = self.claims.iter();
        let due = due.map(|(sandbox, times)| ((times.due(), times.number), sandbox.clone()));
        self.due = due.collect();
    }

    /// Removes and returns the work that has been due longest.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<Work> {
        if let Some((sandbox, netns)) = self.ended.pop_front() {
            return Some(Work::Ended(sandbox, netns));
        }
        let (_, sandbox) = self
            .due
            .first_key_value()
            .filter(|((at, _), _)| *at <= now)?;
        let sandbox = sandbox.clone();
        let period = self.period();
        self.change(&sandbox, |times| {
            times.requested = None;
            times.last_read = Some(now);
            if times.periodic <= now {
                times.periodic = now + period;
            }
        });
        Some(Work::Read(sandbox))
    }

    pub(super) fn next_due_at(&self) -> Option<Instant> {
        self.due.first_key_value().map(|((at, _), _)| *at)
    }
}

#[cfg(test)]
mod tests;
