//! Records that inpod has left the node: netconfig then removes the files of the current boot when the process
//! stops, unless a pod is redirected before.

use inpod_service::{Daemon, UninstallMode, uninstall::Marker};

use crate::SERVICE;

#[derive(Debug)]
pub(crate) struct UninstallState {
    daemon: Daemon,
    marker: Marker,
}

impl UninstallState {
    pub(crate) fn new(daemon: &Daemon) -> Self {
        let marker = Marker::in_directory(&daemon.directory(SERVICE.name));
        daemon.remove_state_on_exit(marker.is_set(UninstallMode::Uninstall));
        Self {
            daemon: daemon.clone(),
            marker,
        }
    }

    pub(crate) fn mark_complete(&self) {
        if let Err(error) = self.marker.set(UninstallMode::Uninstall) {
            tracing::warn!(%error, "Cannot record that inpod left this node");
        }
        self.daemon.remove_state_on_exit(true);
    }

    pub(crate) fn cancel(&self) {
        self.daemon.remove_state_on_exit(false);
        if let Err(error) = self.marker.clear() {
            tracing::warn!(%error, "Cannot clear the record that inpod left this node");
        }
    }
}
