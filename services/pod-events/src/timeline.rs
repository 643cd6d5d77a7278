//! A pod's history, for `inpod explain`.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

/// The maximum of entries; above this number, the oldest entries are dropped.
const MAX_ENTRIES: usize = 32;

/// A pod's events, oldest first, shared between clones.
#[derive(Clone, Debug, Default)]
pub struct Timeline(Arc<Mutex<VecDeque<Entry>>>);

#[derive(Clone, Debug)]
pub struct Entry {
    pub at: SystemTime,
    pub event: Box<str>,
    /// The duration of events that took noticeable time.
    pub took: Option<Duration>,
}

impl Timeline {
    pub fn note(&mut self, event: impl Into<Box<str>>) {
        self.push(event.into(), None);
    }

    pub fn note_since(&mut self, event: impl Into<Box<str>>, began: Instant) {
        self.push(event.into(), Some(began.elapsed()));
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&mut self, event: Box<str>, took: Option<Duration>) {
        let mut entries = self.lock();
        if entries.len() == MAX_ENTRIES {
            entries.pop_front();
        }
        entries.push_back(Entry {
            at: SystemTime::now(),
            event,
            took,
        });
    }

    pub fn entries(&self) -> Vec<Entry> {
        self.lock().iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_entries_are_kept() {
        let mut timeline = Timeline::default();
        (0..100).for_each(|n| timeline.note(format!("{n}")));
        let kept = timeline.entries();
        assert_eq!(kept.len(), MAX_ENTRIES);
        assert_eq!((&*kept[0].event, &*kept[31].event), ("68", "99"));
    }
}
