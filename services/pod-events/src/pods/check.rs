//! Explores what can happen to one pod: every order of a few events, and for each step success, failure, a lost answer
//! and cancellation. From each reachable state, the core also runs undisturbed until it rests, and has to reach the
//! desired state.
//!
//! The fakes are simpler than those of the model: a call is one change of `Netns`, and time passes only when the core
//! rests or in an event.

mod mutants;
mod node;

use std::{
    collections::{HashMap, HashSet},
    time::Instant,
};

use super::{
    next::{World, next},
    state::{Add, Fact, Plan, Pod, Problem, Run, Step},
};
use crate::boottime::BootInstant;
use node::{Event, Move, Node, Start};

type Outcome = Result<Fact, Problem>;

/// The functions of the core that are explored. A mutant replaces one of them.
#[derive(Clone, Copy)]
struct Core {
    next: fn(&Pod, &World) -> Step,
    learn: fn(&mut Pod, &Plan, Outcome, BootInstant, Option<&Run>),
    delete: fn(&mut Pod, u64, BootInstant),
    expect: fn(&mut Pod, u64, Add),
}

const CORE: Core = Core {
    next,
    learn: Pod::learn,
    delete: Pod::delete,
    expect: Pod::expect,
};

/// The number of calls and writes that may fail.
const FAULTS: u8 = 1;

/// A limit above the number of states of every check.
const MAX_STATES: usize = 200_000;

/// A reached state, with the move that led to it and the index of the state before.
struct State {
    node: Node,
    before: usize,
    moved: Option<Move>,
}

#[derive(Default)]
struct Explored {
    states: Vec<State>,
    /// The largest number of steps between two rests.
    longest: usize,
    violation: Option<String>,
}

impl Explored {
    fn end(mut self, last: State, violation: &str) -> Self {
        self.states.push(last);
        self.violation = Some(self.describe(violation));
        self
    }

    /// Describes the moves that lead to the last state.
    fn describe(&self, violation: &str) -> String {
        let mut moves = Vec::new();
        let mut last = self.states.len() - 1;
        while last != 0 {
            let state = &self.states[last];
            moves.extend(state.moved.map(|moved| format!("\n  {moved:?}")));
            last = state.before;
        }
        moves.reverse();
        let node = &self.states[self.states.len() - 1].node;
        format!("{violation}, after{}\n{node:?}", moves.concat())
    }
}

/// Explores breadth first, so that a violation is reported with the fewest moves.
fn explore(start: Start, events: u8, among: &[Event], core: Core) -> Explored {
    let first = Node::new(start, events);
    let mut known = HashSet::from([first.clone()]);
    let mut settled = HashMap::new();
    let mut explored = Explored::default();
    explored.states.push(State {
        node: first,
        before: 0,
        moved: None,
    });
    for before in 0.. {
        let Some(state) = explored.states.get(before) else {
            break;
        };
        let node = state.node.clone();
        for (moved, mut after) in node.successors(among, &core) {
            after.normalize();
            if known.contains(&after) {
                continue;
            }
            let violation = after.violation.take();
            known.insert(after.clone());
            let state = State {
                node: after,
                before,
                moved: Some(moved),
            };
            if let Some(violation) = violation {
                return explored.end(state, &violation);
            }
            explored.states.push(state);
        }
        match node.settle(&core, &mut settled) {
            Ok(steps) => explored.longest = explored.longest.max(steps),
            Err(violation) => {
                let last = State {
                    node,
                    before,
                    moved: None,
                };
                return explored.end(last, &violation);
            }
        }
        if explored.states.len() > MAX_STATES {
            panic!("{}", explored.describe("there are too many states"));
        }
    }
    explored
}

fn check(start: Start, events: u8, among: &[Event]) {
    let began = Instant::now();
    let explored = explore(start, events, among, CORE);
    println!(
        "{start:?}, {events} events: {} states, at most {} steps without a rest, {:?}",
        explored.states.len(),
        explored.longest,
        began.elapsed()
    );
    assert!(
        explored.violation.is_none(),
        "{}",
        explored.violation.unwrap_or_default()
    );
}

#[test]
fn new_pod_reaches_desired_state_after_events_and_failures() {
    check(Start::Empty, 2, Event::ALL);
}

#[test]
fn enrolled_pod_reaches_desired_state_after_events_and_failures() {
    check(Start::Enrolled, 2, Event::ALL);
}

#[test]
fn sidecar_pod_reaches_desired_state_after_events_and_failures() {
    check(Start::Sidecar, 2, Event::ALL);
}

#[test]
fn pod_without_an_add_reaches_desired_state_after_failures() {
    check(Start::Missed, 1, Event::ALL);
}

/// Some defects take three events. Every three of all events would take hours.
#[test]
fn pod_reaches_desired_state_after_three_related_events() {
    let rows: [(Start, &[Event]); 4] = [
        (
            Start::Enrolled,
            &[Event::Label, Event::Delete, Event::End, Event::Crash],
        ),
        (
            Start::Enrolled,
            &[Event::RepeatAdd, Event::Delete, Event::Vanish],
        ),
        (
            Start::Enrolled,
            &[Event::Drift, Event::Contest, Event::Settings, Event::Deafen],
        ),
        (
            Start::Sidecar,
            &[Event::Uninstall, Event::Stay, Event::End, Event::Delete],
        ),
    ];
    for (start, among) in rows {
        check(start, 3, among);
    }
}

#[test]
fn pod_with_foreign_rules_is_served_after_events_and_failures() {
    check(Start::Legacy, 1, Event::ALL);
    let among = &[
        Event::Delete,
        Event::End,
        Event::Label,
        Event::NetconfigRestarts,
        Event::BrokerRestarts,
        Event::HandOver,
    ];
    check(Start::Legacy, 2, among);
}

#[test]
fn adopted_pod_reaches_desired_state_after_events_and_failures() {
    check(Start::Adopted, 1, Event::ALL);
    let among = &[
        Event::Label,
        Event::Vanish,
        Event::NetconfigRestarts,
        Event::Crash,
    ];
    check(Start::Adopted, 2, among);
}
