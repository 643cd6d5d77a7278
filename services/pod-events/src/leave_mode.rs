//! The leave mode of the node: uninstall, handover or none.

use std::path::{Path, PathBuf};

use inpod_service::{
    UninstallMode,
    uninstall::{self, Marker},
};
use tokio::sync::watch;

/// The node's current leave mode, if any.
#[derive(Clone, Debug)]
pub struct LeaveMode(watch::Receiver<Option<UninstallMode>>);

impl LeaveMode {
    /// Follows a file. A marker in `directory` records an earlier completed removal.
    pub fn follow(file: PathBuf, directory: &Path) -> Self {
        Self(uninstall::watch(file, Marker::in_directory(directory)))
    }

    #[cfg(test)]
    pub(crate) fn manual(requested: watch::Receiver<Option<UninstallMode>>) -> Self {
        Self(requested)
    }

    pub(crate) fn watch(&self) -> watch::Receiver<Option<UninstallMode>> {
        self.0.clone()
    }

    pub fn is(&self, leave: UninstallMode) -> bool {
        *self.0.borrow() == Some(leave)
    }
}

impl Default for LeaveMode {
    fn default() -> Self {
        Self(watch::channel(None).1)
    }
}
