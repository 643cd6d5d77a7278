//! A session's own clock: callers have another.

use std::time::Instant;

use super::{Known, Phase, Session, SessionEnd};

impl Session {
    /// When [`Self::on_time`] or [`Self::next`] is worth calling though nothing has happened.
    pub fn wake_at(&self, known: Known<'_>) -> Option<Instant> {
        if self.renewed {
            return Some(self.since);
        }
        match (&self.phase, &self.in_flight) {
            (Phase::Connected, _) => Some(self.since + self.patience),
            (_, Some(in_flight)) => Some(in_flight.since + self.patience),
            (phase, None) => {
                let snapshot = matches!(phase, Phase::Snapshot(_));
                let patience = known.desired.patience().filter(|_| snapshot);
                let retry = self.retries.first().map(|(at, _)| *at);
                let deferred = self.deferred_until(known).filter(|_| !snapshot);
                patience.into_iter().chain(retry).chain(deferred).min()
            }
        }
    }

    /// Looks at the clock.
    ///
    /// # Errors
    ///
    /// When the ztunnel has been silent for too long, or somebody wants the session closed.
    pub fn on_time(&self, now: Instant) -> Result<(), SessionEnd> {
        if self.renewed {
            return Err(SessionEnd::Renewed);
        }
        match (&self.phase, &self.in_flight) {
            (Phase::Connected, _) if now >= self.since + self.patience => {
                Err(SessionEnd::NoHello(self.patience))
            }
            (_, Some(in_flight)) if now >= in_flight.since + self.patience => {
                Err(SessionEnd::Silent(self.patience))
            }
            (_, _) => Ok(()),
        }
    }
}
