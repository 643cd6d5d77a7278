//! Measures adds and snapshots of the broker, and compares both with bare packets with a descriptor to the same
//! ztunnel.

mod peers;
mod subject;

use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::runtime::Runtime;

use crate::{
    print_line,
    table::{Row, table},
};

use peers::Bare;
pub(crate) use peers::{ZTUNNEL, ztunnel};
use subject::Subject;

const FEW: u64 = 10;
const MANY: u64 = 1000;

const CALLERS: u64 = 16;

pub(crate) fn broker(samples: usize) -> anyhow::Result<()> {
    let runtime = Runtime::new()?;
    let _inside = runtime.enter();
    let mut bare = runtime.block_on(Bare::connect())?;
    let mut few = runtime.block_on(Subject::with(FEW))?;
    let mut many = runtime.block_on(Subject::with(MANY))?;
    runtime.block_on(adds(samples, &mut bare, &mut few, &mut many))?;
    runtime.block_on(snapshots(samples.min(20), &mut bare, &mut few, &mut many))?;
    runtime.block_on(rate(samples, &few, &many))
}

async fn adds(
    samples: usize,
    bare: &mut Bare,
    few: &mut Subject,
    many: &mut Subject,
) -> anyhow::Result<()> {
    let mut rows = [
        Row::new("bare: a packet with a descriptor to ztunnel, its answer back"),
        Row::new("a call of the broker that changes nothing"),
        Row::new("AddWorkload, where 10 are served"),
        Row::new("AddWorkload, where 1,000 are served"),
    ];
    for _ in 0..samples {
        let times = [
            bare.round_trip().await?,
            few.call().await?,
            few.add_and_remove().await?,
            many.add_and_remove().await?,
        ];
        crate::table::record(&mut rows, times);
    }
    table("The broker: one add", &rows)
}

/// Measures the time per workload from ztunnel's hello to the end of the snapshot.
async fn snapshots(
    samples: usize,
    bare: &mut Bare,
    few: &mut Subject,
    many: &mut Subject,
) -> anyhow::Result<()> {
    let mut rows = [
        Row::new("bare: 1,000 packets, each answered before the next; per packet"),
        Row::new("a snapshot of 1,000, per workload"),
        Row::new("a snapshot of 10, per workload"),
    ];
    for _ in 0..samples {
        let started = Instant::now();
        for _ in 0..MANY {
            bare.round_trip().await?;
        }
        let each = |time: Duration, count: u64| -> anyhow::Result<Duration> {
            Ok(time / u32::try_from(count).context("a small count")?)
        };
        let times = [
            each(started.elapsed(), MANY)?,
            each(many.snapshot().await?, MANY)?,
            each(few.snapshot().await?, FEW)?,
        ];
        crate::table::record(&mut rows, times);
    }
    table("The broker: a snapshot", &rows)
}

/// Measures the rate of adds by many concurrent callers on one session.
async fn rate(samples: usize, few: &Subject, many: &Subject) -> anyhow::Result<()> {
    let count = u64::try_from(samples)?.max(CALLERS);
    for (subject, served) in [(few, FEW), (many, MANY)] {
        let took = subject.add_all(count, CALLERS).await?;
        #[expect(
            clippy::as_conversions,
            clippy::cast_precision_loss,
            reason = "a small count, for people"
        )]
        let rate = count as f64 / took.as_secs_f64();
        print_line(&format!(
            "\n{count} adds by {CALLERS} callers through one session, where {served} are served: {rate:.0} a second"
        ))?;
    }
    Ok(())
}
