//! Limits the rate of changes of pods, and delays changes after failures.

use std::{num::NonZeroU16, time::Duration};

use inpod_types::Backoff;
use tokio::time::Instant;

/// A rate limit per minute, with a capacity of one minute's tokens.
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    capacity: u32,
    refill_interval: Duration,
    tokens: u32,
    /// The time of the last refill; `None` before the first token was taken.
    refilled: Option<Instant>,
}

impl TokenBucket {
    pub fn per_minute(number: NonZeroU16) -> Self {
        let capacity = u32::from(number.get());
        Self {
            capacity,
            refill_interval: Duration::from_secs(60) / capacity,
            tokens: capacity,
            refilled: None,
        }
    }

    pub fn try_take(&mut self, now: Instant) -> bool {
        let refilled = self.refilled.get_or_insert(now);
        while self.tokens < self.capacity && *refilled + self.refill_interval <= now {
            self.tokens += 1;
            *refilled += self.refill_interval;
        }
        if self.tokens == self.capacity {
            *refilled = now;
        }
        let may = self.tokens > 0;
        self.tokens = self.tokens.saturating_sub(1);
        may
    }
}

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
    fn a_minutes_worth_is_taken_at_once_and_then_one_at_a_time() {
        let (mut bucket, mut now) = (
            TokenBucket::per_minute(NonZeroU16::new(6).unwrap()),
            later(),
        );
        let mut taken = |now| (0..100).filter(|_| bucket.try_take(now)).count();
        assert_eq!(taken(now), 6);
        now += Duration::from_millis(9_999);
        assert_eq!(taken(now), 0);
        now += Duration::from_millis(1);
        assert_eq!(taken(now), 1);
        now += Duration::from_secs(3600);
        assert_eq!(taken(now), 6, "no more than a minute's worth is kept");
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
