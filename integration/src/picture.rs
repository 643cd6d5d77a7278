//! Draws charts over time, as SVG.

use std::fmt::{self, Write as _};

const COLOURS: [&str; 4] = ["#1f77b4", "#2ca02c", "#d62728", "#9467bd"];

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 240.0;
const MARGIN: f64 = 50.0;
const LANE: f64 = 14.0;

/// The points of a line, or the beginnings and ends of the spans in a lane.
pub type Pairs = Vec<(f64, f64)>;

/// A chart with lines by name; lines with the same name have the same colour.
#[derive(Debug)]
pub struct Panel<'a> {
    pub title: &'a str,
    /// The unit and the end of the horizontal axis.
    pub axis: (&'a str, f64),
    pub lines: Vec<(&'a str, Pairs)>,
}

/// Formats a value with three significant digits.
pub fn number(value: f64) -> String {
    match value {
        large if large >= 100.0 => format!("{large:.0}"),
        middle if middle >= 10.0 => format!("{middle:.1}"),
        small => format!("{small:.2}"),
    }
}

fn coloured<T>(items: &[T]) -> impl Iterator<Item = (&T, &'static str)> {
    items.iter().zip(COLOURS.into_iter().cycle())
}

impl Panel<'_> {
    fn highest(&self) -> f64 {
        let values = self.lines.iter().flat_map(|(_, points)| points);
        values
            .map(|(_, value)| *value)
            .fold(f64::MIN_POSITIVE, f64::max)
    }

    /// Draws the chart; its upper left corner is at (x, y).
    fn draw(&self, svg: &mut String, (x, y): (f64, f64), width: f64) -> fmt::Result {
        let (left, top) = (x + MARGIN, y + MARGIN / 2.0);
        let (width, height) = (width - MARGIN * 1.5, HEIGHT - MARGIN);
        let (right, bottom) = (left + width, top + height);
        let (unit, end) = self.axis;
        let highest = self.highest();
        write!(
            svg,
            "<path d='M{left} {top}V{bottom}H{right}' fill='none' stroke='#888'/>\n\
             <text x='{left}' y='{}'>{}",
            top - 8.0,
            self.title
        )?;
        for ((name, _), colour) in coloured(&self.lines) {
            write!(svg, "<tspan dx='12' fill='{colour}'>{name}</tspan>")?;
        }
        writeln!(
            svg,
            "</text>\n\
             <text x='{}' y='{}' text-anchor='end'>{}</text>\n\
             <text x='{}' y='{bottom}' text-anchor='end'>0</text>\n\
             <text x='{right}' y='{}' text-anchor='end'>{end:.0} {unit}</text>",
            left - 4.0,
            top + 10.0,
            number(highest),
            left - 4.0,
            bottom + 16.0,
        )?;
        for ((_, points), colour) in coloured(&self.lines) {
            write!(svg, "<polyline fill='none' stroke='{colour}' points='")?;
            for (at, value) in points {
                let (at, value) = (at / end * width, value / highest * height);
                write!(svg, "{:.1},{:.1} ", left + at, bottom - value)?;
            }
            writeln!(svg, "'/>")?;
        }
        Ok(())
    }
}

/// Draws the panels of each row with their shares of the width, then the lanes, whose spans have the axis of the last
/// panel.
pub fn picture(
    rows: &[&[(f64, Panel<'_>)]],
    lanes: &[(&str, Pairs)],
) -> Result<String, fmt::Error> {
    let mut charts = String::new();
    let mut y = 0.0;
    for row in rows {
        let mut x = 0.0;
        for (share, panel) in *row {
            panel.draw(&mut charts, (x, y), share * WIDTH)?;
            x += share * WIDTH;
        }
        y += HEIGHT;
    }
    let last = rows.last().and_then(|row| row.last());
    let end = last.map_or(1.0, |(_, panel)| panel.axis.1);
    let width = WIDTH - MARGIN * 1.5;
    for ((name, spans), colour) in coloured(lanes) {
        for (from, to) in spans {
            let (from, to) = (from / end * width, to / end * width);
            writeln!(
                charts,
                "<rect x='{:.1}' y='{y}' width='{:.1}' height='{}' fill='{colour}' opacity='.6'/>",
                MARGIN + from,
                (to - from).max(0.5),
                LANE - 2.0
            )?;
        }
        writeln!(
            charts,
            "<text x='{MARGIN}' y='{}' font-size='10'>{name}</text>",
            y + LANE - 4.0
        )?;
        y += LANE;
    }
    Ok(format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {}' font-family='sans-serif' font-size='12'>\n\
         <rect width='100%' height='100%' fill='white'/>\n{charts}</svg>\n",
        y + MARGIN / 2.0
    ))
}
