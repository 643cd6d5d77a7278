//! Times, and how they are printed.

use std::time::{Duration, Instant};

use crate::say;

/// Times of one thing, in the order they were measured.
pub(crate) struct Row {
    pub(crate) what: &'static str,
    pub(crate) times: Vec<Duration>,
}

impl Row {
    pub(crate) fn new(what: &'static str) -> Self {
        Self {
            what,
            times: Vec::new(),
        }
    }

    /// The time below which a share of the samples is, in microseconds.
    pub(crate) fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.times.clone();
        sorted.sort();
        let last = sorted.len().saturating_sub(1);
        #[expect(
            clippy::as_conversions,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of a small count"
        )]
        let index = (share * last as f64).round() as usize;
        sorted
            .get(index)
            .map_or(0.0, |time| time.as_secs_f64() * 1e6)
    }
}

/// Prints a table; its first row is what the others are compared with.
pub(crate) fn table(title: &str, rows: &[Row]) -> anyhow::Result<()> {
    say(&format!(
        "\n### {title}\n\n| what | median us | p99 | min | n | x first |\n|---|---|---|---|---|---|"
    ))?;
    let first = rows.first().map_or(1.0, |row| row.quantile(0.5));
    for row in rows {
        let (median, p99, min) = (row.quantile(0.5), row.quantile(0.99), row.quantile(0.0));
        say(&format!(
            "| {} | {median:.0} | {p99:.0} | {min:.0} | {} | {:.2} |",
            row.what,
            row.times.len(),
            median / first
        ))?;
    }
    Ok(())
}

/// How long something takes.
pub(crate) fn timed(f: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<Duration> {
    let started = Instant::now();
    f()?;
    Ok(started.elapsed())
}

/// One sample of each row.
pub(crate) fn record<const N: usize>(rows: &mut [Row; N], times: [Duration; N]) {
    for (row, time) in rows.iter_mut().zip(times) {
        row.times.push(time);
    }
}
