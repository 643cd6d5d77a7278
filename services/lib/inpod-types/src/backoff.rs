//! Delays between retries.

use std::time::Duration;

/// A delay that doubles with each failure in a row, up to a maximum.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    /// The delay after the first failure.
    pub first: Duration,
    /// The maximum delay.
    pub longest: Duration,
}

impl Backoff {
    /// Returns a backoff with the given bounds.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest }
    }

    /// Returns the delay after a failure that follows `before` failures in a row.
    pub fn delay(self, before: u32) -> Duration {
        let factor = 2_u32.saturating_pow(before);
        self.first.saturating_mul(factor).min(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_with_each_failure_up_to_its_maximum() {
        let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        let seconds =
            [0, 1, 2, 5, 6, 31, 32, u32::MAX].map(|before| backoff.delay(before).as_secs());
        assert_eq!(seconds, [1, 2, 4, 32, 60, 60, 60, 60]);
    }
}
