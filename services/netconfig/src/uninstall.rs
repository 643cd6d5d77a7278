//! Tracks whether inpod has left this node. If so, the files of this boot are removed when the process stops, unless a
//! pod is redirected before.

use inpod_service::{Daemon, Leave, leave::Marker};

use crate::SERVICE;

#[derive(Debug)]
pub(crate) struct UninstallState {
    daemon: Daemon,
    marker: Marker,
}

impl UninstallState {
    /// Loads the state that an earlier process recorded.
    pub(crate) fn new(daemon: &Daemon) -> Self {
        let marker = Marker::of(&daemon.directory(SERVICE.name));
        daemon.forget(marker.is_set(Leave::Uninstall));
        Self {
            daemon: daemon.clone(),
            marker,
        }
    }

    /// Records that the node and its pods are free of rules of inpod.
    pub(crate) fn mark_complete(&self) {
        if let Err(error) = self.marker.set(Leave::Uninstall) {
            tracing::warn!(%error, "Cannot record that inpod left this node");
        }
        self.daemon.forget(true);
    }

    /// Clears the record, since a pod is about to be redirected.
    pub(crate) fn cancel(&self) {
        self.daemon.forget(false);
        if let Err(error) = self.marker.clear() {
            tracing::warn!(%error, "Cannot clear the record that inpod left this node");
        }
    }
}
