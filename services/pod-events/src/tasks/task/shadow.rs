//! Asks the new core at every decision of this one, and counts where the two differ.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use inpod_service::UninstallMode;
use inpod_types::Enrollment;

use super::Task;
use crate::{
    boottime::BootInstant,
    checkpoint::{Intent, Record},
    pods::{
        next::{Ending, Wait, Wanted, Wish, World, wishes},
        state::{Phase, Pod, Proxy, Sandbox, Step},
    },
    tasks::plan::{Action, Desired},
};

/// The action of this core, the first wish of the new core, and the phase of the sandbox.
type Difference = (String, String, &'static str);

static DIFFERENCES: Mutex<BTreeMap<Difference, u64>> = Mutex::new(BTreeMap::new());

/// The kinds of differences that were looked at: the new core's wish, the phases in which the reason holds (all phases
/// if empty), and which of the two cores is right.
const DECIDED: [(&str, &[&str], &str); 4] = [
    (
        "wait for netconfig",
        &[],
        "both: nothing can be done while netconfig is away; this core calls it all the same, and tries again",
    ),
    (
        "Claim",
        &["enrolled"],
        "new: this core's flag `unclaimed` stays set when an enrollment after a rejected DEL has claimed the netns",
    ),
    (
        "Claim",
        &["enrolling", "adopted"],
        "this core: a pod that has gone or is detached needs no claim before its end; the new core releases it again",
    ),
    (
        LEFT,
        &[],
        "new: this core asks for a handover only before the first of several actions",
    ),
];

/// The pod is left to another agent.
const LEFT: &str = "none, in a handover";

/// Returns the differences so far: how often each occurred, and which core is right, unless that is not decided.
pub(crate) fn differences() -> Vec<(Difference, u64, Option<&'static str>)> {
    let differences = DIFFERENCES.lock();
    let differences = differences.unwrap_or_else(PoisonError::into_inner).clone();
    let with_reason = |(difference, count): (Difference, u64)| {
        let (_, wish, phase) = &difference;
        let is_it = |(decided, phases, _): &&(&str, &[&str], &str)| {
            decided == wish && (phases.is_empty() || phases.contains(phase))
        };
        let why = DECIDED.iter().find(is_it).map(|(_, _, why)| *why);
        (difference, count, why)
    };
    differences.into_iter().map(with_reason).collect()
}

impl Task {
    /// Compares an action with the first wish of the new core for the current sandbox.
    pub(super) fn compare_with_new_core(&self, desired: Desired, action: Action) {
        let Some(record) = self.records.last() else {
            return;
        };
        let world = self.new_world(record, desired);
        let pod = Pod {
            sandboxes: (0..)
                .zip(&self.records)
                .map(|(number, record)| self.new_sandbox(number, record))
                .collect(),
            ..Pod::default()
        };
        let is_current = |wish: &Wish| matches!(wish.step, Step::Take(number, _) if Some(number) == pod.sandboxes.last().map(|it| it.number));
        let first = wishes(&pod, &world).into_iter().find(is_current);
        let is_handover = world.leave == Some(UninstallMode::Handover);
        let wish = if first.is_none() && is_handover {
            LEFT.to_owned()
        } else {
            describe_wish(first)
        };
        if !same_wishes(action, record).contains(&wish.as_str()) {
            let action = format!("{action:?}");
            let action = action
                .split([' ', '('])
                .next()
                .unwrap_or_default()
                .to_owned();
            let difference = (action, wish, phase_of(record).name());
            let differences = DIFFERENCES.lock();
            let mut differences = differences.unwrap_or_else(PoisonError::into_inner);
            *differences.entry(difference).or_default() += 1;
        }
    }

    fn new_sandbox(&self, number: u64, record: &Record) -> Sandbox {
        let synced = self.shared.pipeline.synced.borrow();
        let phase = phase_of(record);
        let is_claimed = record.netns_id.is_some() && !self.unclaimed;
        let is_served = phase.is_in_mesh() && !matches!(phase, Phase::Adopted | Phase::Legacy);
        let is_sidecar = record.redirection.is_sidecar();
        Sandbox {
            phase,
            proxy: proxy_of(is_sidecar),
            is_located: !record.has_unknown_netns(),
            is_detached: record.is_detached(),
            is_placeholder: record.admitted_unenrolled,
            revision: record.revision.0,
            claimed_by: synced.netconfig.clone().filter(|_| is_claimed),
            served_by: synced.broker.clone().filter(|_| is_served),
            ..Sandbox::new(number)
        }
    }

    fn new_world(&self, record: &Record, desired: Desired) -> World {
        let inventory = self.shared.source.inventory();
        let shown = inventory.pod(&self.key);
        let own = shown.filter(|pod| record.belongs_to(pod));
        let running = own.filter(|pod| !pod.terminal);
        let to_sidecar =
            own.is_some_and(|pod| self.shared.decide(pod).enrollment == Enrollment::Sidecar);
        let synced = self.shared.pipeline.synced.borrow();
        let timing = self.shared.timing();
        World {
            now: BootInstant::now(),
            netconfig: synced.netconfig.clone(),
            broker: synced.broker.clone(),
            wanted: wanted(desired, proxy_of(to_sidecar)),
            ending: match running {
                Some(pod) if pod.is_terminating => Ending::Agreed,
                Some(_) => Ending::Denied,
                None if inventory.is_complete() => Ending::Agreed,
                None => Ending::Unknown,
            },
            is_shown: own.is_some(),
            has_successor: shown.is_some() && own.is_none(),
            is_searched: false,
            leave: *self.shared.leave_mode.watch().borrow(),
            is_announced: matches!(desired, Desired::Out { is_announced: true }),
            listener_check: None,
            propagation: timing.propagation,
            grace: timing.grace,
        }
    }
}

fn proxy_of(is_sidecar: bool) -> Proxy {
    if is_sidecar {
        Proxy::Sidecar
    } else {
        Proxy::Ztunnel
    }
}

pub(super) fn wanted(desired: Desired, proxy: Proxy) -> Wanted {
    match desired {
        Desired::In { in_sync } => Wanted::In {
            proxy,
            is_in_sync: in_sync,
        },
        Desired::Detached { .. } => Wanted::Detached,
        Desired::Out { .. } => Wanted::Out,
        Desired::Gone { since } => Wanted::Gone { since },
        Desired::Unknown => Wanted::Unknown,
    }
}

pub(super) fn phase_of(record: &Record) -> Phase {
    match record.intent {
        Intent::Out => Phase::Out,
        Intent::Enrolling => Phase::Enrolling,
        Intent::Adopted => Phase::Adopted,
        Intent::Legacy => Phase::Legacy,
        Intent::ServedLegacy => Phase::ServedLegacy,
        Intent::Enrolled { .. } => Phase::Enrolled,
        Intent::Announcing => Phase::Announcing,
        Intent::Leaving { since } => Phase::Leaving { since },
        Intent::Draining { since } => Phase::Draining { since },
        Intent::Deleting { since } => Phase::Deleting { since },
    }
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Out => "out",
            Self::Enrolling => "enrolling",
            Self::Adopted => "adopted",
            Self::Legacy | Self::ServedLegacy => "legacy",
            Self::Enrolled => "enrolled",
            Self::Announcing => "announcing",
            Self::Leaving { .. } => "leaving",
            Self::Draining { .. } => "draining",
            Self::Deleting { .. } => "deleting",
        }
    }
}

