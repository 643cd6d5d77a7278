//! The start of a step, and the steps that the core must not start.

use std::time::Duration;

use super::{Flight, Node, Outcome, world::PROPAGATION};
use crate::{
    boottime::BootInstant,
    pods::{
        check::Core,
        next::{Wanted, plan},
        state::{Act, Fact, Goal, Phase, Plan, Problem, Sandbox, Step},
    },
};

impl Node {
    pub(super) fn start(&mut self, step: Step, outcome: Outcome, core: &Core) {
        let is_searched = self.world().is_searched;
        self.pod.note_missing(is_searched, self.now);
        match step {
            Step::Rest(until) => self.rest(until),
            Step::Find if outcome == Outcome::Refused => {
                self.faults -= 1;
                self.pod.miss(self.now);
            }
            Step::Find => self.find(),
            Step::Take(number, Act::Answer) => self.answer(number, core),
            Step::Take(number, act) => self.take(number, act, outcome, core),
        }
    }

    /// Lets time pass until the core may decide otherwise.
    fn rest(&mut self, until: Option<BootInstant>) {
        if let Some((deadline, number)) = self.next_deadline()
            && until.is_none_or(|until| until > deadline)
        {
            self.violate(format!(
                "the core rests beyond a deadline of sandbox {number}'s ADD"
            ));
        }
        let late = self.adds().find(|(_, add)| self.now >= add.deadline);
        if let Some((number, _)) = late {
            self.violate(format!(
                "the core rests although sandbox {number}'s ADD is overdue"
            ));
        }
        let until = self.next_threshold().or(until);
        self.now = self.now.max(until.unwrap_or(self.now));
    }

    /// Finds a running sandbox that the core does not know.
    fn find(&mut self) {
        let known: Vec<u64> = self.pod.sandboxes.iter().map(|it| it.number).collect();
        let mut netns = self.netns.iter_mut().rev();
        let found = netns.find(|it| it.is_admitted && it.is_running && !known.contains(&it.number));
        if let Some(netns) = found {
            netns.number = self.next_number;
            self.pod.found(0, netns.number, false, self.proxy);
            self.next_number += 1;
        } else {
            self.pod.unfound_since = None;
        }
    }

    fn take(&mut self, number: u64, act: Act, outcome: Outcome, core: &Core) {
        let Some(mut plan) = plan(&self.pod, &self.world(), number, act) else {
            return self.violate(format!(
                "{act:?} is planned for sandbox {number}, which is unknown"
            ));
        };
        self.check_plan(&plan);
        self.pod.start(&mut plan, self.next_revision + 1);
        self.next_revision += 2;
        let flight = Flight { plan, made: 0 };
        if flight.next_call().is_some() {
            self.flight = Some(flight);
            return;
        }
        self.is_announced &= act != Act::Announce;
        if outcome != Outcome::Done {
            self.faults -= 1;
            return self.learn(&flight.plan, Err(Problem::Other), core);
        }
        if act == Act::Reject
            && let Some(netns) = self.netns_of_mut(number)
        {
            // The wrong DEL may have removed the listeners.
            (netns.was_deleted, netns.is_broken) = (false, !netns.has_listeners);
        }
        self.learn(&flight.plan, Ok(Fact::Done), core);
    }

    /// Checks that a step removes nothing that is wanted, adds nothing after a refused ADD and delays nothing urgent.
    fn check_plan(&mut self, plan: &Plan) {
        let (number, act) = (plan.number, plan.act);
        let (Some(sandbox), Some(netns)) = (self.sandbox(number), self.netns_of(number)) else {
            return;
        };
        let is_last = self.pod.sandboxes.last() == Some(sandbox);
        let stays = matches!(self.wanted(), Wanted::In { .. } | Wanted::Unknown);
        let is_kept = is_last && netns.is_running && stays && sandbox.phase.is_in_mesh();
        let is_removal = matches!(
            act,
            Act::Announce | Act::Leave | Act::Drain | Act::Withdraw | Act::Detach
        ) || (act == Act::Forget && !netns.was_deleted);
        let is_addition = matches!(act, Act::Begin | Act::Claim | Act::AddWorkload | Act::Apply);
        let is_untried = |it: &Sandbox, act| !it.retries.contains_key(&act);
        let others = self.pod.sandboxes.iter().filter(|it| it.number != number);
        let deleted: Vec<_> = others.filter(|it| it.phase.is_deleting()).collect();
        let delays_delete = act == Act::AddWorkload
            && is_last
            && plan.broker.is_some()
            && !deleted.is_empty()
            && deleted.iter().all(|it| is_untried(it, Act::Forget));
        let delays_repair = act == Act::Update
            && sandbox.is_suspect
            && is_untried(sandbox, Act::Verify)
            && self.pod.repairs_from.is_none();
        // Peers of a running pod learn first that it leaves.
        let is_early = act == Act::Drain
            && self.wanted() == Wanted::Out
            && !matches!(sandbox.phase, Phase::Leaving { since } if self.now.since(since) >= PROPAGATION);
        let violations = [
            (is_early, "before its peers know that it leaves"),
            (is_kept && is_removal, "although it is wanted in the mesh"),
            (delays_delete, "while the DEL of an earlier sandbox waits"),
            (delays_repair, "while the repair of its rules waits"),
            (
                is_addition && netns.was_refused,
                "after its ADD was refused",
            ),
        ];
        if let Some((_, why)) = violations.iter().find(|(is_violated, _)| *is_violated) {
            self.violate(format!("{act:?} is planned for sandbox {number} {why}"));
        }
    }

    fn answer(&mut self, number: u64, core: &Core) {
        let add = self.sandbox(number).and_then(|it| it.add.clone());
        let plan = plan(&self.pod, &self.world(), number, Act::Answer);
        let (Some(add), Some(plan)) = (add, plan) else {
            return self.violate(format!(
                "an answer is planned for sandbox {number}, which has no ADD"
            ));
        };
        let is_current = self.current().is_some_and(|it| it.number == number);
        let is_failed = add.is_failed
            || (self.now >= add.work_deadline && add.goal != Some(Goal::Record))
            || (!is_current && add.goal.is_some());
        if let Some(sandbox) = self.pod.sandbox_mut(number)
            && let Some(add) = &mut sandbox.add
        {
            add.is_failed = is_failed;
        }
        if self.now > add.deadline + Duration::from_secs(1) {
            self.violate(format!("sandbox {number}'s ADD is answered late"));
        }
        let joins = matches!(add.goal, Some(Goal::Join(_)));
        self.check_answer(number, &add, is_failed);
        let is_undone = is_failed && plan.phase == Phase::Out;
        if let Some(netns) = self.netns_of_mut(number) {
            netns.awaits_answer = false;
            netns.is_admitted |= !is_failed;
            if is_undone {
                netns.was_refused = joins && !add.is_repeated;
            }
        }
        self.learn(&plan, Ok(Fact::Done), core);
    }
}
