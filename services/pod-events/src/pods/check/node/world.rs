//! The world as the core sees it.

use std::{sync::Arc, time::Duration};

use inpod_service::UninstallMode;

use super::{Leave, Netns, Node, RUNS, Shown};
use crate::{
    boottime::BootInstant,
    pods::{
        next::{Ending, Wanted, World},
        state::{Goal, Phase, Proxy, Run},
    },
};

/// The time in which peers learn that a pod leaves.
pub(super) const PROPAGATION: Duration = Duration::from_secs(5);

impl Node {
    pub(super) fn netconfig_run(&self) -> Option<Run> {
        self.is_netconfig_up
            .then(|| Arc::clone(&RUNS[self.netconfig]))
    }

    pub(super) fn broker_run(&self) -> Option<Run> {
        let is_up = self.is_broker_up && self.is_netconfig_up;
        is_up.then(|| Arc::clone(&RUNS[self.broker]))
    }

    /// Returns whether the pod's label requests the mesh and no uninstall forbids it.
    fn is_requested(&self) -> bool {
        self.is_labelled && self.leave != Some(Leave::Uninstall)
    }

    pub(super) fn is_wanted(&self) -> bool {
        matches!(self.wanted(), Wanted::In { .. })
    }

    pub(super) fn wanted(&self) -> Wanted {
        let current = self.current();
        let is_placeholder = current.is_some_and(|it| it.is_placeholder);
        let stays = self.leave != Some(Leave::Uninstall)
            && current.is_some_and(|it| it.phase == Phase::Enrolled);
        if self.shown == Shown::Missing {
            let since = self.gone_since.filter(|_| self.is_complete);
            return match since {
                Some(since) if !is_placeholder => Wanted::Gone { since },
                Some(_) | None => Wanted::Unknown,
            };
        }
        let proxy = self.proxy;
        let is_in_sync = self.is_in_sync;
        match proxy {
            _ if self.is_requested() => Wanted::In { proxy, is_in_sync },
            Proxy::Ztunnel => Wanted::Out,
            Proxy::Sidecar if stays => Wanted::In {
                proxy,
                is_in_sync: true,
            },
            Proxy::Sidecar => Wanted::Detached,
        }
    }

    pub(super) fn ending(&self) -> Ending {
        match self.shown {
            Shown::Running => Ending::Denied,
            Shown::Missing if !self.is_complete => Ending::Unknown,
            Shown::Missing | Shown::Terminating => Ending::Agreed,
        }
    }

    pub(super) fn world(&self) -> World {
        let is_running = |it: &Netns| it.is_admitted && it.is_running && !it.was_deleted;
        World {
            now: self.now,
            netconfig: self.netconfig_run(),
            broker: self.broker_run(),
            wanted: self.wanted(),
            ending: self.ending(),
            is_shown: self.shown != Shown::Missing,
            has_successor: false,
            is_searched: self.is_wanted()
                && self.shown == Shown::Running
                && self.netns.iter().any(is_running),
            leave: self.leave.map(|leave| match leave {
                Leave::Uninstall => UninstallMode::Uninstall,
                Leave::Handover => UninstallMode::Handover,
            }),
            is_announced: self.is_announced,
            listener_check: self.is_check_due.then_some(self.now),
            propagation: PROPAGATION,
            grace: Duration::from_secs(60),
        }
    }

    /// Returns the possible decisions on an ADD, the desired one first. An ADD that arrives before the source shows the
    /// pod is only recorded.
    pub(super) fn goals(&self) -> Vec<Goal> {
        let is_undecided = self.undecided().is_some();
        let join = is_undecided && self.is_requested();
        let goals = [
            join.then_some(Goal::Join(self.proxy)),
            is_undecided.then_some(Goal::Record),
        ];
        goals.into_iter().flatten().collect()
    }

    /// Returns the first sandbox whose ADD is not decided on.
    fn undecided(&self) -> Option<u64> {
        let mut undecided = self
            .adds()
            .filter(|(_, add)| add.goal.is_none() && !add.is_failed);
        undecided.next().map(|(number, _)| number)
    }

    /// Decides on an ADD. A sandbox whose pod is to be in the mesh may be admitted before the source shows the pod.
    pub(super) fn decide(&mut self, goal: Goal) {
        let is_early = self.is_wanted() && goal == Goal::Record;
        if let Some(number) = self.undecided()
            && let Some(sandbox) = self.pod.sandbox_mut(number)
        {
            sandbox.is_placeholder |= is_early && !sandbox.is_recorded;
            self.pod.decide(number, goal);
        }
    }

    pub(super) fn awaits_announcement(&self) -> bool {
        let mut sandboxes = self.pod.sandboxes.iter();
        !self.is_announced && sandboxes.any(|it| it.phase == Phase::Announcing)
    }

    /// Returns the next time at which an ADD has to give up or to be answered, with the number of its sandbox.
    pub(super) fn next_deadline(&self) -> Option<(BootInstant, u64)> {
        let times = self
            .adds()
            .flat_map(|(number, add)| [(add.work_deadline, number), (add.deadline, number)]);
        times.filter(|(at, _)| *at > self.now).min()
    }

    /// Returns the next time at which the core may decide otherwise, except by looking at a netns again.
    pub(super) fn next_threshold(&self) -> Option<BootInstant> {
        let gone = self.gone_since.map(|since| (since, [2, 600]));
        let unfound = self.pod.unfound_since.map(|since| (since, [2, 2]));
        let phases = self.pod.sandboxes.iter().map(|it| {
            if let Phase::Leaving { since } = it.phase {
                Some((since, [5, 5]))
            } else if let Phase::Draining { since } | Phase::Deleting { since } = it.phase {
                Some((since, [60, 60]))
            } else {
                None
            }
        });
        let delays = [gone, unfound].into_iter().chain(phases).flatten();
        let delayed = delays
            .flat_map(|(since, delays)| delays.map(|seconds| since + Duration::from_secs(seconds)));
        let sandboxes = self.pod.sandboxes.iter();
        let retries = sandboxes.flat_map(|it| it.retries.values().map(|retry| retry.at));
        let deadline = self.next_deadline().map(|(at, _)| at);
        let search = self.pod.search.map(|retry| retry.at);
        let times = delayed
            .chain(retries)
            .chain(deadline)
            .chain(search)
            .chain(self.pod.repairs_from);
        times.filter(|at| *at > self.now).min()
    }
}
