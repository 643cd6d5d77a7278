//! Why an act failed, with what to do.

use std::{io, path::PathBuf};

use crate::plan::PlanError;

/// Why the plugin could not be put in its place.
#[derive(Debug, thiserror::Error)]
pub enum BinaryError {
    /// The image has none.
    #[error("cannot read the plugin {}; setting plugin_source names it", .path.display())]
    Source {
        /// The plugin that is to be installed.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The directory of the runtime's plugins is not there.
    #[error("{} is not there: set bin_dir to the directory where the runtime looks for CNI plugins (chart: platform)", .0.display())]
    NoDirectory(PathBuf),
    /// The directory cannot be written at all.
    #[error("{} is on a read-only file system: set bin_dir to where this platform keeps CNI plugins (chart: platform; GKE: /home/kubernetes/bin), or put the plugin there beforehand", .0.display())]
    ReadOnly(PathBuf),
    /// The copy failed.
    #[error("cannot write {}", .path.display())]
    Write {
        /// The copy.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The copy does not do what a CNI plugin does. What was there before stays.
    #[error("the copy of the plugin in {} does not work: {problem}; is the image of this machine's architecture, and the directory not mounted noexec?", .dir.display())]
    Unusable {
        /// Where it was tried.
        dir: PathBuf,
        /// What it did.
        problem: String,
    },
}

/// Why the record of what was changed cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It cannot be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// The record.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It is none.
    #[error("{} is no record of the installer; it is needed for leaving: mend it, or remove it and what inpod has changed by hand", .path.display())]
    Malformed {
        /// The record.
        path: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A later release wrote it.
    #[error("{} is of schema {found}, which a later release wrote; run that release", .path.display())]
    Later {
        /// The record.
        path: PathBuf,
        /// Its schema.
        found: u32,
    },
    /// It cannot be written.
    #[error("cannot write {}", .path.display())]
    Write {
        /// The record.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Why the chain is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// The directory cannot be read.
    #[error(transparent)]
    Read(#[from] inpod_cni_config::ReadError),
    /// There is something to be waited for or to be mended by a person.
    #[error(transparent)]
    PlanError(#[from] PlanError),
    /// Nothing may be changed that is not written down.
    #[error("nothing is changed while it cannot be written down")]
    Record(#[from] RecordError),
    /// A file could not be changed.
    #[error("cannot change {}{}", .path.display(), hint(.source))]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Its owner has changed a file at the same moment; it is looked at again at once.
    #[error("{} was changed at the same moment", .0.display())]
    Raced(PathBuf),
}

fn hint(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::ReadOnlyFilesystem {
        ": the file system is read-only; set conf_dir to where this platform keeps CNI configurations (chart: platform)"
    } else {
        ""
    }
}
