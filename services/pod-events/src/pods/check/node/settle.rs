//! The run of a node without further events and faults, until it rests.

use std::collections::{HashMap, HashSet};

use super::{Move, Node, Outcome};
use crate::pods::{check::Core, state::Step};

/// Limits above the number of steps between two rests, and of moves until the last rest.
const MAX_STEPS: usize = 20;
const MAX_MOVES: usize = 1_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Began,
    Continued,
    Rested,
}

impl Node {
    /// Runs the node without further events and faults until nothing is left to do or everything repeats. Returns the
    /// number of steps until the first rest. `settled` has the nodes that are known to reach the desired state.
    pub(in super::super) fn settle(
        &self,
        core: &Core,
        settled: &mut HashMap<Self, usize>,
    ) -> Result<usize, String> {
        let mut node = self.clone();
        (node.faults, node.events) = (0, 0);
        (node.is_netconfig_up, node.is_broker_up) = (true, true);
        let mut path = Vec::new();
        let mut on_path = HashSet::new();
        let mut steps = loop {
            node.normalize();
            if let Some(steps) = settled.get(&node) {
                break *steps;
            }
            let before = node.clone();
            // Only looks at an idle netns repeat for ever.
            let is_repeated = !on_path.insert(node.clone());
            let progress = node.progress(core).filter(|_| !is_repeated);
            let Some(progress) = progress else {
                before.check_end()?;
                break 0;
            };
            path.push((before, progress));
            node.check_moment();
            if let Some(violation) = node.violation.take() {
                return Err(format!("without further events, {violation}"));
            }
            if path.len() > MAX_MOVES {
                return Err("the core never comes to rest".to_owned());
            }
        };
        for (node, progress) in path.into_iter().rev() {
            steps = match progress {
                Progress::Began => steps + 1,
                Progress::Continued => steps,
                Progress::Rested => 0,
            };
            if steps > MAX_STEPS {
                return Err(format!(
                    "the core takes more than {MAX_STEPS} steps without a rest"
                ));
            }
            settled.insert(node, steps);
        }
        Ok(steps)
    }

    /// Makes the next move. Returns `None` if nothing is left to do.
    fn progress(&mut self, core: &Core) -> Option<Progress> {
        let goal = self.goals().first().copied();
        let (moved, progress) = match (&self.flight, goal) {
            (Some(flight), _) => (self.next_in_flight(flight), Progress::Continued),
            (None, Some(goal)) => (Move::Decide(goal), Progress::Continued),
            (None, None) => match self.step(core) {
                Step::Rest(_) if self.awaits_announcement() => (Move::Announce, Progress::Rested),
                Step::Rest(None) => return None,
                rest @ Step::Rest(Some(_)) => (Move::Start(rest, Outcome::Done), Progress::Rested),
                step @ (Step::Find | Step::Take(..)) => {
                    (Move::Start(step, Outcome::Done), Progress::Began)
                }
            },
        };
        self.make(moved, core);
        Some(progress)
    }
}
