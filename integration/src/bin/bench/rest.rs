//! Measures an agent at rest on a node of a large cluster, then restarts in a row: memory and processor time of each
//! service.

use std::{
    thread,
    time::{Duration, Instant},
};

use integration::{
    ApiServer, SERVICES,
    picture::{Pairs, Panel, picture},
};
use serde_json::json;

use crate::{
    compare::{milliseconds, number},
    growth::{REST, SETTLE, execute},
    print_line,
    side::Side,
};

const NAMESPACES: usize = 10_000;
const PODS: usize = 250;
const RESTARTS: usize = 10;

/// The number of namespaces per process that creates namespaces.
const BATCH: usize = 1000;

const PICTURE: &str = "rest.svg";

/// One value for each service.
type Values = [f64; SERVICES.len()];

/// Times, or numbers of restarts, with the values that were observed then.
type Series = Vec<(f64, Values)>;

struct Reading {
    memory: Values,
    used: Values,
}

/// Measures a side whose API server serves no other agent.
pub(crate) fn rest(minutes: usize, server: &ApiServer, side: &mut Side) -> anyhow::Result<()> {
    create_namespaces(server)?;
    side.fill(PODS)?;
    thread::sleep(SETTLE);
    let (memory, processor) = at_rest(minutes, side)?;
    print_line(&format!(
        "\n### {minutes} minutes at rest: {NAMESPACES} namespaces, {PODS} enrolled pods, with the probes of the chart\n\n\
         | service | first | last | min | max | slope per hour |\n|---|---|---|---|---|---|"
    ))?;
    print_summary("anonymous memory, MiB", &memory)?;
    print_summary("processor time, ms per s", &processor)?;
    let (after, used) = restarts(side)?;
    let span = ("minutes at rest", minutes_of(&memory));
    let count = ("restarts", whole(RESTARTS));
    let rows = [
        [
            (0.65, panel("Anonymous memory, MiB", span, &memory)),
            (0.35, panel("after restarts", count, &after)),
        ],
        [
            (0.65, panel("Processor time, ms per s", span, &processor)),
            (0.35, panel("ms of each restart", count, &used)),
        ],
    ];
    let path = std::env::current_exe()?.with_file_name(PICTURE);
    std::fs::write(path, picture(&rows.each_ref().map(|row| &row[..]), &[])?)?;
    print_line(&format!(
        "\n![Memory and processor time of the services, at rest and after restarts]({PICTURE})"
    ))
}

fn create_namespaces(server: &ApiServer) -> anyhow::Result<()> {
    let objects = (0..NAMESPACES).map(|number| {
        let metadata = json!({"name": format!("rest-{number}")});
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
        ("/api/v1/namespaces".to_owned(), object)
    });
    let objects: Vec<_> = objects.collect();
    let mut batches = objects.chunks(BATCH);
    batches.try_for_each(|batch| server.create_all(batch))
}

fn read(side: &Side) -> anyhow::Result<Reading> {
    let mut reading = Reading {
        memory: Values::default(),
        used: Values::default(),
    };
    let values = reading.memory.iter_mut().zip(&mut reading.used);
    for (service, (memory, used)) in SERVICES.iter().zip(values) {
        let kib = u32::try_from(side.node.anonymous(service)?)?;
        *memory = f64::from(kib) / 1024.0;
        *used = milliseconds(side.processor_time_of(service)?);
    }
    Ok(reading)
}

/// Samples memory, and the processor time since the previous sample, twice in each round of probes.
fn at_rest(minutes: usize, side: &Side) -> anyhow::Result<(Series, Series)> {
    let (mut memory, mut processor) = (Series::new(), Series::new());
    let time = Duration::from_secs(60) * u32::try_from(minutes)?;
    let probes = side.probes(REST);
    let began = Instant::now();
    let mut last = (Duration::ZERO, read(side)?);
    memory.push((0.0, last.1.memory));
    while began.elapsed() < time {
        for half in probes.chunks(probes.len().div_ceil(2).max(1)) {
            execute(half, REST / 2)?;
            let (now, reading) = (began.elapsed(), read(side)?);
            let seconds = now.saturating_sub(last.0).as_secs_f64();
            let minute = now.as_secs_f64() / 60.0;
            memory.push((minute, reading.memory));
            let used = between(&last.1.used, &reading.used);
            processor.push((minute, used.map(|used| used / seconds)));
            last = (now, reading);
        }
    }
    Ok((memory, processor))
}