/// Describes a wish. This core attempts what waits for the broker, and fails, so that wait is no difference.
fn describe_wish(wish: Option<Wish>) -> String {
    let Some(Wish {
        step: Step::Take(_, act),
        wait,
    }) = wish
    else {
        return "none".to_owned();
    };
    match wait {
        Some(Wait::Netconfig) => "wait for netconfig".to_owned(),
        Some(Wait::Until(_)) => "wait".to_owned(),
        Some(Wait::Input) => "wait for the source".to_owned(),
        Some(Wait::Broker) | None => format!("{act:?}"),
    }
}

/// Returns the wishes that mean the same as an action, or are the part of the action that comes next.
fn same_wishes(action: Action, record: &Record) -> &'static [&'static str] {
    let is_located = !record.has_unknown_netns();
    match action {
        Action::Enroll | Action::StartWithdrawal | Action::GarbageCollect { .. } if !is_located => {
            &["Locate"]
        }
        Action::Idle => &["none", LEFT],
        Action::WaitUntil(_) => &["wait"],
        Action::Enroll => &["Begin", "Claim", "AddWorkload", "Apply"],
        Action::Serve => &["Claim", "AddWorkload"],
        Action::Update => &["Update"],
        Action::Detach => &["Detach"],
        Action::Undo | Action::Finish { overdue: true } => &["Withdraw"],
        Action::StartWithdrawal => &["Announce"],
        Action::AwaitAnnouncement => &["wait for the source"],
        Action::AwaitPropagation => &["Leave"],
        Action::Drain => &["Drain"],
        Action::Finish { overdue: false } => &["CountFlows"],
        Action::Delete { .. } => &["Look", "Forget"],
        Action::GarbageCollect { .. } => &["Look"],
    }
}
