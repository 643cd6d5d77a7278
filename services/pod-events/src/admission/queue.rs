//! Who works and who waits. Knows no clock: whoever asks says what time it took.

use std::{collections::BTreeSet, num::NonZeroUsize, time::Duration};

use tokio::time::Instant;

/// How much the last turn counts in the pace: one part of as many. Before as many turns are over nothing is said of it:
/// the first ones of a burst take longest.
const MEMORY: u32 = 8;

/// The place of one that wants to work: the earlier deadline is before the later, and of two with the same deadline the
/// one that came first. An ADD is only overtaken by more urgent ones, of which there are ever fewer as its own deadline
/// comes near: none waits for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Place {
    pub(super) deadline: Instant,
    number: u64,
}

/// Those who work, a bounded number, and those who wait.
///
/// An ordered set instead of a binary heap: one whose caller goes away leaves from the middle.
#[derive(Debug)]
pub(super) struct Queue {
    max: NonZeroUsize,
    working: usize,
    waiting: BTreeSet<Place>,
    next: u64,
    pace: Duration,
    /// How many turns are over, as far as that matters.
    over: u32,
}

impl Queue {
    pub(super) fn new(max: NonZeroUsize) -> Self {
        Self {
            max,
            working: 0,
            waiting: BTreeSet::new(),
            next: 0,
            pace: Duration::ZERO,
            over: 0,
        }
    }

    pub(super) fn working(&self) -> usize {
        self.working
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// A place for one more, which is not in the queue yet.
    pub(super) fn place(&mut self, deadline: Instant) -> Place {
        self.next += 1;
        Place {
            deadline,
            number: self.next,
        }
    }

    /// Begins to work, if not as many do as may; otherwise waits. Tells which.
    pub(super) fn enter(&mut self, place: Place) -> bool {
        let may = self.working < self.max.get();
        if may {
            self.working += 1;
        } else {
            self.waiting.insert(place);
        }
        may
    }

    /// No longer waits. Tells whether it did.
    pub(super) fn leave(&mut self, place: Place) -> bool {
        self.waiting.remove(&place)
    }

    /// One that worked stops; the first that waits works from now on.
    pub(super) fn stop(&mut self) -> Option<Place> {
        self.working = self.working.saturating_sub(1);
        let next = self.waiting.pop_first()?;
        self.working += 1;
        Some(next)
    }

    /// How much work a whole turn was.
    pub(super) fn took(&mut self, worked: Duration) {
        self.over = MEMORY.min(self.over + 1);
        self.pace = (self.pace * (self.over - 1) + worked) / self.over;
    }

    /// How many have to be worked on before a place.
    pub(super) fn ahead(&self, place: Place) -> usize {
        self.working + self.waiting.range(..place).count()
    }

    /// How long a place has to wait, by what turns took lately.
    pub(super) fn wait(&self, place: Place) -> Duration {
        if self.working < self.max.get() || self.over < MEMORY {
            return Duration::ZERO;
        }
        // Of those ahead, all but as many as still work beside it have to stop first.
        let turns = self.ahead(place) + 1 - self.max.get();
        let turns = u32::try_from(turns).unwrap_or(u32::MAX);
        let max = u32::try_from(self.max.get()).unwrap_or(u32::MAX);
        self.pace.saturating_mul(turns) / max
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What happens to a queue.
    #[derive(Clone, Debug)]
    enum Event {
        /// One enters who has as many milliseconds.
        Enter(u64),
        /// Of those that wait, this one (modulo their number) leaves.
        Leave(usize),
        /// One that works stops.
        Stop,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            3 => (0..50_u64).prop_map(Event::Enter),
            1 => any::<usize>().prop_map(Event::Leave),
            2 => Just(Event::Stop),
        ]
    }

    proptest! {
        /// The model is a list that is searched for its least. The number is the order of coming.
        #[test]
        fn the_earliest_deadline_works_next_none_is_lost_and_never_more_than_may(
            max in 1..5_usize,
            events in prop::collection::vec(event(), 0..200),
        ) {
            let start = Instant::now();
            let mut queue = Queue::new(NonZeroUsize::new(max).unwrap());
            let mut waiting: Vec<(u64, usize, Place)> = Vec::new();
            let (mut entered, mut worked, mut left) = (0_usize, 0_usize, 0_usize);
            let mut working = 0_usize;
            for event in events {
                match event {
                    Event::Enter(millis) => {
                        entered += 1;
                        let place = queue.place(start + Duration::from_millis(millis));
                        let ahead = waiting.iter().filter(|it| it.0 <= millis).count() + working;
                        prop_assert_eq!(queue.ahead(place), ahead);
                        if queue.enter(place) {
                            prop_assert!(waiting.is_empty(), "one overtook those that wait");
                            worked += 1;
                            working += 1;
                        } else {
                            prop_assert_eq!(working, max, "one waits without need");
                            waiting.push((millis, entered, place));
                        }
                    }
                    Event::Leave(which) => {
                        if !waiting.is_empty() {
                            let (_, _, place) = waiting.remove(which % waiting.len());
                            prop_assert!(queue.leave(place) && !queue.leave(place));
                            left += 1;
                        }
                    }
                    Event::Stop => {
                        if working > 0 {
                            waiting.sort_by_key(|it| (it.0, it.1));
                            let first = (!waiting.is_empty()).then(|| waiting.remove(0).2);
                            prop_assert_eq!(queue.stop(), first);
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
    fn the_wait_is_what_is_ahead_at_the_pace_of_late() {
        let mut queue = Queue::new(NonZeroUsize::new(2).unwrap());
        let now = Instant::now();
        let entered = |queue: &mut Queue| {
            let place = queue.place(now);
            let wait = queue.wait(place);
            queue.enter(place);
            wait.as_millis()
        };
        for _ in 1..MEMORY {
            queue.took(Duration::from_millis(100));
        }
        queue.took(Duration::from_millis(100));
        let waits: Vec<_> = (0..5).map(|_| entered(&mut queue)).collect();
        assert_eq!(waits, [0, 0, 50, 100, 150]);
        queue.took(Duration::from_millis(900));
        let place = queue.place(now);
        assert_eq!(queue.wait(place).as_millis(), 400, "one in eight counts");
    }
}