fn between(before: &Values, after: &Values) -> Values {
    std::array::from_fn(|index| {
        let value = |values: &Values| values.get(index).copied().unwrap_or_default();
        value(after) - value(before)
    })
}

/// Restarts all services one after the other; returns the memory before and after each restart, and the processor time
/// of each restart.
fn restarts(side: &Side) -> anyhow::Result<(Series, Series)> {
    let mut before = read(side)?;
    let (mut memory, mut used) = (vec![(0.0, before.memory)], Series::new());
    let names = SERVICES.join(" | ");
    let services = SERVICES.len();
    print_line(&format!(
        "\n### {RESTARTS} restarts of all services in a row: anonymous memory, MiB; processor time of the restart, ms\n\n\
         | restart | all pods verified after, ms | {names} | ms: {} |\n|---|---|{}",
        SERVICES.join(" | ms: "),
        "---|".repeat(2 * services)
    ))?;
    print_line(&format!(
        "| before | | {} |{}",
        line(&before.memory),
        " |".repeat(services)
    ))?;
    for restart in 1..=RESTARTS {
        side.stop_agent()?;
        let took = side.resume()?.map_or(f64::INFINITY, milliseconds);
        thread::sleep(SETTLE);
        let after = read(side)?;
        let spent = between(&before.used, &after.used);
        print_line(&format!(
            "| {restart} | {} | {} | {} |",
            number(took),
            line(&after.memory),
            line(&spent)
        ))?;
        memory.push((whole(restart), after.memory));
        used.push((whole(restart), spent));
        before = after;
    }
    Ok((memory, used))
}

fn line(values: &Values) -> String {
    values.map(number).join(" | ")
}

fn print_summary(what: &str, series: &Series) -> anyhow::Result<()> {
    for (index, service) in SERVICES.iter().enumerate() {
        let points = points(series, index);
        let values = || points.iter().map(|(_, value)| *value);
        let numbers = [
            values().next(),
            values().next_back(),
            values().reduce(f64::min),
            values().reduce(f64::max),
        ];
        let numbers = numbers.map(|value| number(value.unwrap_or_default()));
        print_line(&format!(
            "| {service}: {what} | {} | {:+.3} |",
            numbers.join(" | "),
            60.0 * slope(&points)
        ))?;
    }
    Ok(())
}

fn panel<'a>(title: &'a str, axis: (&'a str, f64), series: &Series) -> Panel<'a> {
    let lines = SERVICES.iter().enumerate();
    Panel {
        title,
        axis,
        lines: lines
            .map(|(index, name)| (*name, points(series, index)))
            .collect(),
    }
}

/// Returns the values of one service.
fn points(series: &Series, service: usize) -> Pairs {
    let points = series.iter();
    let points = points.filter_map(|(time, values)| Some((*time, *values.get(service)?)));
    points.collect()
}

/// Returns the slope of the least-squares line through the points.
fn slope(points: &[(f64, f64)]) -> f64 {
    let mean = |of: fn(&(f64, f64)) -> f64| {
        points.iter().map(of).sum::<f64>() / whole(points.len().max(1))
    };
    let (middle, height) = (mean(|point| point.0), mean(|point| point.1));
    let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
        let terms = points.iter().map(|(x, y)| of(x - middle, y - height));
        terms.sum()
    };
    let squares = sum(&|x, _| x * x);
    if squares > 0.0 {
        sum(&|x, y| x * y) / squares
    } else {
        0.0
    }
}

fn minutes_of(series: &Series) -> f64 {
    series.last().map_or(0.0, |(minute, _)| *minute)
}

fn whole(number: usize) -> f64 {
    u32::try_from(number).map_or(f64::INFINITY, f64::from)
}
