//! Errors with their remedies.

use std::{io, path::PathBuf};

use crate::plan::PlanError;

/// Reason why the plugin could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum BinaryError {
    /// The source is missing or unreadable.
    #[error("cannot read the plugin {}, which the setting plugin_source names", .path.display())]
    Source { path: PathBuf, source: io::Error },
    /// The plugin directory does not exist.
    #[error("{} does not exist: set bin_dir to the runtime's directory of CNI plugins (chart: platform)", .0.display())]
    NoDirectory(PathBuf),
    #[error("{} is on a read-only file system: set bin_dir to where this platform keeps CNI plugins (chart: platform; GKE: /home/kubernetes/bin), or install the plugin there in advance", .0.display())]
    ReadOnly(PathBuf),
    /// Writing the new file failed.
    #[error("cannot write {}", .path.display())]
    Write { path: PathBuf, source: io::Error },
    /// The new file does not work as a CNI plugin; the previous one remains.
    #[error("the plugin in {} does not work: {problem}; check that the image matches this machine's architecture and that the directory is not mounted noexec", .dir.display())]
    Unusable {
        dir: PathBuf,
        /// Output or error of the test run.
        problem: String,
    },
}

/// Reason why the record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("cannot read {}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    /// It is not valid JSON.
    #[error("{} is not a valid record of the installer, which uninstall and handover need: repair it, or remove it and revert inpod's changes by hand", .path.display())]
    Malformed {
        path: PathBuf,
        source: serde_json::Error,
    },
    /// A later release wrote it.
    #[error("{} has schema {found} of a later release; run that release", .path.display())]
    Later { path: PathBuf, found: u32 },
    #[error("cannot write {}", .path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// Reason why inpod is not in the chain.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    #[error(transparent)]
    Read(#[from] inpod_cni_config::ReadError),
    /// A condition that time or an operator must resolve.
    #[error(transparent)]
    PlanError(#[from] PlanError),
    /// Changes are not made unless they can be recorded.
    #[error("no change is made while it cannot be recorded")]
    Record(#[from] RecordError),
    #[error("cannot change {}{}", .path.display(), hint(.source))]
    Write { path: PathBuf, source: io::Error },
    /// The owner of a file changed it at the same time; reconciled again immediately.
    #[error("{} was changed at the same time", .0.display())]
    Raced(PathBuf),
}

fn hint(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::ReadOnlyFilesystem {
        ": the file system is read-only; set conf_dir to where this platform keeps CNI configurations (chart: platform)"
    } else {
        ""
    }
}
