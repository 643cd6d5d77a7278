//! The model test: random schedules of calls, sessions, responses, faults, restarts and time, against ztunnels that
//! behave like stock ztunnel.
//!
//! Each schedule follows from its seed, and every run plays the same schedules. `MODEL_FIRST` sets the first seed,
//! `MODEL_SCHEDULES` the number of schedules; `MODEL_SEED` repeats a single schedule and prints the shortest failing
//! part.

mod cost;
mod expected;
mod schedule;
mod world;
mod ztunnel;

use std::{
    env,
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
};

use schedule::Schedule;
use world::World;

/// The number of schedules without `MODEL_SCHEDULES` in the environment, which an unoptimised build plays in seconds.
const SCHEDULES: u64 = 10_000;

#[expect(
    clippy::disallowed_methods,
    reason = "these variables are for people who run the model, not settings"
)]
fn number(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    Some(text.parse().expect("a number"))
}

fn play(schedule: Schedule) -> World {
    let mut world = World::new(schedule.nature);
    schedule.ops.into_iter().for_each(|op| world.run(op));
    world.settle();
    world.check();
    world
}

fn fails(schedule: &Schedule) -> bool {
    catch_unwind(AssertUnwindSafe(|| drop(play(schedule.clone())))).is_err()
}

/// Leaves out the operations that the failure does not need.
fn shorten(mut schedule: Schedule) -> Schedule {
    for n in (0..schedule.ops.len()).rev() {
        let mut shorter = schedule.clone();
        shorter.ops.remove(n);
        if fails(&shorter) {
            schedule = shorter;
        }
    }
    schedule
}

/// Returns the seeds of failing schedules.
fn play_all(seeds: impl Iterator<Item = u64>) -> Vec<u64> {
    seeds.filter(|seed| fails(&Schedule::of(*seed))).collect()
}

#[test]
fn every_call_has_the_promised_effect_and_at_rest_every_ztunnel_serves_exactly_what_is_desired() {
    if let Some(seed) = number("MODEL_SEED") {
        let schedule = Schedule::of(seed);
        if fails(&schedule) {
            let schedule = shorten(schedule);
            println!("{schedule:#?}");
            drop(play(schedule));
        }
        return;
    }
    let schedules = number("MODEL_SCHEDULES").unwrap_or(SCHEDULES);
    let first = number("MODEL_FIRST").unwrap_or_default();
    let half = first + schedules / 2;
    let failed = thread::scope(|scope| {
        let other = scope.spawn(move || play_all(first..half));
        let mut failed = play_all(half..first + schedules);
        failed.extend(other.join().unwrap());
        failed
    });
    assert!(
        failed.is_empty(),
        "{} of {schedules} schedules failed; run with MODEL_SEED={}",
        failed.len(),
        failed[0]
    );
}

/// A model without events would pass whatever the broker did.
#[test]
fn the_schedules_reach_what_they_are_for() {
    let mut reached = world::Reached::default();
    for seed in 0..4_000 {
        reached += play(Schedule::of(seed)).reached;
    }
    let all = [
        reached.snapshots,
        reached.keeps,
        reached.refusals,
        reached.served,
        reached.unserved,
        reached.superseded,
        reached.restarts,
        reached.quarantines,
        reached.stopped_by_snapshot,
    ];
    assert!(all.iter().all(|count| *count > 100), "{reached:?}");
}
