//! The model test: random schedules of CNI calls, label changes, faults, restarts, crashes and time. Registry, tasks
//! and pipeline run unchanged against services simulated in this process, under paused time.
//!
//! `cargo test -p pod-events --lib model -- --nocapture` plays 1,200 schedules, the same each time. `MODEL_FIRST` sets
//! the first seed, `MODEL_SCHEDULES` the number of schedules, and `MODEL_SECONDS` a duration instead:
//! `integration/test --full` plays fresh schedules for a minute. `MODEL_SEED` runs a single schedule and prints its
//! events. For a failing schedule, the test prints the seed and the schedule reduced to the needed operations.
//!
//! With `--config 'profile.test.package.pod-events.opt-level=1'` three times as many schedules are played in the same
//! time, but building the tests takes two minutes more, so the setting is for the full run.

mod api_server;
mod cases;
mod life;
mod node;
mod oracle;
mod schedule;
mod services;

use std::{
    collections::BTreeMap,
    env, iter,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::tasks::shadow;
use life::{Reached, play};
use schedule::{Op, schedule};

const SECONDS: u64 = 60;

/// The seed and number of schedules played without any of the variables: about a quarter of a minute's work of one
/// processor.
const USUAL_FIRST: u64 = 5_000_000;
const USUAL_SCHEDULES: u64 = 1_200;

/// A run of at least this many schedules meets every state.
const MIN_FOR_EVERY_STATE: u64 = 5_000;

/// The minimum of schedules for a valid test in [`SECONDS`]. Two busy processors play ten times as many.
const MIN_SCHEDULES: u64 = 1_000;

const THREADS: u64 = 2;

/// The same defect fails many schedules.
const MAX_FAILED: usize = 50;

const MAX_DESCRIBED: usize = 3;

/// Limits the time in which one failing schedule is reduced.
const REDUCTION_TIME: Duration = Duration::from_secs(20);

/// The number of runs of a schedule: tokio picks among several ready branches at random, so a schedule may fail in some
/// runs only.
const RUNS: u64 = 4;

#[expect(
    clippy::disallowed_methods,
    reason = "these variables are for people who run the model, not settings"
)]
fn number(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    Some(text.parse().expect("a number"))
}

/// Returns a violation without its numbers, so that violations of the same defect in many schedules compare equal.
fn kind_of(violation: &str) -> String {
    violation
        .chars()
        .filter(|it| !it.is_ascii_digit())
        .collect()
}

/// Returns why a schedule fails, if any of several runs fails.
fn failure_of(ops: &[Op]) -> Option<String> {
    (0..RUNS).find_map(|_| play(ops, false).violation)
}

/// Leaves out every operation that the failure does not need, as far as there is time.
fn reduced(mut ops: Vec<Op>, kind: &str) -> Vec<Op> {
    let until = Instant::now() + REDUCTION_TIME;
    let fails = |ops: &[Op]| failure_of(ops).is_some_and(|what| kind_of(&what) == kind);
    let mut size = ops.len().div_ceil(2);
    loop {
        let mut at = 0;
        let before = ops.len();
        while at < ops.len() {
            if Instant::now() >= until {
                return ops;
            }
            let mut fewer = ops.clone();
            fewer.drain(at..ops.len().min(at + size));
            if fails(&fewer) {
                ops = fewer;
            } else {
                at += size;
            }
        }
        if size == 1 && ops.len() == before {
            return ops;
        }
        size = size.div_ceil(2).max(1);
    }
}

/// Describes a failing schedule: the needed operations and the trace of a run.
fn describe(seed: u64, first: &str) -> String {
    let ops = reduced(schedule(seed), &kind_of(first));
    let list: String = ops.iter().map(|op| format!("\n    {op:?}")).collect();
    let mut played = play(&ops, true);
    for _ in 0..RUNS * 4 {
        if played.violation.is_none() {
            played = play(&ops, true);
        }
    }
    let what = played.violation.unwrap_or_else(|| first.to_owned());
    let mut trace = played.trace;
    // Compares lines without their times, because polls are repeated for minutes.
    trace.dedup_by(|line, before| line.get(13..) == before.get(13..));
    let trace = trace.join("\n");
    format!("MODEL_SEED={seed}: {what}\n  reduced to:{list}\n{trace}\n")
}

#[derive(Default)]
struct Sum {
    played: u64,
    reached: Reached,
    failed: Vec<(u64, String)>,
}

impl Sum {
    fn add(&mut self, other: Self) {
        self.played += other.played;
        self.reached.add(&other.reached);
        self.failed.extend(other.failed);
    }
}

fn play_all(seeds: impl Iterator<Item = u64>) -> Sum {
    let mut sum = Sum::default();
    for seed in seeds {
        let played = play(&schedule(seed), false);
        sum.played += 1;
        sum.reached.add(&played.reached);
        sum.failed.extend(played.violation.map(|what| (seed, what)));
        if sum.failed.len() >= MAX_FAILED {
            break;
        }
    }
    sum
}

