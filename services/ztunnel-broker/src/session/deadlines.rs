//! A session's deadlines, independent of the callers'.

use std::time::Instant;

use super::{Phase, Session, SessionEnd, SessionInputs};

impl Session {
    /// Returns when [`Self::check_deadline`] or [`Self::next`] has to be called even if nothing happens.
    pub fn wake_at(&self, inputs: SessionInputs<'_>) -> Option<Instant> {
        match (&self.phase, &self.in_flight) {
            (Phase::Connected, _) => Some(self.since + self.ack_timeout),
            (_, Some(in_flight)) => Some(in_flight.since + self.ack_timeout),
            (phase, None) => {
                let snapshot = matches!(phase, Phase::Snapshot(_));
                let fetch_deadline = inputs.desired.fetch_deadline().filter(|_| snapshot);
                let retry = self.retries.first().map(|(at, _)| *at);
                let deferred = self.deferred_until(inputs).filter(|_| !snapshot);
                fetch_deadline
                    .into_iter()
                    .chain(retry)
                    .chain(deferred)
                    .min()
            }
        }
    }

    /// Fails if the session has to be closed.
    ///
    /// # Errors
    ///
    /// If the ztunnel was silent for too long.
    pub fn check_deadline(&self, now: Instant) -> Result<(), SessionEnd> {
        match (&self.phase, &self.in_flight) {
            (Phase::Connected, _) if now >= self.since + self.ack_timeout => {
                Err(SessionEnd::NoHello(self.ack_timeout))
            }
            (_, Some(in_flight)) if now >= in_flight.since + self.ack_timeout => {
                Err(SessionEnd::Silent(self.ack_timeout))
            }
            (_, _) => Ok(()),
        }
    }
}
