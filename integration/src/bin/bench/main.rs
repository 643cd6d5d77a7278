//! Measures inpod beside what it replaces, interleaved in one run. Run it through `integration/bench/run`.

mod incumbent;
mod rules;
mod services;
mod table;
mod verbs;

use std::{
    fs,
    io::{self, Write as _},
};

use anyhow::Context as _;
use integration::guard;

fn main() -> anyhow::Result<()> {
    guard()?;
    let samples = std::env::args()
        .nth(1)
        .map_or(Ok(200), |text| text.parse())
        .context("SAMPLES is a number")?;
    let load = || fs::read_to_string("/proc/loadavg").unwrap_or_default();
    say(&format!("n = {samples}; load before: {}", load().trim()))?;
    rules::rules(samples)?;
    rules::again(samples.min(50))?;
    rules::workers(samples)?;
    rules::fuller(samples)?;
    if std::env::args().nth(2).as_deref() == Some("rules") {
        return say(&format!("\nload after: {}", load().trim()));
    }
    verbs::verbs(samples)?;
    verbs::crowd(samples)?;
    services::starts(samples.min(50))?;
    services::memory()?;
    say(&format!("\nload after: {}", load().trim()))
}

fn say(text: &str) -> anyhow::Result<()> {
    writeln!(io::stdout(), "{text}").context("nobody listens")
}
