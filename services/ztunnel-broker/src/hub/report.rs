//! What people and watchers are shown.

use std::{sync::Arc, time::Instant};

use inpod_types::Workload;
use tokio::sync::broadcast;

use super::Hub;
use crate::{
    ledger::Ledger,
    session::Stage,
    suspects::Suspicion,
    view::{Event, Progress, SessionView, WorkloadView},
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
        let ledger = self.lock();
        let entries = ledger.desired().entries().map(|entry| {
            let workload = entry.workload().clone();
            let views = ledger.sessions().greeted();
            let views = views.filter_map(|(id, _)| ledger.workload_view(id, &workload.uid));
            Listed {
                descriptor_held: entry.descriptor().is_some(),
                since: entry.since(),
                suspicion: ledger.suspects().worst(&workload.uid).cloned(),
                states: views.filter(|it| it.sandbox == workload.sandbox).collect(),
                workload,
            }
        });
        (status(&ledger), entries.collect())
    }

    /// How far each connected ztunnel is.
    pub(crate) fn stages(&self) -> Vec<Stage> {
        let ledger = self.lock();
        let sessions = ledger.sessions().iter();
        sessions.map(|(_, slot)| slot.session.stage()).collect()
    }

    /// How many pods all ztunnels together are still to be looked at for.
    pub(crate) fn queued(&self) -> usize {
        let ledger = self.lock();
        let sessions = ledger.sessions().iter();
        sessions.map(|(_, slot)| slot.session.queued()).sum()
    }

    /// How far each desired pod is in each connected ztunnel.
    pub(crate) fn progress(&self) -> Vec<Progress> {
        let ledger = self.lock();
        let greeted = ledger.sessions().greeted();
        let views = greeted.flat_map(|(id, _)| ledger.workload_views(id));
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
        let ledger = self.lock();
        (status(&ledger), self.events.subscribe())
    }
}

fn status(ledger: &Ledger) -> Status {
    let sessions = ledger.session_views();
    let greeted = ledger.sessions().greeted();
    Status {
        seeded: ledger.desired().is_seeded(),
        workloads: greeted
            .flat_map(|(id, _)| ledger.workload_views(id))
            .collect(),
        sessions,
    }
}
