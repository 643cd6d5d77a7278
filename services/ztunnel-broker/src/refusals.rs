//! Which refusals are written down: one that comes again and again is counted, so that it cannot fill the log.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// How long after a line about somebody the next ones are only counted.
const QUIET: Duration = Duration::from_secs(10);

/// About how many a line is written in that time. Whoever may make cgroups chooses names.
const MOST: usize = 32;

/// What was written down of late.
#[derive(Debug, Default)]
pub struct Refusals {
    lines: BTreeMap<String, Instant>,
    unwritten: u64,
}

impl Refusals {
    /// Whether a refusal is to be written down, and if so, how many were only counted since the last line.
    pub fn count(&mut self, whence: &str, now: Instant) -> Option<u64> {
        self.lines
            .retain(|_, at| now.saturating_duration_since(*at) < QUIET);
        if self.lines.contains_key(whence) || self.lines.len() >= MOST {
            self.unwritten += 1;
            return None;
        }
        self.lines.insert(whence.to_owned(), now);
        Some(std::mem::take(&mut self.unwritten))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_written_and_the_next_line_tells_how_many_were_not() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        assert_eq!(refusals.count("a", start), Some(0));
        for _ in 0..1000 {
            assert_eq!(refusals.count("a", start + QUIET / 2), None);
        }
        assert_eq!(refusals.count("a", start + QUIET), Some(1000));
        assert_eq!(refusals.count("a", start + QUIET), None);
    }

    #[test]
    fn a_storm_of_one_does_not_hide_another() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        refusals.count("a", start);
        refusals.count("a", start);
        assert_eq!(refusals.count("b", start), Some(1));
        assert_eq!(refusals.count("a", start), None);
    }

    #[test]
    fn of_a_thousand_names_a_few_are_written_and_little_is_kept() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        for round in 0..2 {
            let at = start + QUIET * round;
            let names = (0..1000).map(|number| number.to_string());
            let written: Vec<_> = names.filter_map(|it| refusals.count(&it, at)).collect();
            assert_eq!(written.len(), MOST);
            assert_eq!(written.iter().sum::<u64>(), u64::from(round) * 968);
            assert_eq!(refusals.lines.len(), MOST);
        }
    }
}
