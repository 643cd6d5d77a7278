//! Uninstall and handover of a node: every pod is withdrawn in order, or left to another agent. Then pod-events writes
//! a receipt of a single line and the process ends.

use std::{sync::Arc, time::Duration};

use inpod_cni::enrolled::EnrolledNamespaces;
use inpod_service::{
    Daemon, Readiness, UninstallMode,
    uninstall::{self, Marker},
};
use inpod_types::Failure;
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};

use crate::{
    SERVICE,
    clients::deadline_in,
    inventory::Changes,
    tasks::{Registry, Shared},
};

const POLL_INTERVAL: Duration = Duration::from_millis(500);

const CONDITION: &str = "staying";

pub(crate) struct Uninstaller {
    shared: Arc<Shared>,
    registry: Registry,
    daemon: Daemon,
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
            marker: Marker::in_directory(&daemon.directory(SERVICE.name)),
        }
    }

    pub(crate) async fn run(self) {
        let mut requested = self.shared.leave_mode.watch();
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
            self.registry.evaluate(&Changes::to_everything());
        }
    }

    fn conditions(&self) -> &Readiness {
        self.daemon.readiness()
    }

    /// Reports the leave mode. Returns the mode if work remains to be done.
    fn start(&self, leave: Option<UninstallMode>) -> Option<UninstallMode> {
        let left = leave.filter(|leave| self.marker.is_set(*leave));
        // The request to leave must stay readable until Kubernetes deletes this pod.
        self.daemon
            .remove_state_on_exit(left == Some(UninstallMode::Uninstall));
        if let Some(leave) = left {
            // The process restarted after its work was done, so it never becomes ready again.
            let message = format!("inpod has left this node: {leave}");
            self.conditions().require(CONDITION, &message);
            return None;
        }
        if let Err(error) = self.marker.clear() {
            tracing::warn!(%error, "Cannot clear the marker of an earlier uninstall");
        }
        match leave {
            None => self.conditions().set(CONDITION, Ok(())),
            Some(leave) => tracing::warn!(%leave, "inpod leaves this node"),
        }
        leave
    }

    /// Waits until no work remains, writes the receipt and stops the process.
    async fn run_to_completion(&self, leave: UninstallMode) {
        let before = self.managed_pods();
        let mut ticks = interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let remaining = self.remaining_work(leave).await;
            let Err(remaining) = remaining else { break };
            let message = format!("inpod leaves this node ({leave}): {remaining}");
            self.conditions().set(CONDITION, Err(message));
        }
        let done = match leave {
            UninstallMode::Uninstall => {
                let refused = self.shared.status.refused();
                describe_result(before, self.detached_pods(), refused) + &self.describe_legacy()
            }
            UninstallMode::Handover => format!("{before} pods stay as they are"),
        };
        tracing::warn!(%leave, done, "inpod has left this node");
        let recorded = self.marker.set(leave).and_then(|()| {
            uninstall::write_receipt(&self.shared.config.receipt_file, leave, &done)
        });
        if let Err(error) = recorded {
            tracing::error!(%error, "Cannot write the receipt that inpod has left this node");
        }
        self.daemon.stop();
    }

    async fn remaining_work(&self, leave: UninstallMode) -> Result<(), String> {
        if !*self.adopted.borrow() {
            return Err("the pods that ran before inpod are not known yet".to_owned());
        }
        match leave {
            UninstallMode::Handover => self.check_stable(),
            UninstallMode::Uninstall => {
                self.check_withdrawn()?;
                let left = self.leave_node().await;
                left.map_err(|failure| failure.to_string())
            }
        }
    }

    /// Removes the probe set. Pods with rules in legacy tables, which stay, lose the exemption of their probes, because
    /// nothing would remove their addresses later.
    async fn leave_node(&self) -> Result<(), Failure> {
        let clients = self.shared.clients();
        let records = self.registry.records();
        for record in records.iter().filter(|record| record.is_legacy()) {
            clients.exempt_probes(record, false, deadline_in(5)).await?;
        }
        clients.leave_node().await
    }

    /// Checks that no pod is on its way into or out of the mesh.
    fn check_stable(&self) -> Result<(), String> {
        let records = self.registry.records().into_iter();
        let count = records.filter(|record| !record.intent.is_stable()).count();
        expect_none(count, "pods are on their way into the mesh or out of it")
    }

    fn managed_pods(&self) -> usize {
        let records = self.registry.records().into_iter();
        records.filter(|record| record.is_managed()).count()
    }

    fn detached_pods(&self) -> usize {
        let records = self.registry.records().into_iter();
        records.filter(|record| record.is_detached()).count()
    }

    /// Names the pods that keep another agent's rules.
    fn describe_legacy(&self) -> String {
        let records = self.registry.records().into_iter();
        let pods = records.filter(|record| record.is_legacy());
        let pods: Vec<_> = pods.map(|record| record.pod.to_string()).collect();
        if pods.is_empty() {
            String::new()
        } else {
            let pods = pods.join(" ");
            format!(", restart what keeps another agent's rules in iptables' legacy tables: {pods}")
        }
    }

    /// Checks that no pod is in the mesh, all annotations are withdrawn, and the plugin's list of enrolled namespaces
    /// is empty.
    fn check_withdrawn(&self) -> Result<(), String> {
        let inventory = self.shared.source.inventory();
        if let Some(gap) = inventory.gaps.first() {
            return Err(format!("the pods of this node are not known: {gap}"));
        }
        expect_none(self.managed_pods(), "pods are in the mesh")?;
        let status = &self.shared.status;
        let unmet = status.unmet().saturating_sub(status.refused());
        let unmet = usize::try_from(unmet).unwrap_or(usize::MAX);
        expect_none(unmet, "annotations are not withdrawn yet")?;
        let list = EnrolledNamespaces::read(&self.shared.config.plugin_state_dir);
        let listed = list.map_err(|error| {
            format!("cannot read the plugin's list of enrolled namespaces: {error}")
        })?;
        let listed = listed.map_or(0, |list| list.names().len());
        expect_none(
            listed,
            "namespaces are still in the plugin's list of enrolled namespaces",
        )
    }
}

/// Describes the result of an uninstall. Pods with a sidecar keep their redirection and are counted separately.
fn describe_result(before: usize, detached: usize, refused: u64) -> String {
    let out = before.saturating_sub(detached);
    let mut result = format!("{out} pods were withdrawn from the mesh");
    if detached > 0 {
        result += &format!(", {detached} stay redirected to their sidecars");
    }
    if refused > 0 {
        result += &format!(", {refused} keep an annotation that the API server refuses to change");
    }
    result
}

fn expect_none(count: usize, what: &str) -> Result<(), String> {
    if count == 0 {
        Ok(())
    } else {
        Err(format!("{count} {what}"))
    }
}
