//! The calls of the step in flight, and their effects at the services.

use super::{Core, Flight, Netns, Node, Outcome, Rules};
use crate::pods::{
    check,
    next::Ending,
    state::{Act, Fact, Phase, Plan, Problem, Proxy},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Call {
    Claim,
    AddWorkload,
    Apply,
    Drain,
    RemoveRules,
    RemoveWorkload,
    Release,
    Look,
    Search,
}

impl Call {
    /// Returns whether the call succeeds without a netns.
    fn needs_no_netns(self) -> bool {
        matches!(
            self,
            Self::RemoveWorkload | Self::RemoveRules | Self::Release | Self::Search
        )
    }
}

/// Returns the calls of a step, in order.
pub(super) fn calls(plan: &Plan) -> &'static [Call] {
    let is_sidecar = plan.proxy == Proxy::Sidecar;
    match plan.act {
        Act::Claim => &[Call::Claim],
        Act::AddWorkload => &[Call::AddWorkload],
        Act::Apply | Act::Verify | Act::Update => &[Call::Apply],
        Act::Drain => &[Call::Drain],
        // A sidecar's rules stay unless its enrollment never ended.
        Act::Withdraw if is_sidecar && plan.phase != Phase::Enrolling => &[Call::Release],
        Act::Withdraw if is_sidecar => &[Call::RemoveRules, Call::Release],
        Act::Withdraw => &[Call::RemoveRules, Call::RemoveWorkload, Call::Release],
        Act::Forget if is_sidecar => &[Call::Release],
        Act::Forget => &[Call::RemoveWorkload, Call::Release],
        Act::Detach => &[Call::Release],
        Act::Readd => &[Call::RemoveWorkload, Call::AddWorkload],
        Act::Look | Act::CountFlows | Act::CheckListeners => &[Call::Look],
        Act::Locate => &[Call::Search],
        Act::Permit
        | Act::Identify
        | Act::Begin
        | Act::Announce
        | Act::Leave
        | Act::Reject
        | Act::GiveUp
        | Act::Answer => &[],
    }
}

impl Flight {
    pub(super) fn next_call(&self) -> Option<Call> {
        calls(&self.plan).get(self.made).copied()
    }
}

impl Node {
    /// Makes a call of the step in flight.
    pub(super) fn make_call(&mut self, call: Call, outcome: Outcome, core: &Core) {
        let mut result = Err(Problem::Other);
        if outcome != Outcome::Refused {
            result = self.perform(call);
        }
        if outcome != Outcome::Done {
            self.faults -= 1;
            result = result.and(Err(Problem::Other));
        }
        match (result, &mut self.flight) {
            (Ok(()), Some(flight)) => flight.made += 1,
            (Ok(()), None) => {}
            (Err(problem), _) => self.end_flight(Err(problem), core),
        }
    }

    /// Cancels the step in flight. The call that it waits for may still have its effect.
    pub(super) fn cancel(&mut self, call: Option<Call>, outcome: Outcome, core: &Core) {
        if outcome == Outcome::Lost
            && let Some(call) = call
        {
            let _answer = self.perform(call);
        }
        self.end_flight(Err(Problem::Transient), core);
    }

    /// Finishes the step in flight, whose calls are made.
    pub(super) fn finish(&mut self, fact: Fact, core: &Core) {
        if let Fact::Found { number, .. } = fact {
            self.next_number += 1;
            if let Some(netns) = self.netns.iter_mut().find(|it| it.is_unfound()) {
                netns.number = number;
            }
        }
        let flight = self.flight.as_ref();
        self.is_in_sync |= flight.is_some_and(|it| it.plan.act == Act::Update);
        self.is_check_due &= flight.is_none_or(|it| it.plan.act != Act::CheckListeners);
        self.end_flight(Ok(fact), core);
    }

    fn end_flight(&mut self, outcome: check::Outcome, core: &Core) {
        if let Some(flight) = self.flight.take() {
            self.learn(&flight.plan, outcome, core);
        }
    }

    pub(super) fn learn(&mut self, plan: &Plan, outcome: check::Outcome, core: &Core) {
        let broker = self.broker_run();
        (core.learn)(&mut self.pod, plan, outcome, self.now, broker.as_ref());
    }

    fn reaches(&self, call: Call, plan: &Plan) -> bool {
        if matches!(call, Call::AddWorkload | Call::RemoveWorkload) {
            let broker = self.broker_run();
            broker.is_some() && broker == plan.broker
        } else {
            self.is_netconfig_up
        }
    }

    /// Makes a call at the current services.
    fn perform(&mut self, call: Call) -> Result<(), Problem> {
        let Some(flight) = self.flight.clone() else {
            return Ok(());
        };
        let plan = &flight.plan;
        // A workload added again was removed just before.
        let revision = if plan.act == Act::Readd {
            plan.revision - 1
        } else {
            self.next_revision
        };
        self.next_revision += 1;
        let netconfig = self.netconfig_run();
        let is_reached = self.reaches(call, plan);
        let is_agreed = self.ending() == Ending::Agreed;
        let Some(netns) = self.netns_of_mut(plan.number) else {
            return if call.needs_no_netns() {
                Ok(())
            } else {
                Err(Problem::Gone)
            };
        };
        if !is_reached {
            return Err(Problem::Transient);
        }
        // The rules of a sandbox that ends go with its netns.
        netns.was_deleted |= plan.act == Act::Forget && is_agreed;
        netns.check_call(call, plan)?;
        match call {
            Call::Claim => netns.claim = netconfig,
            Call::AddWorkload => {
                (netns.has_workload, netns.has_listeners) = (true, true);
                netns.is_broken = false;
            }
            Call::Apply => {
                netns.rules = Rules::Complete;
                let is_served = netns.has_listeners || plan.proxy == Proxy::Sidecar;
                if !is_served && !netns.is_broken {
                    let number = plan.number;
                    self.violate(format!(
                        "sandbox {number} gets rules before ztunnel listens in its netns"
                    ));
                }
            }
            Call::Drain if netns.rules == Rules::Complete => netns.rules = Rules::Draining,
            Call::RemoveRules => {
                if netns.is_running {
                    netns.claim = netconfig;
                }
                netns.rules = Rules::None;
            }
            Call::RemoveWorkload => {
                // ztunnel closes the connections that it has, and listens again.
                netns.is_broken |= plan.act == Act::Readd;
                (netns.has_workload, netns.has_listeners) = (false, false);
                netns.removed_at = revision;
            }
            Call::Release => netns.claim = None,
            Call::Drain | Call::Look | Call::Search => {}
        }
        Ok(())
    }
}

impl Netns {
    /// Returns whether the netns is running and the core has not found it.
    pub(super) fn is_unfound(&self) -> bool {
        self.number == 0 && self.is_running
    }

    /// Returns the problem that a service answers instead of serving the call.
    fn check_call(&self, call: Call, plan: &Plan) -> Result<(), Problem> {
        let needs_process = matches!(call, Call::Claim | Call::Apply);
        let needs_claim = matches!(call, Call::AddWorkload | Call::Apply | Call::Drain);
        if needs_process && !self.is_running {
            Err(Problem::Gone)
        } else if call == Call::AddWorkload && plan.revision <= self.removed_at {
            Err(Problem::Transient)
        } else if needs_claim && self.claim.is_none() {
            Err(Problem::ClaimUnknown)
        } else {
            Ok(())
        }
    }
}
