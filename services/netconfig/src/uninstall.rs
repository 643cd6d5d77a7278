//! A node that was left: what is remembered of this boot goes with the process, unless a pod is redirected again before.

use inpod_service::{Daemon, Leave, leave::Marker};

use crate::SERVICE;

/// Whether the process is the last one here for now.
#[derive(Debug)]
pub(crate) struct UninstallState {
    daemon: Daemon,
    marker: Marker,
}

impl UninstallState {
    /// As it was before this start.
    pub(crate) fn new(daemon: &Daemon) -> Self {
        let marker = Marker::of(&daemon.directory(SERVICE.name));
        daemon.forget(marker.is_set(Leave::Uninstall));
        Self {
            daemon: daemon.clone(),
            marker,
        }
    }

    /// Nothing of ours is on the node's network or in a pod.
    pub(crate) fn mark_complete(&self) {
        if let Err(error) = self.marker.set(Leave::Uninstall) {
            tracing::warn!(%error, "Cannot record that inpod left this node");
        }
        self.daemon.forget(true);
    }

    /// A pod is to be redirected.
    pub(crate) fn cancel(&self) {
        self.daemon.forget(false);
        if let Err(error) = self.marker.clear() {
            tracing::warn!(%error, "Cannot clear the record that inpod left this node");
        }
    }
}
