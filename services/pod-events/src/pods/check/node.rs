//! A node with one pod, its sandboxes, netconfig, the broker and the source.

mod calls;
mod checks;
mod events;
mod normalize;
mod settle;
mod steps;
mod successors;
mod world;

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use super::{Core, FAULTS};
use crate::{
    boottime::BootInstant,
    pods::state::{Add, Fact, Goal, Phase, Plan, Pod, Proxy, Run, Sandbox, Step},
};
use calls::Call;
pub(super) use events::Event;

/// The present of every normalized state, in seconds after boot.
const NOW: u64 = 10_000;

static RUNS: LazyLock<[Run; 8]> = LazyLock::new(|| std::array::from_fn(|n| n.to_string().into()));

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// The source shows the pod, which has no sandbox.
    Empty,
    Enrolled,
    /// The pod is redirected to a sidecar.
    Sidecar,
    /// Another agent enrolled the pod, and its netns is not found yet.
    Adopted,
    /// Another agent redirected the pod by rules that stay, and ztunnel does not have the pod from inpod.
    Legacy,
    /// The pod runs, and its ADD was never received.
    Missed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Rules {
    None,
    Complete,
    Draining,
}

/// A sandbox in reality, as opposed to the core's record.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Netns {
    /// The number of the sandbox, or 0 until the core finds its netns.
    number: u64,
    is_running: bool,
    rules: Rules,
    claim: Option<Run>,
    has_workload: bool,
    has_listeners: bool,
    /// The revision of the last removal of the workload.
    removed_at: u64,
    /// The runtime has deleted the sandbox.
    was_deleted: bool,
    /// The runtime knows that the ADD failed.
    was_refused: bool,
    /// The runtime knows that the ADD succeeded, or the core found the sandbox running.
    is_admitted: bool,
    /// Something else than the core has broken the rules or the listeners.
    is_broken: bool,
    /// The runtime waits for the answer of an ADD.
    awaits_answer: bool,
}

/// The outcome of a call or a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// The call fails without an effect.
    Refused,
    /// The call has its effect, and fails.
    Lost,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Move {
    Start(Step, Outcome),
    /// Make the next call of the step in flight.
    Call(Call, Outcome),
    /// Finish the step in flight.
    Finish(Fact),
    /// Cancel the step in flight, which may wait for a call, because it is not the next step any more.
    Cancel(Option<Call>, Outcome),
    Decide(Goal),
    Announce,
    Event(Event),
}

/// The step in flight.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Flight {
    plan: Plan,
    /// The number of calls made.
    made: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Node {
    /// The core's record of the pod.
    pod: Pod,
    /// The sandboxes in reality, in the order of their arrival.
    netns: Vec<Netns>,
    flight: Option<Flight>,
    /// The index of netconfig's current run.
    netconfig: usize,
    is_netconfig_up: bool,
    /// The index of the broker's current run.
    broker: usize,
    is_broker_up: bool,
    proxy: Proxy,
    is_labelled: bool,
    is_in_sync: bool,
    shown: Shown,
    /// The source is complete.
    is_complete: bool,
    gone_since: Option<BootInstant>,
    leave: Option<Leave>,
    is_announced: bool,
    /// The listeners in the current sandbox's netns are to be checked.
    is_check_due: bool,
    next_number: u64,
    next_revision: u64,
    now: BootInstant,
    /// The number of remaining events.
    events: u8,
    /// The number of remaining failures of calls and writes.
    faults: u8,
    pub(super) violation: Option<String>,
}

/// The pod in the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Shown {
    Running,
    Terminating,
    Missing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Leave {
    Uninstall,
    Handover,
}

impl Netns {
    fn new(number: u64) -> Self {
        Self {
            number,
            is_running: true,
            rules: Rules::None,
            claim: None,
            has_workload: false,
            has_listeners: false,
            removed_at: 0,
            was_deleted: false,
            was_refused: false,
            is_admitted: false,
            is_broken: false,
            awaits_answer: false,
        }
    }
}

impl Node {
    fn without_sandbox(events: u8) -> Self {
        Self {
            pod: Pod::default(),
            netns: Vec::new(),
            flight: None,
            netconfig: 0,
            is_netconfig_up: true,
            broker: 0,
            is_broker_up: true,
            proxy: Proxy::Ztunnel,
            is_labelled: true,
            is_in_sync: true,
            shown: Shown::Running,
            is_complete: true,
            gone_since: None,
            leave: None,
            is_announced: false,
            is_check_due: false,
            next_number: 1,
            next_revision: 1,
            now: BootInstant::after_boot(Duration::from_secs(NOW)),
            events,
            faults: FAULTS,
            violation: None,
        }
    }

    pub(super) fn new(start: Start, events: u8) -> Self {
        let mut node = Self::without_sandbox(events);
        if start == Start::Empty {
            return node;
        }
        let is_ambient = start != Start::Sidecar;
        if !is_ambient {
            node.proxy = Proxy::Sidecar;
        }
        let run = || Some(Arc::clone(&RUNS[0]));
        let mut sandbox = Sandbox {
            phase: Phase::Enrolled,
            proxy: node.proxy,
            claimed_by: run(),
            served_by: run().filter(|_| is_ambient),
            ..Sandbox::new(1)
        };
        let mut netns = Netns {
            rules: Rules::Complete,
            claim: run(),
            has_workload: is_ambient,
            has_listeners: is_ambient,
            is_admitted: true,
            ..Netns::new(1)
        };
        if start == Start::Adopted {
            (sandbox.phase, sandbox.is_located) = (Phase::Adopted, false);
            (sandbox.claimed_by, sandbox.served_by) = (None, None);
            (netns.number, netns.claim) = (0, None);
            (netns.has_workload, netns.is_broken) = (false, true);
        }
        if start == Start::Legacy {
            (sandbox.phase, sandbox.claimed_by, sandbox.served_by) = (Phase::Legacy, None, None);
            (netns.claim, netns.has_workload, netns.is_broken) = (None, false, true);
        }
        if start == Start::Missed {
            netns = Netns {
                is_admitted: true,
                ..Netns::new(0)
            };
        } else {
            node.pod.sandboxes.push(sandbox);
        }
        node.netns.push(netns);
        node.next_number = 2;
        node
    }

    fn sandbox(&self, number: u64) -> Option<&Sandbox> {
        self.pod.sandboxes.iter().find(|it| it.number == number)
    }

    fn current(&self) -> Option<&Sandbox> {
        self.pod.current().map(|index| &self.pod.sandboxes[index])
    }

    /// Returns the ADDs without an answer, with the numbers of their sandboxes.
    fn adds(&self) -> impl Iterator<Item = (u64, &Add)> {
        let sandboxes = self.pod.sandboxes.iter();
        sandboxes.filter_map(|it| Some((it.number, it.add.as_ref()?)))
    }

    fn netns_of(&self, number: u64) -> Option<&Netns> {
        self.netns.iter().find(|it| it.number == number)
    }

    fn netns_of_mut(&mut self, number: u64) -> Option<&mut Netns> {
        self.netns.iter_mut().find(|it| it.number == number)
    }

    fn violate(&mut self, what: impl Into<String>) {
        self.violation.get_or_insert_with(|| what.into());
    }
}
