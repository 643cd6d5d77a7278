//! Figures of a run: a line per second in a file, and a picture.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use integration::picture::{Pairs, Panel, picture};

/// Pods by the state that pod-events reports, connections by what became of them, and violations.
const COLUMNS: [&str; 8] = [
    "enrolled",
    "outside",
    "changing",
    "captured",
    "direct",
    "failed",
    "lost",
    "violations",
];

/// The number of columns of states.
const STATES: usize = 3;

#[derive(Debug)]
pub(crate) struct Figures {
    began: Instant,
    seconds: Vec<[u32; COLUMNS.len()]>,
    /// By what is affected, with what was done to it.
    faults: BTreeMap<String, Vec<(Instant, Option<Instant>)>>,
    events: Vec<(Instant, String)>,
}

impl Figures {
    pub(crate) fn new(began: Instant) -> Self {
        Self {
            began,
            seconds: Vec::new(),
            faults: BTreeMap::new(),
            events: Vec::new(),
        }
    }

    fn cell(&mut self, column: &str, at: Instant) -> Option<&mut u32> {
        let second = self.since(at).as_secs();
        let second = usize::try_from(second).ok()?;
        while self.seconds.len() <= second {
            // A second without a report has the states of the one before.
            let mut row = self.seconds.last().copied().unwrap_or_default();
            row.iter_mut().skip(STATES).for_each(|value| *value = 0);
            self.seconds.push(row);
        }
        let column = COLUMNS.iter().position(|it| *it == column)?;
        self.seconds.get_mut(second)?.get_mut(column)
    }

    pub(crate) fn count(&mut self, column: &str, at: Instant) {
        if let Some(cell) = self.cell(column, at) {
            *cell += 1;
        }
    }

    /// The last value of a second stands.
    pub(crate) fn set(&mut self, column: &str, at: Instant, value: u32) {
        if let Some(cell) = self.cell(column, at) {
            *cell = value;
        }
    }

    pub(crate) fn total(&self, column: &str) -> u32 {
        let column = COLUMNS.iter().position(|it| *it == column);
        let value = |row: &[u32; COLUMNS.len()]| row.get(column?).copied();
        self.seconds.iter().filter_map(value).sum()
    }

    pub(crate) fn since(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.began)
    }

    pub(crate) fn event(&mut self, at: Instant, what: String) {
        self.events.push((at, what));
    }

    /// Returns what was done in the seconds before.
    pub(crate) fn before(&self, at: Instant, seconds: u64) -> String {
        let from = at.checked_sub(Duration::from_secs(seconds));
        let events = self.events.iter();
        let recent =
            events.filter(|(then, _)| Some(*then) >= from && *then <= at + Duration::from_secs(1));
        let mut text = String::new();
        for (then, what) in recent {
            let then = self.since(*then).as_secs_f64();
            text += &format!("\n    {then:9.3}  {what}");
        }
        text
    }

    pub(crate) fn fault(&mut self, of: &str, from: Instant, to: Option<Instant>) {
        let faults = self.faults.entry(of.to_owned()).or_default();
        faults.push((from, to));
    }

    pub(crate) fn fault_ends(&mut self, of: &str, at: Instant) {
        let faults = self.faults.get_mut(of).into_iter().flatten();
        for (_, to) in faults {
            to.get_or_insert(at);
        }
    }

    /// Writes a table (CSV), the events and a picture.
    pub(crate) fn write(&self, directory: &Path) -> anyhow::Result<()> {
        let mut table = format!("second,{}\n", COLUMNS.join(","));
        for (second, row) in self.seconds.iter().enumerate() {
            let row = row.map(|value| value.to_string());
            writeln!(table, "{second},{}", row.join(","))?;
        }
        fs::write(directory.join("chaos.csv"), table)?;
        let mut events = String::new();
        for (at, what) in &self.events {
            writeln!(events, "{:.3} {what}", self.since(*at).as_secs_f64())?;
        }
        fs::write(directory.join("chaos.events"), events)?;
        Ok(fs::write(directory.join("chaos.svg"), self.draw()?)?)
    }

    fn draw(&self) -> anyhow::Result<String> {
        let end = u32::try_from(self.seconds.len()).map_or(1.0, f64::from);
        let panel = |title, names: std::ops::Range<usize>| {
            let lines = names.filter_map(|index| Some((*COLUMNS.get(index)?, self.line(index))));
            let lines = lines.collect();
            (
                1.0,
                Panel {
                    title,
                    axis: ("s", end),
                    lines,
                },
            )
        };
        let rows = [
            [panel("Pods by state", 0..3)],
            [panel("Connections per second", 3..6)],
            [panel("Long connections lost, and violations", 6..8)],
        ];
        let at = |at: Instant| self.since(at).as_secs_f64();
        let span = |(from, to): &(Instant, Option<Instant>)| (at(*from), to.map_or(end, at));
        let lanes = self.faults.iter();
        let lanes: Vec<_> = lanes
            .map(|(of, spans)| (of.as_str(), spans.iter().map(span).collect()))
            .collect();
        Ok(picture(&rows.each_ref().map(|row| &row[..]), &lanes)?)
    }

    fn line(&self, column: usize) -> Pairs {
        let rows = self.seconds.iter().zip(0_u32..);
        let point = |(row, second): (&[u32; COLUMNS.len()], u32)| {
            Some((f64::from(second), f64::from(*row.get(column)?)))
        };
        rows.filter_map(point).collect()
    }
}
