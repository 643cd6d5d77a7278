//! What happened to a pod.

use std::{
    collections::VecDeque,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

/// Entries beyond this many push the oldest out.
const KEPT: usize = 32;

/// What happened to a pod, oldest first.
#[derive(Clone, Debug, Default)]
pub struct Timeline(VecDeque<Entry>);

/// One thing that happened.
#[derive(Clone, Debug)]
pub struct Entry {
    /// When.
    pub at: SystemTime,
    /// What, in a few words.
    pub event: String,
    /// How long it took, where that is worth telling.
    pub took: Option<Duration>,
}

impl Timeline {
    /// Notes what happened now.
    pub fn note(&mut self, event: impl Into<String>) {
        self.push(event.into(), None);
    }

    /// Notes what happened now and began then.
    pub fn note_since(&mut self, event: impl Into<String>, began: Instant) {
        self.push(event.into(), Some(began.elapsed()));
    }

    fn push(&mut self, event: String, took: Option<Duration>) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(Entry {
            at: SystemTime::now(),
            event,
            took,
        });
    }

    /// The entries.
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
        assert_eq!((kept.len(), kept[0], kept[31]), (KEPT, "68", "99"));
    }
}
