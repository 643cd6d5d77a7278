//! Measures adds, snapshots and sets of one or several brokers, beside few and many workloads.

mod peers;
mod subject;

use std::{path::Path, time::Duration};

use anyhow::Context as _;
use tokio::runtime::Runtime;

use crate::{
    compare::{milliseconds, quantile},
    print_line,
};

pub(crate) use peers::{ZTUNNEL, ztunnel};
use subject::Subject;

const SIZES: [u64; 4] = [100, 250, 1_000, 4_000];

/// The messages to ztunnel for one workload that is added and removed.
const MESSAGES: u32 = 2;

/// A broker with its measurements; samples are in milliseconds.
struct Side<'a> {
    name: &'a str,
    broker: Subject,
    add: Vec<f64>,
    live: Duration,
    snapshot: Duration,
    set: Vec<f64>,
}

/// Measures the broker of each side, given as NAME=DIRECTORY.
pub(crate) fn broker(samples: usize, sides: &[String]) -> anyhow::Result<()> {
    let runtime = Runtime::new()?;
    let _inside = runtime.enter();
    print_line(
        "\n### The broker\n\n| workloads | broker | AddWorkload, ms: median | p99 | processor time of a live message, us | of a message in a snapshot, us | SetWorkloads again, ms | resident, MiB |\n|---|---|---|---|---|---|---|---|",
    )?;
    for size in SIZES {
        runtime.block_on(measure(samples, size, sides))?;
    }
    Ok(())
}

/// Measures all sides in alternation, and prints a row for each.
async fn measure(samples: usize, size: u64, sides: &[String]) -> anyhow::Result<()> {
    let mut all = Vec::new();
    for side in sides {
        let (name, programs) = side.split_once('=').context("a side is NAME=DIRECTORY")?;
        all.push(Side {
            name,
            broker: Subject::with(size, &Path::new(programs).join("ztunnel-broker")).await?,
            add: Vec::new(),
            live: Duration::ZERO,
            snapshot: Duration::ZERO,
            set: Vec::new(),
        });
    }
    for _ in 0..samples {
        for side in &mut all {
            let before = side.broker.processor_time()?;
            side.add
                .push(milliseconds(side.broker.add_and_remove().await?));
            side.live += side.broker.processor_time()? - before;
        }
    }
    let snapshots = samples.min(20);
    for _ in 0..snapshots {
        for side in &mut all {
            let before = side.broker.processor_time()?;
            side.broker.snapshot().await?;
            side.snapshot += side.broker.processor_time()? - before;
            side.set.push(milliseconds(side.broker.set_again().await?));
        }
    }
    let (samples, snapshots) = (u32::try_from(samples)?, u32::try_from(snapshots)?);
    for side in all {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let live = micros(side.live / samples / MESSAGES);
        let in_snapshot = micros(side.snapshot / snapshots / u32::try_from(size)?);
        print_line(&format!(
            "| {size} | {} | {:.2} | {:.2} | {live:.0} | {in_snapshot:.0} | {:.1} | {:.1} |",
            side.name,
            quantile(&side.add, 0.5),
            quantile(&side.add, 0.99),
            quantile(&side.set, 0.5),
            side.broker.resident_mib()?
        ))?;
    }
    Ok(())
}
