//! When each claimed netns is to be read. Pure.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use inpod_types::{NetnsId, SandboxRef};

/// How long after the first sign of a change a netns is read. What comes until then is read with it: a transaction is
/// told in several events, and an apply in several steps.
const COALESCE_DELAY: Duration = Duration::from_millis(20);

/// How long after a read of a netns the next one is at the earliest, whatever goes on in it: who may change his own
/// netns must not keep us busy.
const MIN_READ_INTERVAL: Duration = Duration::from_millis(200);

/// The same of reading all of them.
const MIN_FULL_READ_INTERVAL: Duration = Duration::from_secs(1);

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// A claim ended: nothing may hold its netns.
    Ended(SandboxRef, NetnsId),
    /// A netns is to be read.
    Read(SandboxRef),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Schedule {
    claims: BTreeMap<SandboxRef, ReadTimes>,
    ended: VecDeque<(SandboxRef, NetnsId)>,
    /// How often each is read when nothing is heard of it.
    period: Duration,
    /// When all of them were, or are, to be read.
    full_read: Option<Instant>,
}

/// Of one claim.
#[derive(Debug)]
struct ReadTimes {
    /// When it is to be read because of something.
    requested: Option<Instant>,
    /// When it is to be read because of nothing.
    periodic: Instant,
    last_read: Option<Instant>,
}

impl ReadTimes {
    fn due(&self) -> Instant {
        let requested = self.requested.unwrap_or(self.periodic);
        requested.min(self.periodic)
    }

    /// Has it read at a time, or earlier if it was to be. Whether that is earlier than before.
    fn request_read(&mut self, at: Instant) -> bool {
        let before = self.due();
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

    /// A claim is new: it is read soon, and from then on regularly at a time of its own, `phase` of a thousand parts
    /// of the period from now.
    pub(super) fn add(&mut self, sandbox: SandboxRef, phase: u32, now: Instant) {
        let times = ReadTimes {
            requested: Some(now + COALESCE_DELAY),
            periodic: now + self.period / 1000 * phase,
            last_read: None,
        };
        self.claims.insert(sandbox, times);
    }

    /// A claim ended.
    pub(super) fn remove(&mut self, sandbox: &SandboxRef, netns: NetnsId) {
        self.claims.remove(sandbox);
        self.ended.push_back((sandbox.clone(), netns));
    }

    /// Something may have changed in a netns. Whether there is work earlier than before.
    pub(super) fn mark_changed(&mut self, sandbox: &SandboxRef, now: Instant) -> bool {
        let Some(times) = self.claims.get_mut(sandbox) else {
            return false;
        };
        let earliest = times.last_read.map_or(now, |read| read + MIN_READ_INTERVAL);
        times.request_read(earliest.max(now + COALESCE_DELAY))
    }

    /// A netns is to be read at a time. Whether there is work earlier than before.
    pub(super) fn request_read(&mut self, sandbox: &SandboxRef, at: Instant) -> bool {
        let times = self.claims.get_mut(sandbox);
        times.is_some_and(|times| times.request_read(at))
    }

    /// Something may have changed in any netns.
    pub(super) fn mark_all_changed(&mut self, now: Instant) {
        let at = match self.full_read {
            Some(pending) if pending > now => pending,
            Some(last) => (last + MIN_FULL_READ_INTERVAL).max(now + COALESCE_DELAY),
            None => now + COALESCE_DELAY,
        };
        self.full_read = Some(at);
        for times in self.claims.values_mut() {
            times.request_read(at);
        }
    }

    /// What is to be done now, the longest due first. It is not to be done again unless something comes.
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

    /// When there is something to do next, where nothing comes.
    pub(super) fn next_due_at(&self) -> Option<Instant> {
        self.claims.values().map(ReadTimes::due).min()
    }
}

#[cfg(test)]
mod tests;
