//! Prints tables with a row per operation and a group of columns per agent.

use std::{fmt::Write as _, time::Duration};

use crate::{print_line, side::LIMIT};

/// The number of resamples for a confidence interval.
const RESAMPLES: usize = 2000;

pub(crate) struct Comparison {
    title: String,
    unit: &'static str,
    sides: Vec<String>,
    rows: Vec<Row>,
}

struct Row {
    what: String,
    /// The sum of the floors, measured in the same run.
    floor: Option<f64>,
    /// The samples of each side, in the order of measurement.
    samples: Vec<Vec<f64>>,
}

impl Comparison {
    pub(crate) fn new<'a>(
        title: &str,
        unit: &'static str,
        sides: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        Self {
            title: title.to_owned(),
            unit,
            sides: sides.into_iter().map(str::to_owned).collect(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn record(&mut self, what: &str, side: usize, value: f64) {
        let index = self.rows.iter().position(|row| row.what == what);
        let index = index.unwrap_or_else(|| {
            self.rows.push(Row {
                what: what.to_owned(),
                floor: None,
                samples: vec![Vec::new(); self.sides.len()],
            });
            self.rows.len() - 1
        });
        let samples = self
            .rows
            .get_mut(index)
            .and_then(|row| row.samples.get_mut(side));
        if let Some(samples) = samples {
            samples.push(value);
        }
    }

    pub(crate) fn set_floor(&mut self, what: &str, floor: f64) {
        for row in self.rows.iter_mut().filter(|row| row.what == what) {
            row.floor = Some(floor);
        }
    }

    pub(crate) fn median(&self, what: &str) -> f64 {
        let row = self.rows.iter().find(|row| row.what == what);
        let samples = row.and_then(|row| row.samples.first());
        samples.map_or(0.0, |samples| quantile(samples, 0.5))
    }

    /// Records a value for the side with this name, unless the side has left the run.
    pub(crate) fn record_of(&mut self, what: &str, side: &str, value: f64) {
        if let Some(index) = self.sides.iter().position(|name| name == side) {
            self.record(what, index, value);
        }
    }

    pub(crate) fn print(&self) -> anyhow::Result<()> {
        let has_floor = self.rows.iter().any(|row| row.floor.is_some());
        let mut head = format!("| {} |", self.unit);
        if has_floor {
            head += " sum of floors | x floors |";
        }
        for (index, side) in self.sides.iter().enumerate() {
            write!(head, " {side}: median | p99 | min |")?;
            if index > 0 {
                write!(head, " first / {side} (95 %) |")?;
            }
        }
        head += " n |";
        let columns = head.matches('|').count() - 1;
        print_line(&format!(
            "\n### {}\n\n{head}\n{}|",
            self.title,
            "|---".repeat(columns)
        ))?;
        self.rows
            .iter()
            .try_for_each(|row| print_line(&row.line(has_floor)?))
    }
}

impl Comparison {
    /// Prints the ratio of each column to the first column, for columns that are different loads of the same agent.
    pub(crate) fn print_growth(&self) -> anyhow::Result<()> {
        let mut head = format!("| {} |", self.unit);
        for (index, side) in self.sides.iter().enumerate() {
            write!(head, " {side}: median | min |")?;
            if index > 0 {
                head += " x first (95 %) |";
            }
        }
        let columns = head.matches('|').count() - 1;
        let line = "|---".repeat(columns);
        print_line(&format!("\n### {}\n\n{head}\n{line}|", self.title))?;
        let none = Vec::new();
        for row in &self.rows {
            let first = row.samples.first().unwrap_or(&none);
            let mut line = format!("| {} |", row.what);
            for (index, samples) in row.samples.iter().enumerate() {
                let [median, min] = [0.5, 0.0].map(|share| number(quantile(samples, share)));
                write!(line, " {median} | {min} |")?;
                if index > 0 && quantile(first, 0.0) > 0.0 {
                    let (ratio, low, high) = ratio(samples, first);
                    write!(line, " **{ratio:.2}** ({low:.2} to {high:.2}) |")?;
                } else if index > 0 {
                    line += " - |";
                }
            }
            print_line(&line)?;
        }
        Ok(())
    }
}

impl Row {
    fn line(&self, has_floor: bool) -> anyhow::Result<String> {
        let none = Vec::new();
        let first = self.samples.first().unwrap_or(&none);
        let mut line = format!("| {} |", self.what);
        match self.floor {
            Some(floor) => {
                let share = quantile(first, 0.5) / floor;
                write!(line, " {} | {share:.2} |", number(floor))?;
            }
            None if has_floor => line += " | |",
            None => {}
        }
        for (index, samples) in self.samples.iter().enumerate() {
            if samples.is_empty() {
                line += " - | - | - |";
            } else {
                let [median, p99, min] = [0.5, 0.99, 0.0].map(|share| quantile(samples, share));
                write!(
                    line,
                    " {} | {} | {} |",
                    number(median),
                    number(p99),
                    number(min)
                )?;
            }
            let median = quantile(samples, 0.5);
            let is_comparable = !first.is_empty() && median > 0.0 && median.is_finite();
            if index > 0 && !is_comparable {
                line += " - |";
            } else if index > 0 {
                let (ratio, low, high) = ratio(first, samples);
                write!(line, " **{ratio:.2}** ({low:.2} to {high:.2}) |")?;
            }
        }
        let count = self.samples.iter().map(Vec::len).max();
        write!(line, " {} |", count.unwrap_or_default())?;
        Ok(line)
    }
}

/// Formats a value. The time of a restart that took too long is infinite.
pub(crate) fn number(value: f64) -> String {
    if value.is_infinite() {
        format!("over {} s", LIMIT.as_secs())
    } else {
        integration::picture::number(value)
    }
}

#[expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a share of a small count"
)]
pub(crate) fn quantile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    let index = (share * last as f64).round() as usize;
    sorted.get(index).copied().unwrap_or_default()
}

/// Returns the ratio of the medians and its 95 % confidence interval by bootstrap. Samples from alternating
/// measurements are resampled in pairs.
fn ratio(ours: &[f64], theirs: &[f64]) -> (f64, f64, f64) {
    let mut random = fastrand::Rng::with_seed(18);
    let draw = |samples: &[f64], indices: &[usize]| {
        let drawn = indices.iter().filter_map(|index| samples.get(*index));
        quantile(&drawn.copied().collect::<Vec<_>>(), 0.5)
    };
    let mut resample = |samples: &[f64]| {
        let indices = (0..samples.len()).map(|_| random.usize(..samples.len()));
        indices.collect::<Vec<_>>()
    };
    let mut ratios: Vec<_> = (0..RESAMPLES)
        .map(|_| {
            let indices = resample(ours);
            let others = if ours.len() == theirs.len() {
                indices.clone()
            } else {
                resample(theirs)
            };
            draw(ours, &indices) / draw(theirs, &others)
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    let all = quantile(ours, 0.5) / quantile(theirs, 0.5);
    (all, quantile(&ratios, 0.025), quantile(&ratios, 0.975))
}

pub(crate) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
