//! Which refusals are written down: one that comes again and again is counted, so that it cannot fill the log.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// How long after a line about somebody the next ones are only counted.
const QUIET_PERIOD: Duration = Duration::from_secs(10);

/// About how many a line is written in that time. Whoever may make cgroups chooses names.
const MAX_LINES: usize = 32;

/// What was written down of late.
#[derive(Debug, Default)]
pub struct LogThrottle {
    lines: BTreeMap<String, Instant>,
    suppressed: u64,
}

impl LogThrottle {
    /// Whether a refusal is to be written down, and if so, how many were only counted since the last line.
    pub fn record(&mut self, origin: &str, now: Instant) -> Option<u64> {
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
    fn the_first_is_written_and_the_next_line_tells_how_many_were_not() {
        let (mut throttle, start) = (LogThrottle::default(), Instant::now());
        assert_eq!(throttle.record("a", start), Some(0));
        for _ in 0..1000 {
            assert_eq!(throttle.record("a", start + QUIET_PERIOD / 2), None);
        }
        assert_eq!(throttle.record("a", start + QUIET_PERIOD), Some(1000));
        assert_eq!(throttle.record("a", start + QUIET_PERIOD), None);
    }

    #[test]
    fn a_storm_of_one_does_not_hide_another() {
        let (mut throttle, start) = (LogThrottle::default(), Instant::now());
        throttle.record("a", start);
        throttle.record("a", start);
        assert_eq!(throttle.record("b", start), Some(1));
        assert_eq!(throttle.record("a", start), None);
    }

    #[test]
    fn of_a_thousand_names_a_few_are_written_and_little_is_kept() {
        let (mut throttle, start) = (LogThrottle::default(), Instant::now());
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
