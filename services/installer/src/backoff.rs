//! Slows down rewrites of the chain, because another component may keep removing inpod from it.

use std::time::{Duration, Instant};

use inpod_types::Backoff;

/// The number of rewrites that are made without a delay.
const MAX_IMMEDIATE: u32 = 5;

const DELAYS: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));

/// The time without a rewrite after which the backoff starts anew.
const RESET_AFTER: Duration = Duration::from_secs(300);

/// Allows a few immediate rewrites, then doubles the delay up to a minute.
#[derive(Clone, Copy, Debug, Default)]
pub struct RewriteBackoff {
    streak: u32,
    last: Option<Instant>,
}

impl RewriteBackoff {
    /// Returns how long to delay the next rewrite.
    pub fn delay(&self, now: Instant) -> Duration {
        let since = self.since(now);
        let delayed = self.streak.checked_sub(MAX_IMMEDIATE + 1);
        let delayed = delayed.filter(|_| since < RESET_AFTER);
        delayed.map_or(Duration::ZERO, |before| {
            DELAYS.delay(before).saturating_sub(since)
        })
    }

    pub fn record_rewrite(&mut self, now: Instant) {
        self.streak = if self.since(now) >= RESET_AFTER {
            1
        } else {
            self.streak.saturating_add(1)
        };
        self.last = Some(now);
    }

    pub fn streak(&self) -> u32 {
        self.streak
    }

    fn since(&self, now: Instant) -> Duration {
        self.last
            .map_or(Duration::MAX, |last| now.saturating_duration_since(last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_rewrites_are_made_at_once_and_then_one_a_minute_at_most() {
        let start = Instant::now();
        let (mut backoff, mut now, mut times) = (RewriteBackoff::default(), start, Vec::new());
        while now < start + Duration::from_secs(600) {
            now += backoff.delay(now);
            times.push(now.duration_since(start).as_secs());
            backoff.record_rewrite(now);
        }
        assert_eq!(
            times[..11],
            [0, 0, 0, 0, 0, 0, 1, 3, 7, 15, 31],
            "{times:?}"
        );
        assert_eq!(times.last().unwrap() - times[times.len() - 2], 60);
        assert!(times.len() <= 22, "{times:?}");
    }

    #[test]
    fn a_quiet_time_forgives() {
        let mut backoff = RewriteBackoff::default();
        let now = Instant::now();
        (0..20).for_each(|_| backoff.record_rewrite(now));
        assert_eq!(backoff.delay(now), DELAYS.longest);
        assert!(backoff.delay(now + RESET_AFTER).is_zero());
        backoff.record_rewrite(now + RESET_AFTER);
        assert_eq!(backoff.streak(), 1);
    }
}