/// Plays the given number of schedules, or as many as there is time for.
fn play_in_threads(first: u64, schedules: Option<u64>, time: Duration) -> Sum {
    let (next, began) = (AtomicU64::new(0), Instant::now());
    let seed = || {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let goes_on = schedules.map_or_else(|| began.elapsed() < time, |all| number < all);
        goes_on.then_some(first + number)
    };
    let part = || play_all(iter::from_fn(seed));
    let sum = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(part)).collect();
        let mut sum = Sum::default();
        for thread in threads {
            sum.add(thread.join().unwrap());
        }
        sum
    });
    let took = began.elapsed();
    println!("MODEL_FIRST={first}: {} schedules in {took:?}", sum.played);
    sum
}

fn print_table(reached: &Reached) {
    let events: BTreeMap<_, ()> = reached
        .pairs
        .keys()
        .map(|(_, event)| (*event, ()))
        .collect();
    let states = life::STATES;
    println!(
        "{:20}{}",
        "",
        states.map(|state| format!("{state:>11}")).concat()
    );
    for event in events.keys() {
        let count = |state| {
            reached
                .pairs
                .get(&(state, *event))
                .copied()
                .unwrap_or_default()
        };
        let row = states.map(|state| format!("{:>11}", count(state))).concat();
        println!("{event:20}{row}");
    }
    println!(
        "{} calls, {} crashes, {} ADDs answered ambient",
        reached.calls, reached.crashes, reached.enrolled
    );
}

#[test]
fn every_pod_is_enrolled_exactly_while_it_should_be_and_nothing_is_left_over() {
    if let Some(seed) = number("MODEL_SEED") {
        let ops = schedule(seed);
        let played = play(&ops, true);
        println!(
            "{ops:#?}\n{}\n{:?}",
            played.trace.join("\n"),
            played.violation
        );
        let failure = played.violation.or_else(|| failure_of(&ops));
        assert_eq!(
            failure,
            None,
            "{}",
            describe(seed, failure.as_deref().unwrap_or_default())
        );
        return;
    }
    let seconds = number("MODEL_SECONDS");
    let usual = seconds.is_none().then_some(USUAL_SCHEDULES);
    let schedules = number("MODEL_SCHEDULES").or(usual);
    let time = Duration::from_secs(seconds.unwrap_or(SECONDS));
    let first = number("MODEL_FIRST").unwrap_or(USUAL_FIRST);
    let sum = play_in_threads(first, schedules, time);
    let played = sum.played;
    print_table(&sum.reached);
    // Only one schedule of each kind is described: the same defect fails many schedules.
    let mut kinds = BTreeMap::new();
    for (seed, what) in &sum.failed {
        let (count, _, _) = kinds.entry(kind_of(what)).or_insert((0, *seed, what));
        *count += 1;
    }
    for (count, seed, what) in kinds.values() {
        println!("{count} x MODEL_SEED={seed} {what}");
    }
    let described = kinds.values().map(|(_, seed, what)| describe(*seed, what));
    let described: Vec<_> = described.take(MAX_DESCRIBED).collect();
    assert!(
        described.is_empty(),
        "{} of {played} schedules failed\n{}",
        sum.failed.len(),
        described.join("\n")
    );
    check_differences();
    if played >= MIN_FOR_EVERY_STATE {
        let missing = states_without_event(&sum.reached, &[]);
        assert!(missing.is_empty(), "no event met {missing:?}");
    }
    let required = MIN_SCHEDULES * time.as_secs() / SECONDS;
    assert!(
        schedules.is_some() || played >= required,
        "only {played} schedules were played in {time:?}"
    );
}

/// Prints where the new core would have decided otherwise. Fails for a difference of a new kind.
fn check_differences() {
    let differences = shadow::differences();
    for (difference, count, decided) in &differences {
        println!(
            "{count:>8} {difference:?}: {}",
            decided.unwrap_or("NOT DECIDED")
        );
    }
    let is_new = differences.iter().any(|(_, _, decided)| decided.is_none());
    assert!(!is_new, "it is not decided which core is right");
}

/// Returns the states that no event has met. Leaves out `rare` states, and the states that last only a moment unless a
/// service is away.
fn states_without_event(reached: &Reached, rare: &[&str]) -> Vec<&'static str> {
    let required = life::STATES
        .iter()
        .filter(|state| !["announcing", "draining"].contains(state) && !rare.contains(state));
    let is_met = |state: &&&str| reached.pairs.keys().any(|(known, _)| known == *state);
    required.filter(|state| !is_met(state)).copied().collect()
}

/// A model without events would pass whatever pod-events does.
#[test]
fn the_schedules_reach_what_they_are_for() {
    let reached = play_all(0..600).reached;
    let missing = states_without_event(&reached, &["adopted"]);
    assert!(missing.is_empty(), "no event met these states: {missing:?}");
    assert!(
        reached.crashes > 30 && reached.enrolled > 100,
        "{reached:?}"
    );
}
