//! Read access for callers, watchers and metrics.

use std::time::Instant;

use inpod_types::Workload;
use tokio::sync::broadcast;

use super::Hub;
use crate::{
    quarantine::Suspicion,
    session::Stage,
    session_view::{Progress, SessionView, WorkloadView},
    state::State,
};

/// The initial state that a watcher receives.
#[derive(Debug)]
pub struct Status {
    pub seeded: bool,
    pub sessions: Vec<SessionView>,
}

#[derive(Debug)]
pub struct Listed {
    pub workload: Workload,
    pub descriptor_held: bool,
    pub since: Instant,
    pub suspicion: Option<Suspicion>,
    /// The states of the workload in each session; empty for a sandbox no longer used by its pod.
    pub states: Vec<WorkloadView>,
}

impl Hub {
    /// Returns the desired set, ordered by sandbox, with each workload's state.
    pub fn list(&self) -> (Status, Vec<Listed>) {
        let state = self.lock();
        let entries = state.desired().entries().map(|entry| {
            let workload = entry.workload().clone();
            let views = state.sessions().greeted();
            let views = views.filter_map(|(id, _)| state.workload_view(id, &workload.uid));
            Listed {
                descriptor_held: entry.descriptor().is_some(),
                since: entry.since(),
                suspicion: state.quarantine().worst_suspicion(&workload.uid).cloned(),
                states: views.filter(|it| it.sandbox == workload.sandbox).collect(),
                workload,
            }
        });
        (status(&state), entries.collect())
    }

    pub(crate) fn stages(&self) -> Vec<Stage> {
        let state = self.lock();
        let sessions = state.sessions().iter();
        sessions.map(|(_, slot)| slot.session.stage()).collect()
    }

    /// Returns the number of pods waiting in all sessions' queues.
    pub(crate) fn queued(&self) -> usize {
        let state = self.lock();
        let sessions = state.sessions().iter();
        sessions.map(|(_, slot)| slot.session.queued()).sum()
    }

    /// Returns the progress of each desired pod in each connected ztunnel.
    pub(crate) fn progress(&self) -> Vec<Progress> {
        let state = self.lock();
        let greeted = state.sessions().greeted();
        let views = greeted.flat_map(|(id, _)| state.workload_views(id));
        views.map(|view| view.progress).collect()
    }

    pub fn descriptors(&self) -> u64 {
        self.descriptors.open()
    }

    pub(crate) fn is_seeded(&self) -> bool {
        self.lock().desired().is_seeded()
    }

    pub(crate) fn desired(&self) -> usize {
        self.lock().desired().entries().count()
    }

    /// Returns the current state and a receiver of later changes.
    pub fn watch(&self) -> (Status, broadcast::Receiver<SessionView>) {
        let state = self.lock();
        (status(&state), self.events.subscribe())
    }
}

fn status(state: &State) -> Status {
    Status {
        seeded: state.desired().is_seeded(),
        sessions: state.session_views(),
    }
}
