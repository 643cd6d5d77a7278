//! Defects of an earlier draft of the core, each as a change of one function. The check has to find every one of them.

use inpod_service::UninstallMode;

use super::{
    CORE, Core, Outcome, explore,
    node::{Event, Start},
};
use crate::{
    boottime::BootInstant,
    pods::{
        next::{Wait, World, next, wishes},
        state::{Act, Add, Phase, Plan, Pod, Run, Sandbox, Step},
    },
};

macro_rules! mutants {
    ($($defect:literal: $function:ident = $mutant:ident, $start:ident, [$($event:ident),*];)*) => {
        const MUTANTS: &[(&str, Core, Start, &[Event])] = &[$((
            $defect,
            Core { $function: $mutant, ..CORE },
            Start::$start,
            &[$(Event::$event),*],
        )),*];
    };
}

// Each row has the defect, the function and the mutant, the start, and the revealing events.
mutants! {
    "an ADD belongs to the pod": expect = expect_of_pod, Enrolled, [Add];
    "a removal leaves the claim known": learn = learn_keeping_claim, Enrolled, [Delete, Vanish, Appear];
    "a late fact changes the phase": learn = learn_without_guard, Enrolled, [Label, Delete, End];
    "a DEL ends only the waiting ADD": delete = delete_only_add, Enrolled, [RepeatAdd, Delete, Terminate];
    "a failed ADD leaves its record": learn = learn_keeping_failed, Empty, [Add];
    "a restarted broker is trusted": learn = learn_of_any_broker, Enrolled, [Delete, Vanish, BrokerRestarts];
    "the current sandbox comes first": next = next_current_first, Enrolled, [Add, DeleteEarlier];
    "an update comes before a repair": next = next_update_first, Enrolled, [NetconfigRestarts, Settings];
    "a placeholder is never identified": next = next_without_identify, Empty, [Add];
    "a handover rests before an ADD": next = next_handover_first, Empty, [Add, HandOver];
    "a rest has no end": next = next_without_end, Empty, [Add];
    "the rules come before the listeners": next = next_rules_first, Empty, [Add];
    "a waiting step delays all others": next = next_in_order, Empty, [Add, NetconfigStops];
    "an update is never made": next = next_without_update, Enrolled, [Settings];
    "a pod is drained before its peers know": next = next_drain_at_once, Enrolled, [Label];
    "a failed ADD is answered before its undo": next = next_answer_at_once, Empty, [Add, CallerLeaves];
    "a DEL during an ADD's last call is lost": learn = learn_losing_delete, Empty, [Add, Delete, Terminate];
    "lost listeners stay lost": next = next_without_readd, Enrolled, [Deafen];
    "a released claim counts as held": learn = learn_lost_claim, Legacy, [NetconfigRestarts, End];
    "a pod without an ADD is never searched": next = next_without_search, Missed, [];
}

#[test]
fn mutants_of_the_core_are_found() {
    for (defect, core, start, among) in MUTANTS {
        let events = among.len().try_into().unwrap();
        let sound = explore(*start, events, among, CORE);
        assert_eq!(sound.violation, None, "without the defect that {defect}");
        let explored = explore(*start, events, among, *core);
        let violation = explored.violation.unwrap_or_default();
        let found = violation.split(", after").next().unwrap_or_default();
        println!("{defect} ({} states): {found}", explored.states.len());
        assert_ne!(found, "", "the check does not find that {defect}");
    }
}

fn expect_of_pod(pod: &mut Pod, number: u64, add: Add) {
    let last = pod.sandboxes.last().map(|it| it.number);
    pod.expect(last.unwrap_or(number), add);
}

fn learn_keeping_claim(
    pod: &mut Pod,
    plan: &Plan,
    outcome: Outcome,
    now: BootInstant,
    broker: Option<&Run>,
) {
    let known = |it: &mut Sandbox| (it.claimed_by.clone(), it.served_by.clone());
    let before = pod.sandbox_mut(plan.number).map(known);
    pod.learn(plan, outcome, now, broker);
    if matches!(plan.act, Act::Withdraw | Act::Detach | Act::Forget)
        && let Some(sandbox) = pod.sandbox_mut(plan.number)
        && let Some(before) = before
    {
        (sandbox.claimed_by, sandbox.served_by) = before;
    }
}

fn learn_without_guard(
    pod: &mut Pod,
    plan: &Plan,
    outcome: Outcome,
    now: BootInstant,
    broker: Option<&Run>,
) {
    let mut plan = plan.clone();
    if let Some(sandbox) = pod.sandbox_mut(plan.number) {
        (plan.phase, plan.revision) = (sandbox.phase, sandbox.revision);
    }
    pod.learn(&plan, outcome, now, broker);
}

fn learn_lost_claim(
    pod: &mut Pod,
    plan: &Plan,
    outcome: Outcome,
    now: BootInstant,
    broker: Option<&Run>,
) {
    let mut plan = plan.clone();
    if let Some(sandbox) = pod.sandbox_mut(plan.number) {
        plan.reports = sandbox.reports;
    }
    pod.learn(&plan, outcome, now, broker);
}

