//! What the time of an ADD goes into.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// A part of an ADD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// It waits for its pod's task, or for its turn.
    Queue,
    /// Which pod is meant and what it should be, a question to the source of pods included.
    Decide,
    /// netconfig proves the netns.
    Claim,
    /// ztunnel-broker hands it over, the wait for a ztunnel included.
    HandOver,
    /// netconfig applies the rules and reads them back.
    Rules,
    /// Everything else: the checkpoint, undoing, waiting for a service that is restarted.
    Other,
}

impl Phase {
    /// Its name in the metrics.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Decide => "decide",
            Self::Claim => "claim",
            Self::HandOver => "hand-over",
            Self::Rules => "rules",
            Self::Other => "other",
        }
    }
}

/// A clock that is always in exactly one phase, so that what it counts of all of them is the whole.
#[derive(Clone, Debug, Default)]
pub struct Phases(Arc<Mutex<Clock>>);

#[derive(Debug)]
struct Clock {
    phase: Phase,
    since: Instant,
    spent: BTreeMap<Phase, Duration>,
}

impl Default for Clock {
    fn default() -> Self {
        Self {
            phase: Phase::Other,
            since: Instant::now(),
            spent: BTreeMap::new(),
        }
    }
}

impl Clock {
    fn set(&mut self, phase: Phase) {
        let now = Instant::now();
        *self.spent.entry(self.phase).or_default() += now - self.since;
        (self.phase, self.since) = (phase, now);
    }
}

impl Phases {
    fn lock(&self) -> MutexGuard<'_, Clock> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts for another phase from now on.
    pub fn set(&self, phase: Phase) {
        self.lock().set(phase);
    }

    /// Counts for another phase until the value is dropped.
    pub fn enter(&self, phase: Phase) -> Entered {
        self.set(phase);
        Entered(self.clone())
    }

    /// What was spent in the phases that there were.
    pub(super) fn spent(&self) -> BTreeMap<Phase, Duration> {
        let mut clock = self.lock();
        let phase = clock.phase;
        clock.set(phase);
        clock.spent.clone()
    }
}

/// A phase that lasts.
#[derive(Debug)]
pub struct Entered(Phases);

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.set(Phase::Other);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn every_moment_counts_for_one_phase_and_all_of_them_are_the_whole() {
        let began = Instant::now();
        let phases = Phases::default();
        advance(Duration::from_secs(1)).await;
        let claims = phases.enter(Phase::Claim);
        advance(Duration::from_secs(2)).await;
        drop(claims);
        phases.set(Phase::Queue);
        advance(Duration::from_secs(4)).await;
        phases.set(Phase::Other);
        advance(Duration::from_secs(8)).await;
        let spent = phases.spent();
        let seconds: Vec<_> = spent.values().map(Duration::as_secs).collect();
        assert_eq!(seconds, [4, 2, 9]);
        assert_eq!(spent.values().sum::<Duration>(), began.elapsed());
    }
}
