//! Working and waiting ADDs. Keeps no clock: callers report durations.

use std::{collections::BTreeSet, num::NonZeroUsize, time::Duration};

use tokio::time::Instant;

/// The newest duration has weight 1/WINDOW in the mean. No estimate before as many durations are recorded: the first
/// ADDs of a burst take longest.
const WINDOW: u32 = 8;

/// An ADD's position in the queue. Only ADDs with an earlier deadline can overtake, ever fewer as its own
/// approaches: no ADD starves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Ticket {
    pub(super) deadline: Instant,
    sequence: u64,
}

/// A bounded number of working ADDs, and the waiting ones.
///
/// An ordered set, not a binary heap: a cancelled ADD leaves from the middle.
#[derive(Debug)]
pub(super) struct Queue {
    max: NonZeroUsize,
    working: usize,
    waiting: BTreeSet<Ticket>,
    next: u64,
    mean_duration: Duration,
    /// The number of recorded durations, up to `WINDOW`.
    samples: u32,
}

impl Queue {
    pub(super) fn new(max: NonZeroUsize) -> Self {
        Self {
            max,
            working: 0,
            waiting: BTreeSet::new(),
            next: 0,
            mean_duration: Duration::ZERO,
            samples: 0,
        }
    }

    pub(super) fn working(&self) -> usize {
        self.working
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn issue_ticket(&mut self, deadline: Instant) -> Ticket {
        self.next += 1;
        Ticket {
            deadline,
            sequence: self.next,
        }
    }

    /// Starts working if a slot is free, otherwise queues. Returns whether it started.
    pub(super) fn start_or_enqueue(&mut self, ticket: Ticket) -> bool {
        let is_free = self.working < self.max.get();
        if is_free {
            self.working += 1;
        } else {
            self.waiting.insert(ticket);
        }
        is_free
    }

    /// Removes a waiting ticket. Returns whether it was waiting.
    pub(super) fn remove(&mut self, ticket: Ticket) -> bool {
        self.waiting.remove(&ticket)
    }

    pub(super) fn finish(&mut self) -> Option<Ticket> {
        self.working = self.working.saturating_sub(1);
        let next = self.waiting.pop_first()?;
        self.working += 1;
        Some(next)
    }

    pub(super) fn record_duration(&mut self, worked: Duration) {
        self.samples = WINDOW.min(self.samples + 1);
        self.mean_duration = (self.mean_duration * (self.samples - 1) + worked) / self.samples;
    }

    pub(super) fn ahead(&self, ticket: Ticket) -> usize {
        self.working + self.waiting.range(..ticket).count()
    }

    pub(super) fn estimated_wait(&self, ticket: Ticket) -> Duration {
        if self.working < self.max.get() || self.samples < WINDOW {
            return Duration::ZERO;
        }
        // It starts when all but `max - 1` of those ahead have finished.
        let to_finish = self.ahead(ticket) + 1 - self.max.get();
        let to_finish = u32::try_from(to_finish).unwrap_or(u32::MAX);
        let max = u32::try_from(self.max.get()).unwrap_or(u32::MAX);
        self.mean_duration.saturating_mul(to_finish) / max
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Event {
        /// An ADD arrives with a deadline in this many milliseconds.
        Enqueue(u64),
        /// The waiting ADD with this index (modulo their number) leaves.
        Remove(usize),
        Finish,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            3 => (0..50_u64).prop_map(Event::Enqueue),
            1 => any::<usize>().prop_map(Event::Remove),
            2 => Just(Event::Finish),
        ]
    }

    proptest! {
        /// The model searches a list for its minimum; the second field is the order of arrival.
        #[test]
        fn the_earliest_deadline_works_next_none_is_lost_and_never_more_than_the_maximum_work(
            max in 1..5_usize,
            events in prop::collection::vec(event(), 0..200),
        ) {
            let start = Instant::now();
            let mut queue = Queue::new(NonZeroUsize::new(max).unwrap());
            let mut waiting: Vec<(u64, usize, Ticket)> = Vec::new();
            let (mut entered, mut worked, mut left) = (0_usize, 0_usize, 0_usize);
            let mut working = 0_usize;
            for event in events {
                match event {
                    Event::Enqueue(millis) => {
                        entered += 1;
                        let ticket = queue.issue_ticket(start + Duration::from_millis(millis));
                        let ahead = waiting.iter().filter(|it| it.0 <= millis).count() + working;
                        prop_assert_eq!(queue.ahead(ticket), ahead);
                        if queue.start_or_enqueue(ticket) {
                            prop_assert!(waiting.is_empty(), "one overtook those that wait");
                            worked += 1;
                            working += 1;
                        } else {
                            prop_assert_eq!(working, max, "one waits without need");
                            waiting.push((millis, entered, ticket));
                        }
                    }
                    Event::Remove(which) => {
                        if !waiting.is_empty() {
                            let (_, _, ticket) = waiting.remove(which % waiting.len());
                            prop_assert!(queue.remove(ticket) && !queue.remove(ticket));
                            left += 1;
                        }
                    }
                    Event::Finish => {
                        if working > 0 {
                            waiting.sort_by_key(|it| (it.0, it.1));
                            let first = (!waiting.is_empty()).then(|| waiting.remove(0).2);
                            prop_assert_eq!(queue.finish(), first);
                            working = working - 1 + usize::from(first.is_some());
                            worked += usize::from(first.is_some());
                        }
                    }
                }
                prop_assert_eq!((queue.working(), queue.waiting()), (working, waiting.len()));
                prop_assert!(working <= max);
                prop_assert_eq!(entered, worked + left + waiting.len());
            }
        }
    }

    #[test]
    fn the_estimated_wait_is_the_work_ahead_at_the_recent_mean_duration() {
        let mut queue = Queue::new(NonZeroUsize::new(2).unwrap());
        let now = Instant::now();
        let entered = |queue: &mut Queue| {
            let ticket = queue.issue_ticket(now);
            let wait = queue.estimated_wait(ticket);
            queue.start_or_enqueue(ticket);
            wait.as_millis()
        };
        for _ in 1..WINDOW {
            queue.record_duration(Duration::from_millis(100));
        }
        queue.record_duration(Duration::from_millis(100));
        let waits: Vec<_> = (0..5).map(|_| entered(&mut queue)).collect();
        assert_eq!(waits, [0, 0, 50, 100, 150]);
        queue.record_duration(Duration::from_millis(900));
        let ticket = queue.issue_ticket(now);
        assert_eq!(
            queue.estimated_wait(ticket).as_millis(),
            400,
            "one in eight counts"
        );
    }
}
