//! Which annotations are not as they should be, and what was told of them: no clock and no network of its own.
//!
//! A pod that bears what it should has no entry here.

use std::{
    collections::{BTreeMap, btree_map},
    time::Duration,
};

use inpod_types::{PodUid, SandboxRef};
use tokio::time::Instant;

use super::wish::Mark;
use crate::source::PodKey;

/// How many patches are under way at once.
const AT_ONCE: usize = 8;

/// Between two attempts the wait doubles from the first to the second, less up to a half by chance.
const WAITS: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(30)];

/// How long what the API server accepted counts although the watch has not shown it.
const LAG: Duration = Duration::from_secs(60);

/// After this long a Ready pod of the mesh that is not annotated is worth an Event.
pub(super) const LATE: Duration = Duration::from_secs(10);

/// What is not as it should be.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    entries: BTreeMap<PodKey, Entry>,
}

/// A pod as the source shows it, and what it is to bear.
#[derive(Clone, Debug)]
pub(super) struct Look<'a> {
    pub(super) uid: &'a PodUid,
    pub(super) shown: Option<&'a str>,
    /// `None`: whatever it bears.
    pub(super) wish: Option<Mark>,
    /// The sandbox in which the pod is Ready and in the mesh, if it is both.
    pub(super) serves_in: Option<&'a SandboxRef>,
}

/// What is to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) key: PodKey,
    pub(super) uid: PodUid,
    pub(super) mark: Mark,
}

/// What came of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The API server has written it.
    Accepted,
    /// There is no such pod, or none of this UID.
    Gone,
    /// The API server has refused it, in these words: nothing was written.
    Refused(String),
    /// Nobody knows whether it was written.
    Unanswered(String),
}

#[derive(Debug)]
struct Entry {
    uid: PodUid,
    wish: Option<Mark>,
    since: Instant,
    shown: Option<String>,
    told: Told,
    in_flight: Option<Told>,
    attempts: u32,
    due: Instant,
    failed: Option<String>,
    waiting: Option<Waiting>,
    is_gone: bool,
}

/// What the API server has been told beyond what the watch shows.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Told {
    /// Nothing.
    AsShown,
    /// This, while the watch shows what stood there before, and not for ever.
    Accepted {
        mark: Mark,
        over: Option<String>,
        until: Instant,
    },
    /// Something of which nobody knows whether it was written.
    Unsure,
}

/// A pod that serves and is not annotated.
#[derive(Debug)]
struct Waiting {
    sandbox: SandboxRef,
    since: Option<Instant>,
    is_told: bool,
}

impl Told {
    /// Whether the pod bears a mark, as far as is known.
    fn bears(&self, mark: Mark, shown: Option<&str>, now: Instant) -> bool {
        match self {
            Self::Unsure => false,
            Self::Accepted {
                mark: accepted,
                over,
                until,
            } if over.as_deref() == shown && now < *until => *accepted == mark,
            Self::AsShown | Self::Accepted { .. } => mark.is(shown),
        }
    }
}

impl Entry {
    fn new(look: &Look<'_>, now: Instant) -> Self {
        Self {
            uid: look.uid.clone(),
            wish: None,
            since: now,
            shown: None,
            told: Told::AsShown,
            in_flight: None,
            attempts: 0,
            due: now,
            failed: None,
            waiting: None,
            is_gone: false,
        }
    }

    fn bears(&self, mark: Mark, now: Instant) -> bool {
        self.told.bears(mark, self.shown.as_deref(), now)
    }

    fn is_met(&self, now: Instant) -> bool {
        self.is_gone || self.wish.is_none_or(|mark| self.bears(mark, now))
    }

    /// When something is to be done about it: only a new wish cuts a wait short.
    fn look(&mut self, look: &Look<'_>, now: Instant) {
        self.shown = look.shown.map(str::to_owned);
        if let Told::Accepted { over, until, .. } = &self.told
            && (*over != self.shown || now >= *until)
        {
            self.told = Told::AsShown;
        }
        if self.wish != look.wish {
            self.wish = look.wish;
            (self.since, self.due, self.attempts) = (now, now, 0);
        }
        if self.is_met(now) {
            self.failed = None;
            self.since = now;
        }
        self.wait_for(look.serves_in, now);
    }

    fn wait_for(&mut self, serves_in: Option<&SandboxRef>, now: Instant) {
        let lacks = |_: &&SandboxRef| !self.bears(Mark::Enabled, now);
        let Some(sandbox) = serves_in.filter(lacks) else {
            if let Some(waiting) = &mut self.waiting {
                waiting.since = None;
            }
            return;
        };
        match &mut self.waiting {
            Some(waiting) if waiting.sandbox == *sandbox => {
                waiting.since.get_or_insert(now);
            }
            waiting => {
                *waiting = Some(Waiting {
                    sandbox: sandbox.clone(),
                    since: Some(now),
                    is_told: false,
                });
            }
        }
    }

    fn late_at(&self) -> Option<Instant> {
        let waiting = self.waiting.as_ref().filter(|waiting| !waiting.is_told)?;
        waiting.since.map(|since| since + LATE)
    }

    /// Whether there is nothing to remember.
    fn is_idle(&self, now: Instant) -> bool {
        let is_told = self.waiting.as_ref().is_some_and(|it| it.is_told);
        self.told == Told::AsShown
            && self.in_flight.is_none()
            && self.late_at().is_none()
            && !is_told
            && !self.is_gone
            && self.is_met(now)
    }

    fn is_due(&self, now: Instant) -> bool {
        !self.is_met(now) && self.in_flight.is_none() && self.due <= now
    }

