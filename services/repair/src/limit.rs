//! Delays changes of pods after failures.

use std::time::Duration;

use inpod_types::Backoff;
use tokio::time::Instant;

/// The delays after failures.
const DELAYS: Backoff = Backoff::new(Duration::from_secs(5), Duration::from_secs(300));

#[derive(Clone, Copy, Debug, Default)]
pub struct ChangeBackoff {
    failures: u32,
    until: Option<Instant>,
}

impl ChangeBackoff {
    pub fn is_elapsed(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now >= until)
    }

    /// Delays the next attempt although the last attempt did not fail.
    pub fn pause(&mut self, now: Instant, time: Duration) {
        self.until = Some(now + time);
    }

    /// Delays the next attempt after a failure, twice as long as after the failure before.
    pub fn fail(&mut self, now: Instant) {
        self.until = Some(now + DELAYS.delay(self.failures));
        self.failures = self.failures.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(100_000)
    }

    #[test]
    fn what_fails_waits_longer_each_time_and_five_minutes_at_most() {
        let (mut backoff, mut now) = (ChangeBackoff::default(), later());
        let mut waits = Vec::new();
        for _ in 0..40 {
            assert!(backoff.is_elapsed(now));
            backoff.fail(now);
            let began = now;
            while !backoff.is_elapsed(now) {
                now += Duration::from_secs(1);
            }
            waits.push(now.duration_since(began).as_secs());
        }
        assert_eq!(waits[..8], [5, 10, 20, 40, 80, 160, 300, 300]);
        assert_eq!(waits.last(), Some(&300));
    }
}
