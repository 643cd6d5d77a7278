//! Decides when to read which claimed netns. Does no I/O.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use inpod_types::{NetnsId, SandboxRef};

/// From the first notification to the read: a transaction causes several, and an apply several transactions.
const COALESCE_DELAY: Duration = Duration::from_millis(20);

/// Between reads of one netns: a pod that keeps changing its own must not keep netconfig busy.
const MIN_READ_INTERVAL: Duration = Duration::from_millis(200);

/// Between reads of all netns.
const MIN_FULL_READ_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Its subscription has to be closed, since it may hold the netns.
    Ended(SandboxRef, NetnsId),
    Read(SandboxRef),
}

#[derive(Debug)]
pub(super) struct Schedule {
    claims: BTreeMap<SandboxRef, ReadTimes>,
    ended: VecDeque<(SandboxRef, NetnsId)>,
    /// Of reads without notifications.
    period: Duration,
    /// Last or next read of all netns.
    full_read: Option<Instant>,
}

#[derive(Debug)]
struct ReadTimes {
    requested: Option<Instant>,
    /// The last request.
    requested_at: Instant,
    periodic: Instant,
    last_read: Option<Instant>,
}

impl ReadTimes {
    fn due(&self) -> Instant {
        let requested = self.requested.unwrap_or(self.periodic);
        requested.min(self.periodic)
    }

    /// Keeps an earlier one. Returns whether the next read is now sooner.
    fn request_read(&mut self, at: Instant, now: Instant) -> bool {
        let before = self.due();
        self.requested_at = now;
        self.requested = Some(self.requested.map_or(at, |requested| requested.min(at)));
        self.due() < before
    }
}

impl Schedule {
    pub(super) fn new(period: Duration) -> Self {
        Self {
            claims: BTreeMap::new(),
            ended: VecDeque::new(),
            period,
            full_read: None,
        }
    }

    /// Reads it soon, and then periodically at an offset of its own: `phase` thousandths of the period.
    pub(super) fn add(&mut self, sandbox: SandboxRef, phase: u32, now: Instant) {
        let times = ReadTimes {
            requested: Some(now + COALESCE_DELAY),
            requested_at: now,
            periodic: now + self.period / 1000 * phase,
            last_read: None,
        };
        self.claims.insert(sandbox, times);
    }

    pub(super) fn remove(&mut self, sandbox: &SandboxRef, netns: NetnsId) {
        self.claims.remove(sandbox);
        self.ended.push_back((sandbox.clone(), netns));
    }

    /// Returns whether the next read is now sooner.
    pub(super) fn mark_changed(&mut self, sandbox: &SandboxRef, now: Instant) -> bool {
        let Some(times) = self.claims.get_mut(sandbox) else {
            return false;
        };
        let earliest = times.last_read.map_or(now, |read| read + MIN_READ_INTERVAL);
        times.request_read(earliest.max(now + COALESCE_DELAY), now)
    }

    /// Cancels requests from before a read that began at `started`.
    pub(super) fn mark_read(&mut self, sandbox: &SandboxRef, started: Instant) {
        if let Some(times) = self.claims.get_mut(sandbox) {
            times.last_read = Some(started);
            if times.requested_at <= started {
                times.requested = None;
            }
        }
    }

    pub(super) fn is_read(&self, sandbox: &SandboxRef) -> bool {
        let times = self.claims.get(sandbox);
        times.is_some_and(|times| times.requested.is_none() && times.last_read.is_some())
    }

    /// Returns whether the next read is now sooner.
    pub(super) fn request_read(&mut self, sandbox: &SandboxRef, at: Instant, now: Instant) -> bool {
        let times = self.claims.get_mut(sandbox);
        times.is_some_and(|times| times.request_read(at, now))
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
    }

    /// Removes and returns the work that has been due longest.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<Work> {
        if let Some((sandbox, netns)) = self.ended.pop_front() {
            return Some(Work::Ended(sandbox, netns));
        }
        let due = self.claims.iter_mut();
        let due = due.filter(|(_, times)| times.due() <= now);
        let (sandbox, times) = due.min_by_key(|(_, times)| times.due())?;
        times.requested = None;
        times.last_read = Some(now);
        if times.periodic <= now {
            times.periodic = now + self.period;
        }
        Some(Work::Read(sandbox.clone()))
    }

    pub(super) fn next_due_at(&self) -> Option<Instant> {
        self.claims.values().map(ReadTimes::due).min()
    }
}

#[cfg(test)]
mod tests;
