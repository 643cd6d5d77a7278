//! A pod's history, for `inpod explain`.

use std::{
    collections::VecDeque,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

/// The oldest entries are dropped above this number.
const MAX_ENTRIES: usize = 32;

/// A pod's events, oldest first.
#[derive(Clone, Debug, Default)]
pub struct Timeline(VecDeque<Entry>);

#[derive(Clone, Debug)]
pub struct Entry {
    pub at: SystemTime,
    pub event: String,
    /// For events that took noticeable time.
    pub took: Option<Duration>,
}

impl Timeline {
    pub fn note(&mut self, event: impl Into<String>) {
        self.push(event.into(), None);
    }

    pub fn note_since(&mut self, event: impl Into<String>, began: Instant) {
        self.push(event.into(), Some(began.elapsed()));
    }

    fn push(&mut self, event: String, took: Option<Duration>) {
        if self.0.len() == MAX_ENTRIES {
            self.0.pop_front();
        }
        self.0.push_back(Entry {
            at: SystemTime::now(),
            event,
            took,
        });
    }

    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_entries_are_kept() {
        let mut timeline = Timeline::default();
        (0..100).for_each(|n| timeline.note(format!("{n}")));
        let kept: Vec<_> = timeline
            .entries()
            .map(|entry| entry.event.as_str())
            .collect();
        assert_eq!((kept.len(), kept[0], kept[31]), (MAX_ENTRIES, "68", "99"));
    }
}
