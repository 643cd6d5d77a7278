//! What people and watchers are shown.

use std::{sync::Arc, time::Instant};

use inpod_types::Workload;
use tokio::sync::broadcast;

use super::Hub;
use crate::{
    quarantine::Suspicion,
    session::Stage,
    session_view::{Event, Progress, SessionView, WorkloadView},
    state::State,
};

/// What a watcher is given first.
#[derive(Debug)]
pub struct Status {
    /// Whether the desired set is known.
    pub seeded: bool,
    /// The sessions.
    pub sessions: Vec<SessionView>,
    /// Every desired pod in every session.
    pub workloads: Vec<WorkloadView>,
}

/// A workload and whether its descriptor is held, with what each ztunnel said.
#[derive(Debug)]
pub struct Listed {
    /// The workload.
    pub workload: Workload,
    /// Whether its netns's descriptor is held.
    pub descriptor_held: bool,
    /// Since when it has been known as it is.
    pub since: Instant,
    /// What is held against its pod.
    pub suspicion: Option<Suspicion>,
    /// What each ztunnel said; nothing for a sandbox that is no longer its pod's.
    pub states: Vec<WorkloadView>,
}

impl Hub {
    /// The desired set, by sandbox, and what the ztunnels said of it.
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

    /// How far each connected ztunnel is.
    pub(crate) fn stages(&self) -> Vec<Stage> {
        let state = self.lock();
        let sessions = state.sessions().iter();
        sessions.map(|(_, slot)| slot.session.stage()).collect()
    }

    /// How many pods all ztunnels together are still to be looked at for.
    pub(crate) fn queued(&self) -> usize {
        let state = self.lock();
        let sessions = state.sessions().iter();
        sessions.map(|(_, slot)| slot.session.queued()).sum()
    }

    /// How far each desired pod is in each connected ztunnel.
    pub(crate) fn progress(&self) -> Vec<Progress> {
        let state = self.lock();
        let greeted = state.sessions().greeted();
        let views = greeted.flat_map(|(id, _)| state.workload_views(id));
        views.map(|view| view.progress).collect()
    }

    /// How many descriptors are open.
    pub fn descriptors(&self) -> u64 {
        self.descriptors.open()
    }

    /// Whether the desired set is known.
    pub(crate) fn is_seeded(&self) -> bool {
        self.lock().desired().is_seeded()
    }

    /// How many workloads are desired.
    pub(crate) fn desired(&self) -> usize {
        self.lock().desired().entries().count()
    }

    /// The state now, and every change from then on.
    pub fn watch(&self) -> (Status, broadcast::Receiver<Arc<Event>>) {
        let state = self.lock();
        (status(&state), self.events.subscribe())
    }
}

fn status(state: &State) -> Status {
    let sessions = state.session_views();
    let greeted = state.sessions().greeted();
    Status {
        seeded: state.desired().is_seeded(),
        workloads: greeted
            .flat_map(|(id, _)| state.workload_views(id))
            .collect(),
        sessions,
    }
}
