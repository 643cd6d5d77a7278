//! How often a file is put back against a component that takes it away again.

use std::time::{Duration, Instant};

/// So many rewrites are made at once.
const AT_ONCE: u32 = 5;

/// The longest wait between two.
const LONGEST: Duration = Duration::from_secs(60);

/// So long without a rewrite, and what was before is forgotten.
const QUIET: Duration = Duration::from_secs(300);

/// Allows a few rewrites at once, then fewer and fewer, one a minute at last.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    streak: u32,
    last: Option<Instant>,
}

impl Pace {
    /// How long the next rewrite has to wait.
    pub fn wait(&self, now: Instant) -> Duration {
        let since = self.since(now);
        let over = self.streak.saturating_sub(AT_ONCE);
        if over == 0 || since >= QUIET {
            return Duration::ZERO;
        }
        let seconds = 1_u64.checked_shl(over - 1).unwrap_or(u64::MAX);
        Duration::from_secs(seconds)
            .min(LONGEST)
            .saturating_sub(since)
    }

    /// A rewrite was made.
    pub fn spend(&mut self, now: Instant) {
        self.streak = if self.since(now) >= QUIET {
            1
        } else {
            self.streak.saturating_add(1)
        };
        self.last = Some(now);
    }

    /// Whether this is more than a component's update: it is being fought over.
    pub fn is_fight(&self, now: Instant) -> bool {
        self.streak > AT_ONCE && self.since(now) < QUIET
    }

    /// How many rewrites there were without a quiet time between them.
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
        let (mut pace, mut now, mut times) = (Pace::default(), start, Vec::new());
        while now < start + Duration::from_secs(600) {
            now += pace.wait(now);
            times.push(now.duration_since(start).as_secs());
            pace.spend(now);
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
        let mut pace = Pace::default();
        let now = Instant::now();
        (0..20).for_each(|_| pace.spend(now));
        assert!(pace.is_fight(now) && pace.wait(now) == LONGEST);
        assert!(!pace.is_fight(now + QUIET) && pace.wait(now + QUIET).is_zero());
        pace.spend(now + QUIET);
        assert_eq!(pace.streak(), 1);
    }
}
