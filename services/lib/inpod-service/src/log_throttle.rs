//! Counts repeated refusals instead of logging each.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The time after a line about an origin for which further refusals of the origin are only counted.
const QUIET_PERIOD: Duration = Duration::from_secs(10);

/// The approximate limit of lines per [`QUIET_PERIOD`]. A process that may create cgroups can invent any number of
/// origins.
const MAX_LINES: usize = 32;

/// Records a refusal. Returns `None` if the refusal must not be logged, otherwise how many refusals of the process were
/// suppressed since its last line.
pub fn throttle_log(origin: &str) -> Option<u64> {
    static REFUSALS: Mutex<LogThrottle> = Mutex::new(LogThrottle::new());
    let mut refusals = REFUSALS.lock().unwrap_or_else(PoisonError::into_inner);
    refusals.record(origin, Instant::now())
}

#[derive(Debug)]
struct LogThrottle {
    lines: BTreeMap<String, Instant>,
    suppressed: u64,
}

impl LogThrottle {
    const fn new() -> Self {
        Self {
            lines: BTreeMap::new(),
            suppressed: 0,
        }
    }

    fn record(&mut self, origin: &str, now: Instant) -> Option<u64> {
        self.lines
            .retain(|_, at| now.saturating_duration_since(*at) < QUIET_PERIOD);
        if self.lines.contains_key(origin) || self.lines.len() >= MAX_LINES {
            self.suppressed += 1;
            return None;
        }
        self.lines.insert(origin.to_owned(), now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_logged_and_the_next_line_counts_the_suppressed_ones() {
        let (mut throttle, start) = (LogThrottle::new(), Instant::now());
        assert_eq!(throttle.record("a", start), Some(0));
        for _ in 0..1000 {
            assert_eq!(throttle.record("a", start + QUIET_PERIOD / 2), None);
        }
        assert_eq!(throttle.record("a", start + QUIET_PERIOD), Some(1000));
        assert_eq!(throttle.record("a", start + QUIET_PERIOD), None);
    }

    #[test]
    fn a_storm_of_one_does_not_hide_another() {
        let (mut throttle, start) = (LogThrottle::new(), Instant::now());
        throttle.record("a", start);
        throttle.record("a", start);
        assert_eq!(throttle.record("b", start), Some(1));
        assert_eq!(throttle.record("a", start), None);
    }

    #[test]
    fn of_a_thousand_names_a_few_are_logged_and_little_is_kept() {
        let (mut throttle, start) = (LogThrottle::new(), Instant::now());
        for round in 0..2 {
            let at = start + QUIET_PERIOD * round;
            let names = (0..1000).map(|number| number.to_string());
            let written: Vec<_> = names.filter_map(|it| throttle.record(&it, at)).collect();
            assert_eq!(written.len(), MAX_LINES);
            assert_eq!(written.iter().sum::<u64>(), u64::from(round) * 968);
            assert_eq!(throttle.lines.len(), MAX_LINES);
        }
    }
}
