//! Keeps the probe set as it should be: hears who changes it, looks where nobody tells, and puts it right, but not
//! without end.

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
    Because, Host,
    events::{Events, Heard},
};

/// After something was heard, more of the same transaction, or of the same tool, may follow.
const DEBOUNCE: Duration = Duration::from_millis(50);

const LONGEST_DEBOUNCE: Duration = Duration::from_millis(250);

/// How often all of it is put right within a [`WINDOW`]. Whoever wants it otherwise more often than that is told of.
const MOST: usize = 6;
const WINDOW: Duration = Duration::from_secs(60);

/// How long an element stays whose sandbox nobody claims, while others are claimed: a pod-events that starts claims
/// what it knows within seconds.
const GRACE: Duration = Duration::from_secs(600);

/// Watches until it is dropped.
#[derive(Debug)]
pub struct Guard(Arc<AtomicBool>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Starts a thread that watches over a probe set, in the calling thread's netns.
pub(super) fn start(host: Arc<Host>) -> io::Result<Guard> {
    let events = Events::open();
    let events = events.inspect_err(|error| {
        tracing::warn!(%error, "Changes of the node's packet filter are not heard, only looked for");
    });
    let is_over = Arc::new(AtomicBool::new(false));
    let guard = Guard(Arc::clone(&is_over));
    let watch = move || {
        let mut watch = Watch::new(host, events.ok());
        while !is_over.load(Ordering::Relaxed) {
            watch.turn();
        }
    };
    thread::Builder::new()
        .name("probe-set".to_owned())
        .spawn(watch)?;
    Ok(guard)
}

struct Watch {
    host: Arc<Host>,
    events: Option<Events>,
    read: Instant,
    took: Duration,
    is_right: bool,
}

impl Watch {
    fn new(host: Arc<Host>, events: Option<Events>) -> Self {
        Self {
            host,
            events,
            read: Instant::now(),
            took: Duration::ZERO,
            is_right: true,
        }
    }

    /// Waits for a moment, and looks.
    fn turn(&mut self) {
        let pace = self.host.pace(self.took);
        let heard = self.wait(pace.glance.min(pace.read));
        if heard != Heard::Nothing {
            // Reading takes no more than a part of the time, however often others change what is heard of.
            thread::sleep(
                DEBOUNCE
                    .max(self.took.saturating_mul(10))
                    .min(LONGEST_DEBOUNCE),
            );
            self.wait(Duration::ZERO);
        }
        if self.host.reselect() {
            self.check(Because::OfUs);
        } else if heard != Heard::Nothing
            || !self.is_right
            || self.read.elapsed() >= pace.read
            || self.host.is_suspicious()
        {
            self.check(Because::OfOthers);
        }
    }

    fn check(&mut self, because: Because) {
        let began = Instant::now();
        self.is_right = self.host.check(began, because);
        (self.read, self.took) = (Instant::now(), began.elapsed());
    }

    fn wait(&mut self, patience: Duration) -> Heard {
        let Some(events) = &mut self.events else {
            thread::sleep(patience);
            return Heard::Nothing;
        };
        let host = &self.host;
        let matters = |family, table: &str, port| host.hears(family, table, port);
        events.wait(patience, matters).unwrap_or_else(|error| {
            tracing::warn!(%error, "Changes of the node's packet filter are no longer heard");
            self.events = None;
            Heard::Loss
        })
    }
}

/// How often something may be done within a time.
#[derive(Debug, Default)]
pub(super) struct Budget {
    spent: VecDeque<Instant>,
    is_told: bool,
}

/// Whether something may be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spent {
    /// It may, and is counted.
    Yes,
    /// It may not, for the first time.
    NoMore,
    /// It still may not.
    No,
}

impl Budget {
    pub(super) fn spend(&mut self, now: Instant) -> Spent {
        let is_over = |then: &Instant| now.saturating_duration_since(*then) >= WINDOW;
        while self.spent.front().is_some_and(is_over) {
            self.spent.pop_front();
        }
        if self.spent.len() < MOST {
            self.spent.push_back(now);
            self.is_told = false;
            return Spent::Yes;
        }
        if std::mem::replace(&mut self.is_told, true) {
            Spent::No
        } else {
            Spent::NoMore
        }
    }
}

/// Since when nobody claims those whom elements name.
#[derive(Debug, Default)]
pub(super) struct Orphans(BTreeMap<String, Instant>);

impl Orphans {
    /// Whose time is over. Where nothing is claimed at all nobody has come back yet, and no time runs.
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
        let is_due = |since: &Instant| now.saturating_duration_since(*since) >= GRACE;
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
        let (mut budget, start) = (Budget::default(), Instant::now());
        let spent: Vec<_> = (0..10).map(|_| budget.spend(start)).collect();
        let allowed = spent.iter().filter(|spent| **spent == Spent::Yes);
        assert_eq!(allowed.count(), MOST);
        assert_eq!(spent[MOST..MOST + 2], [Spent::NoMore, Spent::No]);
        assert_eq!(budget.spend(start + WINDOW / 2), Spent::No);
        assert_eq!(budget.spend(start + WINDOW), Spent::Yes);
    }

    #[test]
    fn what_nobody_claims_goes_when_its_time_is_over_and_not_before() {
        let (mut orphans, start) = (Orphans::default(), Instant::now());
        let both = || names(&["a", "b"]);
        let claimed = names(&["a"]);
        assert_eq!(orphans.due(both(), &claimed, start), [""; 0]);
        assert_eq!(orphans.due(both(), &claimed, start + GRACE / 2), [""; 0]);
        assert_eq!(orphans.due(both(), &claimed, start + GRACE), ["b"]);
    }

    #[test]
    fn what_is_claimed_meanwhile_begins_anew() {
        let (mut orphans, start) = (Orphans::default(), Instant::now());
        orphans.due(names(&["a", "b"]), &names(&["a"]), start);
        orphans.due(names(&["a", "b"]), &names(&["a", "b"]), start + GRACE / 2);
        let due = orphans.due(names(&["a", "b"]), &names(&["a"]), start + GRACE);
        assert_eq!(due, [""; 0]);
    }

    #[test]
    fn no_time_runs_while_nothing_is_claimed_at_all() {
        let (mut orphans, start) = (Orphans::default(), Instant::now());
        orphans.due(names(&["a"]), &names(&[]), start);
        assert_eq!(
            orphans.due(names(&["a"]), &names(&[]), start + GRACE),
            [""; 0]
        );
        let due = orphans.due(names(&["a"]), &names(&["b"]), start + GRACE);
        assert_eq!(due, [""; 0]);
    }
}
