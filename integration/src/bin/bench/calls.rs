//! Measures calls of the plugin on nodes with the same load: single calls in turns, and many calls at once.

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use integration::{Call, Mesh};
use nix::sys::resource::{UsageWho, getrusage};

use crate::{
    compare::{Comparison, milliseconds},
    floors::Floors,
    print_line,
    side::Side,
};

/// The time within which the work ends that a call leaves behind, such as the pod's annotation.
const SETTLE: Duration = Duration::from_millis(60);

const BURST: usize = 100;

const FIRST_DEL: &str = "DEL, enrolled";

const CALLS: [&str; 4] = [
    "ADD, outside the mesh",
    "ADD, enrolled",
    FIRST_DEL,
    "DEL, outside the mesh",
];

/// Compares calls that run one at a time; `beside` describes the other load on the nodes.
pub(crate) fn one_at_a_time(
    samples: usize,
    sides: &[Side],
    floors: Option<&mut Floors>,
    beside: &str,
) -> anyhow::Result<()> {
    let names = || sides.iter().map(|side| side.name.as_str());
    let mut times = Comparison::new(
        &format!("One call at a time, {beside}: from exec to exit"),
        "ms",
        names(),
    );
    let mut usage = Comparison::new(
        &format!("One call at a time, {beside}: processor time"),
        "ms",
        names(),
    );
    let mut floors = floors;
    for sample in 0..samples {
        if let Some(floors) = &mut floors {
            floors.measure(sides.first().context("a side")?)?;
        }
        for index in (0..sides.len()).map(|index| (index + sample) % sides.len()) {
            let side = sides.get(index).context("a side")?;
            round(side, index, &mut times, &mut usage, None)?;
        }
    }
    if let Some(floors) = floors {
        for (what, floor) in CALLS.iter().zip(floors.sums()) {
            times.set_floor(what, floor);
        }
        floors.print()?;
    }
    times.print()?;
    usage.print()
}

/// Makes each call once and records the times in a column. Reading the counters has a side effect: netconfig is awake
/// before the call.
pub(crate) fn round(
    side: &Side,
    column: usize,
    times: &mut Comparison,
    usage: &mut Comparison,
    mut counts: Option<&mut Comparison>,
) -> anyhow::Result<()> {
    let pods = side.sandboxes(&[Mesh::Outside, Mesh::Inside])?;
    let [outside, inside] = &pods[..] else {
        anyhow::bail!("two pods")
    };
    thread::sleep(SETTLE);
    let calls = [
        side.call(Call::add, outside)?,
        side.call(Call::add, inside)?,
        side.call(Call::del, inside)?,
        side.call(Call::del, outside)?,
    ];
    for (what, call) in CALLS.iter().zip(calls) {
        if *what == FIRST_DEL {
            side.terminate(&[outside, inside])?;
            thread::sleep(SETTLE);
        }
        let counted = counts.is_some().then(|| side.counts()).transpose()?;
        let before = (side.processor_time()?, children()?);
        let outcome = call.succeed()?;
        let plugin = children()?.saturating_sub(before.1);
        thread::sleep(SETTLE);
        let agent = side.processor_time()?.saturating_sub(before.0);
        times.record(what, column, milliseconds(outcome.took));
        usage.record(&format!("{what}: plugin"), column, milliseconds(plugin));
        usage.record(&format!("{what}: agent"), column, milliseconds(agent));
        if let (Some(counts), Some(before)) = (&mut counts, counted) {
            for ((name, after), (_, before)) in side.counts()?.into_iter().zip(before) {
                // No call causes these two kinds of work, so a single row is enough.
                let never = ["process_walks", "conntrack_dumps"].contains(&name);
                let what = if never { "any call" } else { *what };
                counts.record(&format!("{what}: {name}"), column, after - before);
            }
        }
    }
    side.forget(&[outside, inside])
}

/// Returns the processor time of all children that have ended.
fn children() -> anyhow::Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let time = [usage.user_time(), usage.system_time()].map(|time| {
        let micros = time.tv_sec() * 1_000_000 + time.tv_usec();
        u64::try_from(micros).map(Duration::from_micros)
    });
    Ok(time.into_iter().sum::<Result<_, _>>()?)
}

/// Returns the number of rounds for a measurement that takes as long as many calls.
pub(crate) fn rounds(samples: usize) -> usize {
    samples.div_ceil(20).max(3)
}

/// Compares many ADDs of enrolled pods that start at the same time.
pub(crate) fn at_once(samples: usize, sides: &[Side]) -> anyhow::Result<()> {
    let names = sides.iter().map(|side| side.name.as_str());
    let mut table = Comparison::new(
        &format!("{BURST} ADDs of enrolled pods at once"),
        "ms",
        names,
    );
    let mut failed: BTreeMap<&str, usize> = BTreeMap::new();
    for _ in 0..rounds(samples) {
        for (index, side) in sides.iter().enumerate() {
            let pods = side.sandboxes(&[Mesh::Inside; BURST])?;
            thread::sleep(SETTLE * 4);
            let calls = pods.iter().map(|pod| side.call(Call::add, pod));
            let calls = calls.collect::<Result<Vec<_>, _>>()?;
            let before = side.processor_time()? + children()?;
            let began = Instant::now();
            let running = calls.iter().map(|call| call.start());
            let running = running.collect::<Result<Vec<_>, _>>()?;
            for plugin in running {
                if plugin.wait()?.code != 0 {
                    *failed.entry(&side.name).or_default() += 1;
                }
            }
            table.record("until all are done", index, milliseconds(began.elapsed()));
            thread::sleep(SETTLE * 4);
            let used = (side.processor_time()? + children()?).saturating_sub(before);
            let each = milliseconds(used) / 100.0;
            table.record("processor time of each, plugin and agent", index, each);
            side.end(&pods.iter().collect::<Vec<_>>())?;
        }
    }
    table.print()?;
    failed.iter().try_for_each(|(name, count)| {
        let all = BURST * rounds(samples);
        print_line(&format!("\n{count} of {all} ADDs failed: {name}"))
    })
}
