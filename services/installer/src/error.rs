use std::{io, path::PathBuf, time::Duration};

use crate::{plan::PlanError, record::RecordError};

/// While the file cannot be read, nothing is changed, because the file may name other directories.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}, which may set the runtime's CNI directories: {problem}", .path.display())]
pub struct RuntimeError {
    pub path: PathBuf,
    pub problem: String,
}

#[derive(Debug, thiserror::Error)]
pub enum BinaryError {
    #[error("cannot read the plugin {}, which the setting plugin_source names", .path.display())]
    Source { path: PathBuf, source: io::Error },
    #[error("{} does not exist: set bin_dir to the runtime's directory of CNI plugins (chart: platform)", .0.display())]
    NoDirectory(PathBuf),
    #[error("{} is on a read-only file system: set bin_dir to where this platform keeps CNI plugins (chart: platform; GKE: /home/kubernetes/bin), or install the plugin there in advance", .0.display())]
    ReadOnly(PathBuf),
    #[error("cannot write {}", .path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The installer installs no file that it cannot record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The new file is no working CNI plugin; the previous plugin stays in place.
    #[error("the plugin in {} does not work: {problem}; check that the image matches this machine's architecture and that the directory is not mounted noexec", .dir.display())]
    Unusable {
        dir: PathBuf,
        /// The output of the failed test, or its error.
        problem: String,
    },
}

/// The reason why the chain could not be brought into the desired state.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    #[error(transparent)]
    Read(#[from] crate::ReadError),
    /// Only time or an operator can resolve the problem.
    #[error(transparent)]
    PlanError(#[from] PlanError),
    /// The installer makes no change that it cannot record.
    #[error("no change is made while it cannot be recorded")]
    Record(#[from] RecordError),
    #[error("cannot change {}{}", .path.display(), hint(.source))]
    Write { path: PathBuf, source: io::Error },
    #[error("waiting for the plugin binary")]
    NoPlugin,
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// Each change is followed once a second at most.
    #[error("waiting a second before {files} follows the next change")]
    Following { files: String, wait: Duration },
    #[error("the plugin in {} does not work: {problem}", .dir.display())]
    Plugin { dir: PathBuf, problem: String },
    #[error(
        "another component keeps reverting {files}: rewritten {streak} times, next in {} s; {remedy}", .wait.as_secs().max(1)
    )]
    Contested {
        files: String,
        streak: u32,
        wait: Duration,
        remedy: &'static str,
    },
    /// The owner of the file changed it at the same time; the installer retries immediately.
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
