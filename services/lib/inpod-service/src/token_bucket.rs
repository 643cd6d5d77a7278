//! Limits the rate of actions, and allows bursts.

use std::time::Duration;

use tokio::time::Instant;

#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    size: u32,
    /// The interval at which the bucket gains a token.
    interval: Duration,
    /// The time at which the bucket is full; `None` for a new bucket.
    full_at: Option<Instant>,
}

impl TokenBucket {
    /// Returns a full bucket.
    pub const fn new(size: u32, interval: Duration) -> Self {
        Self {
            size,
            interval,
            full_at: None,
        }
    }

    /// Takes a token. Returns false if the bucket is empty.
    pub fn try_take(&mut self, now: Instant) -> bool {
        let full_at = self.full_at.map_or(now, |at| at.max(now)) + self.interval;
        let may = full_at <= now + self.interval * self.size;
        if may {
            self.full_at = Some(full_at);
        }
        may
    }

    pub fn is_full(&self, now: Instant) -> bool {
        self.full_at.is_none_or(|at| at <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_allows_a_burst_and_then_a_token_per_interval() {
        let mut bucket = TokenBucket::new(6, Duration::from_secs(10));
        let mut now = Instant::now();
        for (milliseconds, taken) in [(0, 6), (9_999, 0), (1, 1), (3_600_000, 6)] {
            now += Duration::from_millis(milliseconds);
            let count = (0..100).filter(|_| bucket.try_take(now)).count();
            assert_eq!(count, taken, "{milliseconds}");
        }
        assert!(!bucket.is_full(now + Duration::from_millis(59_999)));
        assert!(bucket.is_full(now + Duration::from_secs(60)));
    }
}
