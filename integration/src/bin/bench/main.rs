//! Compares inpod with other agents, interleaved in one run. The program is run through `integration/bench/run`.

mod broker;
mod calls;
mod compare;
mod datapath;
mod floors;
mod growth;
mod handover;
mod rest;
mod side;

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
    process::ExitCode,
    sync::Arc,
};

use anyhow::Context as _;
use floors::Floors;
use integration::{ApiServer, guard};
use side::Side;

const USAGE: &str = "\
bench SAMPLES WHAT [NAME=DIRECTORY]...

Measures inpod beside other agents. Run it through integration/bench/run, which
lists WHAT and makes the directories of programs.";

/// The number of enrolled pods that are on a node while calls are measured.
const FEW: usize = 10;

fn main() -> anyhow::Result<ExitCode> {
    let code = integration::answer(USAGE, |arguments| {
        arguments
            .first()
            .is_none_or(|first| !first.starts_with('-'))
    });
    match code {
        Some(code) => Ok(code),
        None => run().map(|()| ExitCode::SUCCESS),
    }
}

fn run() -> anyhow::Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    if let [broker::ZTUNNEL, socket] = arguments.iter().map(String::as_str).collect::<Vec<_>>()[..]
    {
        return broker::ztunnel(socket.as_ref());
    }
    guard()?;
    let [samples, what, sides @ ..] = &arguments[..] else {
        anyhow::bail!("{USAGE}")
    };
    let samples = samples.parse().context("SAMPLES is a number")?;
    let load = || fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load_before = load();
    match what.as_str() {
        "broker" => broker::broker(samples, sides)?,
        "quick" => agents(samples, sides, Growth::Skipped)?,
        "all" => agents(samples, sides, Growth::Measured)?,
        "datapath" => {
            let server = Arc::new(ApiServer::start()?);
            datapath::datapath(samples, &start_all(&server, sides)?)?;
        }
        "growth" => {
            let server = Arc::new(ApiServer::start()?);
            growth::calls(samples, &mut only(&server, sides)?)?;
        }
        "rest" => {
            let server = Arc::new(ApiServer::start()?);
            rest::rest(samples, &server, &mut only(&server, sides)?)?;
        }
        other => anyhow::bail!("unknown: {other}\n{USAGE}"),
    }
    print_line(&format!(
        "\nn = {samples}; load before: {}, after: {}",
        load_before.trim(),
        load().trim()
    ))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Growth {
    Measured,
    Skipped,
}

/// Starts the side of a mode that measures a single side.
fn only(server: &Arc<ApiServer>, sides: &[String]) -> anyhow::Result<Side> {
    let [side] = sides else {
        anyhow::bail!("one side is measured")
    };
    start(server, side)
}

fn start(server: &Arc<ApiServer>, side: &str) -> anyhow::Result<Side> {
    let (name, programs) = side.split_once('=').context("a side is NAME=DIRECTORY")?;
    Side::start(server, name, Path::new(programs))
}

fn start_all(server: &Arc<ApiServer>, sides: &[String]) -> anyhow::Result<Vec<Side>> {
    sides.iter().map(|side| start(server, side)).collect()
}

fn agents(samples: usize, sides: &[String], growth: Growth) -> anyhow::Result<()> {
    let server = Arc::new(ApiServer::start()?);
    let mut sides = start_all(&server, sides)?;
    let mut tables = growth::Growth::new(samples, &sides);
    if growth == Growth::Measured {
        tables.state(&sides, "no pods")?;
    }
    growth::fill(&mut sides, FEW)?;
    let mut floors = Floors::new(sides.first().context("no side")?)?;
    let beside = format!("{FEW} enrolled pods on each node");
    calls::one_at_a_time(samples, &sides, Some(&mut floors), &beside)?;
    calls::at_once(samples, &sides)?;
    if growth == Growth::Skipped {
        return Ok(());
    }
    growth::beside(samples, &sides)?;
    growth::joining(samples, &sides)?;
    tables.measure(&mut sides)
}

fn print_line(text: &str) -> anyhow::Result<()> {
    writeln!(io::stdout(), "{text}").context("nobody listens")
}
