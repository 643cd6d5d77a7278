//! Measures the phases of an ADD.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Waiting for the pod's task or a concurrency slot.
    Queue,
    /// Identifying the pod and deciding, including requests to the source.
    Decide,
    /// netconfig verifies and claims the netns.
    Claim,
    /// The broker hands the netns over and waits for ztunnel.
    HandOver,
    /// netconfig applies the rules and reads them back.
    Rules,
    /// Everything else: the checkpoint, undoing, waiting for a service to restart.
    Other,
}

impl Phase {
    pub(crate) fn name(self) -> &'static str {
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

/// A clock in exactly one phase at a time, so that the phases add up to the total.
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
        self.count();
        self.phase = phase;
    }

    fn count(&mut self) {
        let now = Instant::now();
        *self.spent.entry(self.phase).or_default() += now - self.since;
        self.since = now;
    }
}

impl Phases {
    fn lock(&self) -> MutexGuard<'_, Clock> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set(&self, phase: Phase) {
        self.lock().set(phase);
    }

    /// Enters a phase until the guard is dropped.
    pub fn enter(&self, phase: Phase) -> PhaseGuard {
        self.set(phase);
        PhaseGuard(self.clone())
    }

    /// Runs a future within a phase.
    pub async fn during<F: Future>(&self, phase: Phase, work: F) -> F::Output {
        let _lasts = self.enter(phase);
        work.await
    }

    /// Returns the current phase and its beginning.
    pub(crate) fn current(&self) -> (Phase, Instant) {
        let clock = self.lock();
        (clock.phase, clock.since)
    }

    pub(crate) fn spent(&self) -> BTreeMap<Phase, Duration> {
        let mut clock = self.lock();
        clock.count();
        clock.spent.clone()
    }
}

#[derive(Debug)]
pub struct PhaseGuard(Phases);

impl Drop for PhaseGuard {
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
