//! What the time of an ADD goes into.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use inpod_service::Trace;
use tokio::time::Instant;
use tracing::{Instrument as _, Span};

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
    trace: Trace,
    /// The phase as a part of the trace, where that is exported.
    part: Span,
}

impl Default for Clock {
    fn default() -> Self {
        Self {
            phase: Phase::Other,
            since: Instant::now(),
            spent: BTreeMap::new(),
            trace: Trace::default(),
            part: Span::none(),
        }
    }
}

impl Clock {
    fn set(&mut self, phase: Phase) {
        self.count();
        self.phase = phase;
        self.part = match phase {
            Phase::Other => Span::none(),
            Phase::Queue | Phase::Decide | Phase::Claim | Phase::HandOver | Phase::Rules => {
                inpod_service::part(phase.name(), &self.trace)
            }
        };
    }

    fn count(&mut self) {
        let now = Instant::now();
        *self.spent.entry(self.phase).or_default() += now - self.since;
        self.since = now;
    }
}

impl Phases {
    /// A clock whose phases are parts of a trace.
    pub fn of(trace: &Trace) -> Self {
        let trace = trace.clone();
        Self(Arc::new(Mutex::new(Clock {
            trace,
            ..Clock::default()
        })))
    }

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

    /// Does something as a phase. Whoever is asked for it learns of the phase as that of which its answer is a part.
    pub async fn during<F: Future>(&self, phase: Phase, work: F) -> F::Output {
        let _lasts = self.enter(phase);
        let part = self.lock().part.clone();
        work.instrument(part).await
    }

    /// What was spent in the phases that there were.
    pub(super) fn spent(&self) -> BTreeMap<Phase, Duration> {
        let mut clock = self.lock();
        clock.count();
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
