//! Collects times, and prints tables of times.

use std::time::Duration;

use crate::print_line;

/// The times of an operation in the order of measurement.
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

    /// Returns the time in microseconds below which this share of the samples lies.
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

/// Prints the rows; the first row is the reference for the other rows.
pub(crate) fn table(title: &str, rows: &[Row]) -> anyhow::Result<()> {
    print_line(&format!(
        "\n### {title}\n\n| what | median us | p99 | min | n | x first |\n|---|---|---|---|---|---|"
    ))?;
    let first = rows.first().map_or(1.0, |row| row.quantile(0.5));
    for row in rows {
        let (median, p99, min) = (row.quantile(0.5), row.quantile(0.99), row.quantile(0.0));
        print_line(&format!(
            "| {} | {median:.0} | {p99:.0} | {min:.0} | {} | {:.2} |",
            row.what,
            row.times.len(),
            median / first
        ))?;
    }
    Ok(())
}

pub(crate) fn record<const N: usize>(rows: &mut [Row; N], times: [Duration; N]) {
    for (row, time) in rows.iter_mut().zip(times) {
        row.times.push(time);
    }
}
