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
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The condition that tells whether inpod stays on the node.
const CONDITION: &str = "staying";

/// Whether inpod is to leave the node, as it is known now. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LeaveMode(watch::Receiver<Option<Leave>>);

impl LeaveMode {
    /// Follows a file; what is remembered of an earlier word is in the service's directory.
    pub fn follow(file: PathBuf, directory: &Path) -> Self {
        Self(leave::follow(file, Marker::of(directory)))
    }

    /// Whether this is what is to become of inpod here.
    pub fn is(&self, leave: Leave) -> bool {
        *self.0.borrow() == Some(leave)
    }
}

impl Default for LeaveMode {
    /// It stays.
    fn default() -> Self {
        Self(watch::channel(None).1)
    }
}

/// What leaves.
pub(crate) struct Uninstaller {
    shared: Arc<Shared>,
    registry: Registry,
    daemon: Daemon,
    /// Whether what ran before this run is written down.
    adopted: watch::Receiver<bool>,
    marker: Marker,
}

impl Uninstaller {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        registry: &Registry,
        daemon: &Daemon,
        adopted: watch::Receiver<bool>,
    ) -> Self {
        Self {
            shared: Arc::clone(shared),
            registry: registry.clone(),
            daemon: daemon.clone(),
            adopted,
            marker: Marker::of(&daemon.directory(SERVICE.name)),
        }
    }

    /// Follows what is to become of inpod here, until it has left.
    pub(crate) async fn run(self) {
        let LeaveMode(mut requested) = self.shared.leave_mode.clone();
        loop {
            let leave = *requested.borrow_and_update();
            let pending = self.start(leave);
            let result = match pending {
                None => requested.changed().await,
                Some(leave) => tokio::select! {
                    changed = requested.changed() => changed,
                    () = self.run_to_completion(leave) => return,
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
    fn start(&self, leave: Option<Leave>) -> Option<Leave> {
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
    async fn run_to_completion(&self, leave: Leave) {
        let before = self.managed_pods();
        let mut ticks = interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let rest = self.remaining_work(leave).await;
            let Err(rest) = rest else { break };
            let message = format!("inpod leaves this node ({leave}): {rest}");
            self.conditions().set(CONDITION, Err(message));
        }
        let done = match leave {
            Leave::Uninstall => describe_result(before, self.detached_pods()),
            Leave::Handover => format!("{before} pods stay as they are"),
        };
        tracing::warn!(%leave, done, "inpod has left this node");
        let recorded = self
            .marker
            .set(leave)
            .and_then(|()| leave::receipt(&self.shared.config.receipt_file, leave, &done));
        if let Err(error) = recorded {
            tracing::error!(%error, "Cannot tell that inpod has left this node");
        }
        self.daemon.stop();
    }

    /// What is still to be done.
    async fn remaining_work(&self, leave: Leave) -> Result<(), String> {
        if !*self.adopted.borrow() {
            return Err("what ran before is not known yet".to_owned());
        }
        match leave {
            Leave::Handover => self.check_stable(),
            Leave::Uninstall => {
                self.check_withdrawn()?;
                let clients: &Clients = &self.shared.pipeline.clients;
                let left = clients.leave_node().await;
                left.map_err(|failure| failure.to_string())
            }
        }
    }

    /// Pods that are neither in the mesh nor out of it.
    fn check_stable(&self) -> Result<(), String> {
        let records = self.registry.records().into_iter();
        let count = records.filter(|record| !record.intent.is_stable()).count();
        expect_none(count, "pods are on their way into the mesh or out of it")
    }

    fn managed_pods(&self) -> usize {
        let records = self.registry.records().into_iter();
        records.filter(Record::is_managed).count()
    }

    /// Pods with a sidecar whose redirection stays.
    fn detached_pods(&self) -> usize {
        let records = self.registry.records().into_iter();
        records.filter(Record::is_detached).count()
    }

    /// Whether no pod is in the mesh, peers have been told, and the plugin knows it.
    fn check_withdrawn(&self) -> Result<(), String> {
        let inventory = self.shared.source.inventory();
        if let Some(gap) = inventory.gaps.first() {
            return Err(format!("the pods of this node are not known: {gap}"));
        }
        expect_none(self.managed_pods(), "pods are in the mesh")?;
        let unmet = usize::try_from(self.shared.outputs.unmet()).unwrap_or(usize::MAX);
        expect_none(unmet, "annotations are not taken back yet")?;
        let list = EnrolledNamespaces::read(&self.shared.config.plugin_state_dir);
        let listed = list.map_err(|error| format!("cannot read what the plugin knows: {error}"))?;
        let listed = listed.map_or(0, |list| list.names().len());
        expect_none(listed, "namespaces are enrolled as far as the plugin knows")
    }
}

/// Of the pods that were in the mesh those with a sidecar keep their redirection.
fn describe_result(before: usize, detached: usize) -> String {
    let out = before.saturating_sub(detached);
    let out = format!("{out} pods were taken out of the mesh");
    if detached == 0 {
        return out;
    }
    format!("{out}, {detached} stay redirected to their sidecars")
}

fn expect_none(count: usize, what: &str) -> Result<(), String> {
    if count == 0 {
        Ok(())
    } else {
        Err(format!("{count} {what}"))
    }
}
