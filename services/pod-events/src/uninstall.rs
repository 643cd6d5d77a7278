//! A node that inpod leaves: every pod is taken out of the mesh in order, or left as it is for another agent. Then one
//! line tells that this is done, and the process ends.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use inpod_cni::enrolled::EnrolledNamespaces;
use inpod_service::{
    Daemon, Leave, Readiness,
    leave::{self, Marker},
};
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};

use crate::{SERVICE, checkpoint::Record, clients::Clients, registry::Registry, task::Shared};

/// How often it is looked what is left to do.
const PERIOD: Duration = Duration::from_millis(500);

/// The condition that tells whether inpod stays on the node.
const CONDITION: &str = "staying";

/// Whether inpod is to leave the node, as it is known now. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Leaving(watch::Receiver<Option<Leave>>);

impl Leaving {
    /// Follows a file; what is remembered of an earlier word is in the service's directory.
    pub fn follow(file: PathBuf, directory: &Path) -> Self {
        Self(leave::follow(file, Marker::of(directory)))
    }

    /// Whether this is what is to become of inpod here.
    pub fn is(&self, leave: Leave) -> bool {
        *self.0.borrow() == Some(leave)
    }
}

impl Default for Leaving {
    /// It stays.
    fn default() -> Self {
        Self(watch::channel(None).1)
    }
}

/// What leaves.
pub(crate) struct Departure {
    shared: Arc<Shared>,
    registry: Registry,
    daemon: Daemon,
    /// Whether what ran before this run is written down.
    taken_over: watch::Receiver<bool>,
    marker: Marker,
}

impl Departure {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        registry: &Registry,
        daemon: &Daemon,
        taken_over: watch::Receiver<bool>,
    ) -> Self {
        Self {
            shared: Arc::clone(shared),
            registry: registry.clone(),
            daemon: daemon.clone(),
            taken_over,
            marker: Marker::of(&daemon.directory(SERVICE.name)),
        }
    }

    /// Follows what is to become of inpod here, until it has left.
    pub(crate) async fn run(self) {
        let Leaving(mut said) = self.shared.leaving.clone();
        loop {
            let leave = *said.borrow_and_update();
            let to_do = self.begin(leave);
            let result = match to_do {
                None => said.changed().await,
                Some(leave) => tokio::select! {
                    changed = said.changed() => changed,
                    () = self.carry_out(leave) => return,
                },
            };
            if result.is_err() {
                return;
            }
            self.registry.wake(|_| true);
            self.registry.discover_all();
        }
    }

    fn conditions(&self) -> &Readiness {
        self.daemon.readiness()
    }

    /// Says what is to become of inpod here. What is left to do for it.
    fn begin(&self, leave: Option<Leave>) -> Option<Leave> {
        let left = leave.filter(|leave| self.marker.is_set(*leave));
        // What says so is needed until Kubernetes takes this pod away.
        self.daemon.forget(left == Some(Leave::Uninstall));
        if let Some(leave) = left {
            // The process was started again: nothing is left to be ready for.
            let message = format!("inpod has left this node: {leave}");
            self.conditions().require(CONDITION, &message);
            return None;
        }
        if let Err(error) = self.marker.clear() {
            tracing::warn!(%error, "Cannot forget that this node was left");
        }
        match leave {
            None => self.conditions().set(CONDITION, Ok(())),
            Some(leave) => tracing::warn!(%leave, "inpod leaves this node"),
        }
        leave
    }

    /// Waits until nothing is left to do, tells it, and stops the process.
    async fn carry_out(&self, leave: Leave) {
        let before = self.in_mesh();
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let rest = self.rest(leave).await;
            let Err(rest) = rest else { break };
            let message = format!("inpod leaves this node ({leave}): {rest}");
            self.conditions().set(CONDITION, Err(message));
        }
        let done = match leave {
            Leave::Uninstall => taken_out(before, self.let_alone()),
            Leave::Handover => format!("{before} pods stay as they are"),
        };
        tracing::warn!(%leave, done, "inpod has left this node");
        let told = self
            .marker
            .set(leave)
            .and_then(|()| leave::receipt(&self.shared.config.receipt_file, leave, &done));
        if let Err(error) = told {
            tracing::error!(%error, "Cannot tell that inpod has left this node");
        }
        self.daemon.stop();
    }

    /// What is still to be done.
    async fn rest(&self, leave: Leave) -> Result<(), String> {
        if !*self.taken_over.borrow() {
            return Err("what ran before is not known yet".to_owned());
        }
        match leave {
            Leave::Handover => self.on_their_way(),
            Leave::Uninstall => {
                self.withdrawn()?;
                let clients: &Clients = &self.shared.pipeline.clients;
                let left = clients.leave_node().await;
                left.map_err(|failure| failure.to_string())
            }
        }
    }

    /// Pods that are neither in the mesh nor out of it.
    fn on_their_way(&self) -> Result<(), String> {
        let records = self.registry.records().into_iter();
        let count = records.filter(|record| !record.intent.is_stable()).count();
        nothing(count, "pods are on their way into the mesh or out of it")
    }

    fn in_mesh(&self) -> usize {
        let records = self.registry.records().into_iter();
        records.filter(Record::is_managed).count()
    }

    /// Pods with a sidecar whose redirection stays.
    fn let_alone(&self) -> usize {
        let records = self.registry.records().into_iter();
        records.filter(Record::is_detached).count()
    }

    /// Whether no pod is in the mesh, peers have been told, and the plugin knows it.
    fn withdrawn(&self) -> Result<(), String> {
        let inventory = self.shared.source.inventory();
        if let Some(gap) = inventory.gaps.first() {
            return Err(format!("the pods of this node are not known: {gap}"));
        }
        nothing(self.in_mesh(), "pods are in the mesh")?;
        let unmet = usize::try_from(self.shared.outputs.unmet()).unwrap_or(usize::MAX);
        nothing(unmet, "annotations are not taken back yet")?;
        let list = EnrolledNamespaces::read(&self.shared.config.plugin_state_dir);
        let listed = list.map_err(|error| format!("cannot read what the plugin knows: {error}"))?;
        let listed = listed.map_or(0, |list| list.names().len());
        nothing(listed, "namespaces are enrolled as far as the plugin knows")
    }
}

/// Of the pods that were in the mesh those with a sidecar keep their redirection.
fn taken_out(before: usize, let_alone: usize) -> String {
    let out = before.saturating_sub(let_alone);
    let out = format!("{out} pods were taken out of the mesh");
    if let_alone == 0 {
        return out;
    }
    format!("{out}, {let_alone} stay redirected to their sidecars")
}

fn nothing(count: usize, what: &str) -> Result<(), String> {
    if count == 0 {
        Ok(())
    } else {
        Err(format!("{count} {what}"))
    }
}
