//! A node that inpod leaves: every pod is taken out of the mesh in order, or left as it is for another agent. Then one
//! line tells that this is done, and the process ends.

use std::{fs, io::ErrorKind, path::PathBuf, sync::Arc, time::Duration};

use daemon::{Daemon, Leave, Readiness, leave};
use inpod_cni::enrolled::EnrolledNamespaces;
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};

use crate::{SERVICE, agents::Agents, registry::Registry, task::Shared};

/// How often it is looked what is left to do.
const PERIOD: Duration = Duration::from_millis(500);

/// The condition that tells whether inpod stays on the node.
const CONDITION: &str = "staying";

/// Whether inpod is to leave the node, as it is known now. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Leaving(watch::Receiver<Leave>);

impl Leaving {
    /// Follows a file.
    pub fn follow(file: PathBuf) -> Self {
        Self(leave::follow(file))
    }

    /// Whether this is what is to become of inpod here.
    pub fn is(&self, leave: Leave) -> bool {
        *self.0.borrow() == leave
    }
}

impl Default for Leaving {
    /// It stays.
    fn default() -> Self {
        Self(watch::channel(Leave::No).1)
    }
}

/// What leaves.
pub(crate) struct Departure {
    shared: Arc<Shared>,
    registry: Registry,
    daemon: Daemon,
    /// Whether what ran before this run is written down.
    taken_over: watch::Receiver<bool>,
    /// Says how the node was left, for a process that is started again afterwards.
    marker: PathBuf,
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
            marker: daemon.directory(SERVICE.name).join("left"),
        }
    }

    /// Follows what is to become of inpod here, until it has left.
    pub(crate) async fn run(self) {
        let Leaving(mut said) = self.shared.leaving.clone();
        loop {
            let leave = *said.borrow_and_update();
            let is_done = leave != Leave::No && self.left() == leave;
            self.begin(leave, is_done);
            let result = tokio::select! {
                changed = said.changed() => changed,
                () = self.carry_out(leave), if leave != Leave::No && !is_done => return,
            };
            if result.is_err() {
                return;
            }
            self.registry.look(|_| true);
            self.registry.meet_all();
        }
    }

    fn conditions(&self) -> &Readiness {
        self.daemon.readiness()
    }

    /// How the node was left already.
    fn left(&self) -> Leave {
        let marker = fs::read_to_string(&self.marker).unwrap_or_default();
        Leave::parse(&marker).unwrap_or_default()
    }

    fn begin(&self, leave: Leave, is_done: bool) {
        match leave {
            Leave::No => {
                self.unmark();
                self.conditions().set(CONDITION, Ok(()));
            }
            // The process was started again: nothing is left to be ready for.
            Leave::Uninstall | Leave::Handover if is_done => {
                let message = format!("inpod has left this node: {leave}");
                self.conditions().require(CONDITION, &message);
            }
            Leave::Uninstall | Leave::Handover => {
                tracing::warn!(%leave, "inpod leaves this node");
                self.unmark();
            }
        }
    }

    fn unmark(&self) {
        match fs::remove_file(&self.marker) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(%error, "Cannot forget that this node was left"),
        }
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
            Leave::Uninstall => format!("{before} pods were taken out of the mesh"),
            Leave::Handover | Leave::No => format!("{before} pods stay as they are"),
        };
        tracing::warn!(%leave, done, "inpod has left this node");
        let told = fs::write(&self.marker, leave.as_str())
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
            Leave::No => Ok(()),
            Leave::Handover => self.on_their_way(),
            Leave::Uninstall => {
                self.withdrawn()?;
                let agents: &Agents = &self.shared.pipeline.agents;
                let left = agents.leave_node().await;
                left.map_err(|failure| failure.to_string())
            }
        }
    }

    /// Pods that are neither in the mesh nor out of it.
    fn on_their_way(&self) -> Result<(), String> {
        let records = self.registry.records().into_iter();
        let count = records.filter(|record| !record.intent.rests()).count();
        nothing(count, "pods are on their way into the mesh or out of it")
    }

    fn in_mesh(&self) -> usize {
        let records = self.registry.records().into_iter();
        records.filter(|record| record.intent.is_held()).count()
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

fn nothing(count: usize, what: &str) -> Result<(), String> {
    if count == 0 {
        Ok(())
    } else {
        Err(format!("{count} {what}"))
    }
}
