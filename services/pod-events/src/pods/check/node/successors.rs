//! The moves that a node may make next.

use super::{Event, Flight, Move, Node, Outcome};
use crate::{
    pods::{
        check::Core,
        state::{Act, Fact, Plan, Step},
    },
    tasks::NetnsState,
};

impl Node {
    /// Returns every state that may follow, with the move that leads to it.
    pub(in super::super) fn successors(&self, among: &[Event], core: &Core) -> Vec<(Move, Self)> {
        let mut moves = match &self.flight {
            Some(flight) => self.moves_in_flight(flight, core),
            None => self.first_moves(core),
        };
        moves.extend(self.goals().into_iter().map(Move::Decide));
        if self.awaits_announcement() {
            moves.push(Move::Announce);
        }
        if self.events > 0 {
            let events = among.iter().filter(|event| self.can_happen(**event));
            moves.extend(events.copied().map(Move::Event));
        }
        let successors = moves.into_iter().map(|moved| {
            let mut after = self.clone();
            after.make(moved, core);
            after.check_moment();
            (moved, after)
        });
        successors.collect()
    }

    pub(super) fn make(&mut self, moved: Move, core: &Core) {
        match moved {
            Move::Start(step, outcome) => self.start(step, outcome, core),
            Move::Call(call, outcome) => self.make_call(call, outcome, core),
            Move::Finish(fact) => self.finish(fact, core),
            Move::Cancel(call, outcome) => self.cancel(call, outcome, core),
            Move::Decide(goal) => self.decide(goal),
            Move::Announce => self.is_announced = true,
            Move::Event(event) => {
                self.events -= 1;
                self.happen(event, core);
            }
        }
    }

    /// Returns the move of the step in flight if nothing fails.
    pub(super) fn next_in_flight(&self, flight: &Flight) -> Move {
        match flight.next_call() {
            Some(call) => Move::Call(call, Outcome::Done),
            None => Move::Finish(self.fact(&flight.plan)),
        }
    }

    fn moves_in_flight(&self, flight: &Flight, core: &Core) -> Vec<Move> {
        let failures = [Outcome::Refused, Outcome::Lost];
        let mut moves = vec![self.next_in_flight(flight)];
        if let Some(call) = flight.next_call()
            && self.faults > 0
        {
            moves.extend(failures.map(|outcome| Move::Call(call, outcome)));
        }
        let is_next = self.step(core) == Step::Take(flight.plan.number, flight.plan.act);
        if !is_next && !matches!(flight.plan.act, Act::Look | Act::CountFlows) {
            moves.extend(failures.map(|outcome| Move::Cancel(flight.next_call(), outcome)));
        }
        moves
    }

    fn first_moves(&self, core: &Core) -> Vec<Move> {
        let step = self.step(core);
        if step == Step::Rest(None) && self.next_deadline().is_none() {
            return Vec::new();
        }
        let mut moves = vec![Move::Start(step, Outcome::Done)];
        if self.faults > 0 && is_write(step) {
            moves.push(Move::Start(step, Outcome::Refused));
        }
        moves
    }

    /// Returns the core's next step.
    pub(super) fn step(&self, core: &Core) -> Step {
        let mut pod = self.pod.clone();
        let world = self.world();
        pod.note_missing(world.is_searched, self.now);
        (core.next)(&pod, &world)
    }

    fn fact(&self, plan: &Plan) -> Fact {
        let netns = self.netns_of(plan.number);
        let is_running = netns.is_some_and(|it| it.is_running);
        let is_deaf = netns.is_some_and(|it| !it.has_listeners);
        if plan.act == Act::Look && is_running {
            Fact::Looked(NetnsState::InUse)
        } else if plan.act == Act::Look {
            Fact::Looked(NetnsState::Gone)
        } else if plan.act == Act::CountFlows {
            Fact::Counted(0)
        } else if plan.act == Act::CheckListeners && is_deaf {
            Fact::Deaf
        } else if plan.act != Act::Locate {
            Fact::Done
        } else if self.netns.iter().any(|it| it.is_unfound()) {
            Fact::Found {
                number: self.next_number,
                is_adopted: true,
                proxy: self.proxy,
            }
        } else {
            Fact::Ended
        }
    }
}

/// Returns whether the step is a write or a search that may fail. Giving up an ADD counts even if it is not checkpointed.
fn is_write(step: Step) -> bool {
    match step {
        Step::Rest(_) => false,
        Step::Find => true,
        Step::Take(_, act) => matches!(
            act,
            Act::Permit | Act::Identify | Act::Begin | Act::Announce | Act::Leave | Act::Reject
        ),
    }
}