    fn retry_later(&mut self, words: String, now: Instant) {
        let [first, longest] = WAITS;
        let wait = first.saturating_mul(1 << self.attempts.min(6)).min(longest);
        self.attempts = self.attempts.saturating_add(1);
        self.due = now + wait.mul_f64(fastrand::f64().mul_add(0.5, 0.5));
        self.failed = Some(words);
    }

    fn answered(&mut self, mark: Mark, before: Told, answer: Answer, now: Instant) {
        match answer {
            Answer::Accepted => {
                (self.attempts, self.due, self.failed) = (0, now, None);
                self.told = if mark.is(self.shown.as_deref()) {
                    Told::AsShown
                } else {
                    Told::Accepted {
                        mark,
                        over: self.shown.clone(),
                        until: now + LAG,
                    }
                };
            }
            Answer::Gone => (self.is_gone, self.failed) = (true, None),
            Answer::Refused(words) => {
                self.told = before;
                self.retry_later(words, now);
            }
            Answer::Unanswered(words) => self.retry_later(words, now),
        }
    }
}

impl Ledger {
    /// Something new is known of a pod.
    pub(super) fn look(&mut self, key: &PodKey, look: &Look<'_>, now: Instant) {
        let entry = match self.entries.entry(key.clone()) {
            btree_map::Entry::Occupied(known) => {
                let known = known.into_mut();
                if known.uid != *look.uid {
                    *known = Entry::new(look, now);
                }
                known
            }
            btree_map::Entry::Vacant(free) => free.insert(Entry::new(look, now)),
        };
        entry.look(look, now);
        if entry.is_idle(now) {
            self.entries.remove(key);
        }
    }

    /// The source shows no such pod.
    pub(super) fn forget(&mut self, key: &PodKey) {
        self.entries.remove(key);
    }

    /// What is to be sent now, the oldest wish first; nothing while enough is under way.
    pub(super) fn next(&mut self, now: Instant) -> Option<Order> {
        if !self.has_room() {
            return None;
        }
        let due = self.entries.iter_mut().filter(|(_, it)| it.is_due(now));
        let (key, entry) = due.min_by_key(|(_, it)| it.since)?;
        let mark = entry.wish?;
        let told = std::mem::replace(&mut entry.told, Told::Unsure);
        entry.in_flight = Some(told);
        Some(Order {
            key: key.clone(),
            uid: entry.uid.clone(),
            mark,
        })
    }

    fn has_room(&self) -> bool {
        let under_way = self.entries.values().filter(|it| it.in_flight.is_some());
        under_way.count() < AT_ONCE
    }

    /// An order was answered. Tells how long the wish has taken, where it is met now.
    pub(super) fn answered(
        &mut self,
        order: &Order,
        answer: Answer,
        now: Instant,
    ) -> Option<Duration> {
        let entry = self.entries.get_mut(&order.key);
        let entry = entry.filter(|it| it.uid == order.uid)?;
        let before = entry.in_flight.take()?;
        let is_accepted = answer == Answer::Accepted;
        entry.answered(order.mark, before, answer, now);
        (is_accepted && entry.wish == Some(order.mark))
            .then(|| now.saturating_duration_since(entry.since))
    }

    /// When something is to be done next that nothing new sets off.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let has_room = self.has_room();
        let entries = self.entries.values();
        let times = entries.flat_map(|entry| {
            let open = has_room && entry.in_flight.is_none() && !entry.is_met(now);
            let expires = match &entry.told {
                Told::Accepted { until, .. } => Some(*until),
                Told::AsShown | Told::Unsure => None,
            };
            [open.then_some(entry.due), expires, entry.late_at()]
        });
        times.flatten().min()
    }

    /// Pods that have served for too long without their annotation, each once per sandbox; and those of which the
    /// watch should have shown by now what was accepted, which are to be looked at.
    pub(super) fn expired(&mut self, now: Instant) -> (Vec<PodKey>, Vec<PodKey>) {
        let (mut late, mut stale) = (Vec::new(), Vec::new());
        for (key, entry) in &mut self.entries {
            if entry.late_at().is_some_and(|at| at <= now) {
                late.push(key.clone());
                if let Some(waiting) = &mut entry.waiting {
                    waiting.is_told = true;
                }
            }
            if matches!(&entry.told, Told::Accepted { until, .. } if *until <= now) {
                stale.push(key.clone());
            }
        }
        (late, stale)
    }

    /// The API server answers again: what waits for a later attempt is attempted now.
    pub(super) fn hurry(&mut self, now: Instant) {
        for entry in self.entries.values_mut() {
            entry.due = entry.due.min(now);
        }
    }

    /// Whether peers are told that a pod is not redirected, which the source shows now.
    pub(super) fn has_withdrawn(
        &self,
        key: &PodKey,
        uid: &PodUid,
        shown: Option<&str>,
        now: Instant,
    ) -> bool {
        let entry = self.entries.get(key).filter(|it| it.uid == *uid);
        let Some(entry) = entry else {
            return !Mark::Enabled.is(shown);
        };
        // What is wished may be sent at any time.
        let is_known = entry.told != Told::Unsure && entry.wish != Some(Mark::Enabled);
        entry.is_gone || (is_known && !entry.told.bears(Mark::Enabled, shown, now))
    }

    /// How many pods do not bear what they should.
    pub(super) fn unmet(&self) -> u64 {
        let now = Instant::now();
        let unmet = self.entries.values().filter(|it| !it.is_met(now));
        unmet.count().try_into().unwrap_or(u64::MAX)
    }

    /// How many pods could not be annotated at the last attempt, and why the first of them could not.
    pub(super) fn failed(&self) -> Option<(usize, String)> {
        let mut failed = self.entries.values().filter_map(|it| it.failed.as_ref());
        let first = failed.next()?.clone();
        Some((1 + failed.count(), first))
    }
}

#[cfg(test)]
mod tests;
