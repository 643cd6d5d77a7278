//! Clients with a constant rate in every direction. During changes, the expected listener answers every call.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use netconfig::Family;

use crate::packets::{
    checks::Check,
    probe::{Dial, Evidence, SetOnDrop, Step, Transport},
    world::{Place, World, outside, pod},
};

/// Pause between two calls of one kind.
const PAUSE: Duration = Duration::from_millis(4);

/// Calls of each kind before a change and after it.
const ROUNDS: usize = 12;

const DEADLINE: Duration = Duration::from_secs(60);

/// Returns inbound TCP, outbound TCP, and a DNS query.
fn dials(families: &[Family]) -> Vec<Dial> {
    let dials = families.iter().map(|family| {
        let (pod, outside) = (pod(*family), outside(*family));
        [
            Dial::tcp(Place::Outside, pod, 8080),
            Dial::tcp(Place::Pod, outside, 8080),
            Dial::udp(Place::Pod, outside, 53),
        ]
    });
    dials.flatten().collect()
}

pub(crate) fn wanted(checks: &[Check], dial: &Dial) -> Evidence {
    let is_it = |check: &&Check| matches!(check.steps.as_slice(), [Step { dial: found, .. }] if found == dial);
    checks.iter().find(is_it).unwrap().steps[0].wanted.clone()
}

struct Call {
    began: Instant,
    ended: Instant,
    found: Evidence,
}

type Line = (Dial, Mutex<Vec<Call>>);

/// Returns a sentence for each wrong answer before or after `act`; in between, either is allowed.
pub(crate) fn watch(
    world: &World,
    before: &[Check],
    after: &[Check],
    act: impl FnOnce(),
) -> Vec<String> {
    let stop = AtomicBool::new(false);
    let lines: Vec<_> = dials(world.families())
        .into_iter()
        .map(|dial| (dial, Mutex::default()))
        .collect();
    let (began, ended) = thread::scope(|scope| {
        let _stop = SetOnDrop(&stop);
        for (dial, calls) in &lines {
            scope.spawn(|| call(world, dial, calls, &stop));
        }
        wait_for_calls(&lines);
        let began = Instant::now();
        act();
        let ended = Instant::now();
        wait_for_calls(&lines);
        (began, ended)
    });
    let mut failures = Vec::new();
    for (dial, calls) in lines {
        let (before, after) = (wanted(before, &dial), wanted(after, &dial));
        for Call {
            began: from,
            ended: to,
            found,
        } in calls.into_inner().unwrap()
        {
            let is_before = to < began && found == before;
            let is_after = from > ended && found == after;
            // A rerouted query's reply may be in flight: UDP clients ask again.
            let is_lost =
                found == Evidence::Silence && before != after && dial.transport == Transport::Udp;
            let is_expected = found == before || found == after || is_lost;
            let is_meanwhile = to >= began && from <= ended && is_expected;
            if !(is_before || is_after || is_meanwhile) {
                let at = from.saturating_duration_since(began);
                failures.push(format!("{dial:?} {at:?} after the change began: {found}, before {before}, after {after}"));
            }
        }
    }
    failures
}

fn call(world: &World, dial: &Dial, calls: &Mutex<Vec<Call>>, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let found = dial.ask(world);
        let call = Call {
            began,
            ended: Instant::now(),
            found,
        };
        calls.lock().unwrap().push(call);
        thread::sleep(PAUSE);
    }
}

/// Waits for new calls from now on.
fn wait_for_calls(lines: &[Line]) {
    let deadline = Instant::now() + DEADLINE;
    let count = |(_, calls): &Line| calls.lock().unwrap().len();
    let least: Vec<_> = lines.iter().map(|line| count(line) + ROUNDS).collect();
    while lines
        .iter()
        .zip(&least)
        .any(|(line, least)| count(line) < *least)
    {
        assert!(Instant::now() < deadline, "the client makes no progress");
        thread::sleep(PAUSE);
    }
}
