//! The model test: random schedules of calls, sessions, responses, faults, restarts and time, against ztunnels that
//! behave like stock ztunnel.
//!
//! Each schedule follows from its seed. `MODEL_SCHEDULES` sets their number, `MODEL_SEED` runs and
//! prints a single one.

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

/// Without `MODEL_SCHEDULES` in the environment.
const SCHEDULES: u64 = 100_000;

#[expect(
    clippy::disallowed_methods,
    reason = "these variables are for people who run the model, not settings"
)]
fn number(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    Some(text.parse().expect("a number"))
}

fn play(seed: u64) -> World {
    let schedule = Schedule::of(seed);
    let mut world = World::new(schedule.nature);
    schedule.ops.into_iter().for_each(|op| world.run(op));
    world.settle();
    world.check();
    world
}

/// Runs every `step`th schedule from `first` and returns the seeds that failed.
fn play_all(first: u64, step: usize, schedules: u64) -> Vec<u64> {
    let fails = |seed: &u64| catch_unwind(AssertUnwindSafe(|| drop(play(*seed)))).is_err();
    (first..schedules).step_by(step).filter(fails).collect()
}

#[test]
fn at_rest_every_ztunnel_serves_exactly_what_is_desired_and_none_stopped_what_it_should_have_kept()
{
    if let Some(seed) = number("MODEL_SEED") {
        println!("{:#?}", Schedule::of(seed));
        drop(play(seed));
        return;
    }
    let schedules = number("MODEL_SCHEDULES").unwrap_or(SCHEDULES);
    let failed = thread::scope(|scope| {
        let other = scope.spawn(|| play_all(1, 2, schedules));
        let mut failed = play_all(0, 2, schedules);
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

/// A model in which nothing happened would pass whatever the broker did.
#[test]
fn the_schedules_reach_what_they_are_for() {
    let mut reached = world::Reached::default();
    for seed in 0..4_000 {
        reached += play(seed).reached;
    }
    let all = [
        reached.snapshots,
        reached.keeps,
        reached.refusals,
        reached.served,
        reached.unserved,
        reached.restarts,
        reached.quarantines,
        reached.stopped_by_snapshot,
    ];
    assert!(all.iter().all(|count| *count > 100), "{reached:?}");
}
