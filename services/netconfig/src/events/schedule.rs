//! When each claimed netns is to be read. Pure.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use inpod_types::{NetnsId, SandboxRef};

/// How long after the first sign of a change a netns is read. What comes until then is read with it: a transaction is
/// told in several events, and an apply in several steps.
const DELAY: Duration = Duration::from_millis(20);

/// How long after a read of a netns the next one is at the earliest, whatever goes on in it: who may change his own
/// netns must not keep us busy.
const REST: Duration = Duration::from_millis(200);

/// The same of reading all of them.
const REST_OF_ALL: Duration = Duration::from_secs(1);

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
    claims: BTreeMap<SandboxRef, Times>,
    ended: VecDeque<(SandboxRef, NetnsId)>,
    /// How often each is read when nothing is heard of it.
    period: Duration,
    /// When all of them were, or are, to be read.
    all: Option<Instant>,
}

/// Of one claim.
#[derive(Debug)]
struct Times {
    /// When it is to be read because of something.
    wanted: Option<Instant>,
    /// When it is to be read because of nothing.
    regular: Instant,
    read: Option<Instant>,
}

impl Times {
    fn due(&self) -> Instant {
        let wanted = self.wanted.unwrap_or(self.regular);
        wanted.min(self.regular)
    }

    /// Has it read at a time, or earlier if it was to be. Whether that is earlier than before.
    fn want(&mut self, at: Instant) -> bool {
        let before = self.due();
        self.wanted = Some(self.wanted.map_or(at, |wanted| wanted.min(at)));
        self.due() < before
    }
}

impl Schedule {
    pub(super) fn new(period: Duration) -> Self {
        Self {
            claims: BTreeMap::new(),
            ended: VecDeque::new(),
            period,
            all: None,
        }
    }

    /// A claim is new: it is read soon, and from then on regularly at a time of its own, `phase` of a thousand parts
    /// of the period from now.
    pub(super) fn add(&mut self, sandbox: SandboxRef, phase: u32, now: Instant) {
        let times = Times {
            wanted: Some(now + DELAY),
            regular: now + self.period / 1000 * phase,
            read: None,
        };
        self.claims.insert(sandbox, times);
    }

    /// A claim ended.
    pub(super) fn remove(&mut self, sandbox: &SandboxRef, netns: NetnsId) {
        self.claims.remove(sandbox);
        self.ended.push_back((sandbox.clone(), netns));
    }

    /// Something may have changed in a netns. Whether there is work earlier than before.
    pub(super) fn mark(&mut self, sandbox: &SandboxRef, now: Instant) -> bool {
        let Some(times) = self.claims.get_mut(sandbox) else {
            return false;
        };
        let rested = times.read.map_or(now, |read| read + REST);
        times.want(rested.max(now + DELAY))
    }

    /// A netns is to be read at a time. Whether there is work earlier than before.
    pub(super) fn want(&mut self, sandbox: &SandboxRef, at: Instant) -> bool {
        let times = self.claims.get_mut(sandbox);
        times.is_some_and(|times| times.want(at))
    }

    /// Something may have changed in any netns.
    pub(super) fn mark_all(&mut self, now: Instant) {
        let at = match self.all {
            Some(pending) if pending > now => pending,
            Some(last) => (last + REST_OF_ALL).max(now + DELAY),
            None => now + DELAY,
        };
        self.all = Some(at);
        for times in self.claims.values_mut() {
            times.want(at);
        }
    }

    /// What is to be done now, the longest due first. It is not to be done again unless something comes.
    pub(super) fn take(&mut self, now: Instant) -> Option<Work> {
        if let Some((sandbox, netns)) = self.ended.pop_front() {
            return Some(Work::Ended(sandbox, netns));
        }
        let due = self.claims.iter_mut();
        let due = due.filter(|(_, times)| times.due() <= now);
        let (sandbox, times) = due.min_by_key(|(_, times)| times.due())?;
        times.wanted = None;
        times.read = Some(now);
        if times.regular <= now {
            times.regular = now + self.period;
        }
        Some(Work::Read(sandbox.clone()))
    }

    /// When there is something to do next, where nothing comes.
    pub(super) fn next(&self) -> Option<Instant> {
        self.claims.values().map(Times::due).min()
    }
}

#[cfg(test)]
mod tests;
