//! Line charts in SVG.

use std::fmt::{self, Write as _};

use integration::SERVICES;

use super::{Series, points};
use crate::compare::number;

const COLOURS: [&str; SERVICES.len()] = ["#1f77b4", "#2ca02c", "#d62728"];

/// Of the picture; charts at rest have two thirds of the width.
const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 240.0;
const MARGIN: f64 = 50.0;
const SHARES: [f64; 2] = [0.65, 0.35];

pub(super) struct Panel<'a> {
    title: &'a str,
    /// What the horizontal axis counts, and where it ends.
    axis: (&'a str, f64),
    series: &'a Series,
}

impl<'a> Panel<'a> {
    pub(super) const fn new(title: &'a str, axis: (&'a str, f64), series: &'a Series) -> Self {
        Self {
            title,
            axis,
            series,
        }
    }

    fn highest(&self) -> f64 {
        let values = self.series.iter().flat_map(|(_, values)| values);
        values.copied().fold(f64::MIN_POSITIVE, f64::max)
    }

    /// Draws a chart whose upper left corner is at (x, y).
    fn draw(&self, svg: &mut String, (x, y): (f64, f64), width: f64) -> fmt::Result {
        let (left, top) = (x + MARGIN, y + MARGIN / 2.0);
        let (width, height) = (width - MARGIN * 1.5, HEIGHT - MARGIN);
        let (right, bottom) = (left + width, top + height);
        let (unit, end) = self.axis;
        let highest = self.highest();
        writeln!(
            svg,
            "<path d='M{left} {top}V{bottom}H{right}' fill='none' stroke='#888'/>\n\
             <text x='{left}' y='{}'>{}</text>\n\
             <text x='{}' y='{}' text-anchor='end'>{}</text>\n\
             <text x='{}' y='{bottom}' text-anchor='end'>0</text>\n\
             <text x='{right}' y='{}' text-anchor='end'>{end:.0} {unit}</text>",
            top - 8.0,
            self.title,
            left - 4.0,
            top + 10.0,
            number(highest),
            left - 4.0,
            bottom + 16.0,
        )?;
        for (index, colour) in COLOURS.iter().enumerate() {
            write!(svg, "<polyline fill='none' stroke='{colour}' points='")?;
            for (at, value) in points(self.series, index) {
                let (at, value) = (at / end * width, value / highest * height);
                write!(svg, "{:.1},{:.1} ", left + at, bottom - value)?;
            }
            writeln!(svg, "'/>")?;
        }
        Ok(())
    }
}

/// Draws two charts in each row.
pub(super) fn picture(panels: &[Panel<'_>]) -> Result<String, fmt::Error> {
    let mut svg = String::new();
    let rows = panels.chunks(SHARES.len());
    let mut y = MARGIN / 2.0;
    writeln!(
        svg,
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {}' font-family='sans-serif' font-size='12'>\n\
         <rect width='100%' height='100%' fill='white'/>",
        y + HEIGHT * 2.0
    )?;
    let mut x = MARGIN;
    for (service, colour) in SERVICES.iter().zip(COLOURS) {
        writeln!(svg, "<text x='{x}' y='16' fill='{colour}'>{service}</text>")?;
        x += 2.0 * MARGIN;
    }
    for row in rows {
        let mut x = 0.0;
        for (panel, share) in row.iter().zip(SHARES) {
            panel.draw(&mut svg, (x, y), share * WIDTH)?;
            x += share * WIDTH;
        }
        y += HEIGHT;
    }
    writeln!(svg, "</svg>")?;
    Ok(svg)
}