fn learn_losing_delete(
    pod: &mut Pod,
    plan: &Plan,
    outcome: Outcome,
    now: BootInstant,
    broker: Option<&Run>,
) {
    if plan.act == Act::Answer
        && let Some(sandbox) = pod.sandbox_mut(plan.number)
        && let Some(add) = &mut sandbox.add
    {
        add.is_deleted = false;
    }
    pod.learn(plan, outcome, now, broker);
}

fn delete_only_add(pod: &mut Pod, number: u64, now: BootInstant) {
    match pod.sandbox_mut(number).and_then(|it| it.add.as_mut()) {
        Some(add) => add.is_failed = true,
        None => pod.delete(number, now),
    }
}

fn learn_keeping_failed(
    pod: &mut Pod,
    plan: &Plan,
    outcome: Outcome,
    now: BootInstant,
    broker: Option<&Run>,
) {
    match pod.sandbox_mut(plan.number) {
        Some(sandbox) if plan.act == Act::Answer => sandbox.add = None,
        Some(_) | None => pod.learn(plan, outcome, now, broker),
    }
}

fn learn_of_any_broker(
    pod: &mut Pod,
    plan: &Plan,
    outcome: Outcome,
    now: BootInstant,
    _: Option<&Run>,
) {
    pod.learn(plan, outcome, now, plan.broker.as_ref());
}

/// Returns the first step that is ready and preferred, or else the core's next step.
fn prefer(pod: &Pod, world: &World, is_preferred: impl Fn(Step) -> bool) -> Step {
    let wishes = wishes(pod, world);
    let mut ready = wishes.iter().filter(|wish| wish.wait.is_none());
    let preferred = ready.find(|wish| is_preferred(wish.step));
    preferred.map_or_else(|| next(pod, world), |wish| wish.step)
}

fn next_current_first(pod: &Pod, world: &World) -> Step {
    let current = pod.current().map(|index| pod.sandboxes[index].number);
    prefer(
        pod,
        world,
        |step| matches!(step, Step::Take(number, _) if Some(number) == current),
    )
}

fn next_update_first(pod: &Pod, world: &World) -> Step {
    prefer(pod, world, |step| {
        matches!(step, Step::Take(_, Act::Update))
    })
}

fn next_without_identify(pod: &Pod, world: &World) -> Step {
    let step = next(pod, world);
    if matches!(step, Step::Take(_, Act::Identify)) {
        return Step::Rest(None);
    }
    step
}

fn next_without_update(pod: &Pod, world: &World) -> Step {
    let step = next(pod, world);
    if matches!(step, Step::Take(_, Act::Update)) {
        return Step::Rest(None);
    }
    step
}

fn next_without_readd(pod: &Pod, world: &World) -> Step {
    let step = next(pod, world);
    if matches!(step, Step::Take(_, Act::Readd)) {
        return Step::Rest(None);
    }
    step
}

fn next_drain_at_once(pod: &Pod, world: &World) -> Step {
    match next(pod, world) {
        Step::Take(number, Act::Announce | Act::Leave) => Step::Take(number, Act::Drain),
        step @ (Step::Take(..) | Step::Find | Step::Rest(_)) => step,
    }
}

fn next_answer_at_once(pod: &Pod, world: &World) -> Step {
    match next(pod, world) {
        Step::Take(number, Act::Withdraw) => Step::Take(number, Act::Answer),
        step @ (Step::Take(..) | Step::Find | Step::Rest(_)) => step,
    }
}

fn next_without_search(pod: &Pod, world: &World) -> Step {
    let step = next(pod, world);
    if step == Step::Find {
        return Step::Rest(None);
    }
    step
}

fn next_handover_first(pod: &Pod, world: &World) -> Step {
    let is_stable = pod.sandboxes.last().is_none_or(|it| it.phase.is_stable());
    if world.leave == Some(UninstallMode::Handover) && is_stable {
        return Step::Rest(None);
    }
    next(pod, world)
}

fn next_without_end(pod: &Pod, world: &World) -> Step {
    let step = next(pod, world);
    if matches!(step, Step::Rest(_)) {
        return Step::Rest(None);
    }
    step
}

fn next_rules_first(pod: &Pod, world: &World) -> Step {
    let step = next(pod, world);
    let enrolling = pod.sandboxes.iter().find(|it| it.phase == Phase::Enrolling);
    match enrolling {
        Some(it) if step == Step::Take(it.number, Act::AddWorkload) => {
            Step::Take(it.number, Act::Apply)
        }
        Some(_) | None => step,
    }
}

fn next_in_order(pod: &Pod, world: &World) -> Step {
    let wishes = wishes(pod, world);
    let Some(first) = wishes.first() else {
        return next(pod, world);
    };
    match first.wait {
        None => first.step,
        Some(Wait::Until(at)) => Step::Rest(Some(at)),
        Some(Wait::Netconfig | Wait::Broker | Wait::Input) => next(&Pod::default(), world),
    }
}
