//! What pod-events remembers of sandboxes: one file each, written before the first effect.
//!
//! The files live on tmpfs and name the boot: what an earlier boot left is of no sandbox that exists.

mod file;
mod intent;

use std::{
    collections::BTreeMap,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use inpod_types::{
    NetnsId, NetnsRef, NetworkName, PodRef, PodUid, Revision, SandboxRef, ServiceAccountName,
};

use crate::{pod::Pod, redirection::Redirection};

pub use intent::Intent;

/// One sandbox, as far as it is known and as far as it has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The sandbox.
    pub sandbox: SandboxRef,
    /// The pod it is of.
    pub pod: PodRef,
    /// The pod's service account.
    pub service_account: ServiceAccountName,
    /// What the plugin said of the netns.
    pub netns: NetnsRef,
    /// What netconfig proved of it.
    pub netns_id: Option<NetnsId>,
    /// The pod's addresses in it.
    pub addresses: Vec<IpAddr>,
    /// The order of the last change.
    pub revision: Revision,
    /// How far it has come.
    pub intent: Intent,
    /// What kubelet and runtime call the pod, where that is not its UID.
    pub runtime_uid: Option<PodUid>,
    /// Whether the pod was let through before the source knew it. UID and service account are guesses then: the
    /// runtime's word, or where it said none the container's id; and `default`.
    pub admitted_unenrolled: bool,
    /// How its traffic is redirected, as it was applied last.
    pub redirection: Redirection,
}

impl Record {
    /// Whether it is of a pod that the source shows. A static pod keeps its sandbox when the pod that shows it is made
    /// anew.
    pub fn belongs_to(&self, pod: &Pod) -> bool {
        let by_hash = self.runtime_uid.is_some() && self.runtime_uid == pod.runtime_uid;
        let unnamed =
            self.admitted_unenrolled && self.pod.uid.as_str() == self.sandbox.container_id.as_str();
        pod.is_called(&self.pod.uid) || by_hash || (unnamed && !pod.terminal)
    }

    /// Whether a verb of the runtime about that sandbox is about this one. One that was found by its processes has no
    /// network, and belongs to whichever network's verb names its container.
    pub fn matches_request(&self, sandbox: &SandboxRef) -> bool {
        let own = &self.sandbox;
        let found = own.network_name == NetworkName::default();
        own == sandbox
            || (found && own.container_id == sandbox.container_id && own.ifname == sandbox.ifname)
    }

    /// Whether its traffic is redirected to the proxy in the pod, or about to be.
    pub fn uses_sidecar(&self) -> bool {
        self.redirection.is_sidecar() && self.intent.has_effects()
    }

    /// Whether its redirection stands and is left to itself, as on a node that inpod has left: a pod with a sidecar
    /// sends nothing in plain text for that.
    pub fn is_detached(&self) -> bool {
        let is_applied = matches!(self.intent, Intent::Enrolled { .. });
        self.redirection.is_sidecar() && is_applied && self.netns_id.is_none()
    }

    /// Whether anything may be in place that is ours to look after.
    pub fn is_managed(&self) -> bool {
        self.intent.has_effects() && !self.is_detached()
    }

    /// Whether nobody knows yet where its netns is: it stands for a pod that another agent put into the mesh.
    pub fn has_unknown_netns(&self) -> bool {
        matches!(self.intent, Intent::Adopted) && self.netns_id.is_none()
    }
}

/// Why the checkpoint cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file or the directory.
    #[error("cannot {act} checkpoint {}", .path.display())]
    Io {
        /// What was attempted.
        act: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The directory of the files.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    directory: PathBuf,
    boot_id: String,
}

impl Checkpoint {
    /// Opens the directory and makes it where it is missing.
    ///
    /// # Errors
    ///
    /// When the directory cannot be made or the boot's id cannot be read.
    pub fn open(directory: &Path) -> Result<Self, CheckpointError> {
        let boot = Path::new("/proc/sys/kernel/random/boot_id");
        let boot_id = fs::read_to_string(boot).map_err(failed("read", boot))?;
        fs::create_dir_all(directory).map_err(failed("make", directory))?;
        Ok(Self {
            directory: directory.to_owned(),
            boot_id: boot_id.trim().to_owned(),
        })
    }

    /// Reads every record of this boot at start, and clears away what is none. What cannot be read is set aside, loudly,
    /// and keeps no pod from its service.
    ///
    /// # Errors
    ///
    /// When the directory cannot be read.
    pub fn load(&self) -> Result<BTreeMap<SandboxRef, Record>, CheckpointError> {
        // A write that a crash cut short: its record was never in force.
        for path in self.files("tmp")? {
            fs::remove_file(&path).map_err(failed("remove", &path))?;
        }
        let mut records = BTreeMap::new();
        for path in self.files("json")? {
            let bytes = fs::read(&path).map_err(failed("read", &path))?;
            match file::parse(&bytes, &self.boot_id) {
                Ok(Some(record)) => {
                    records.insert(record.sandbox.clone(), record);
                }
                Ok(None) => fs::remove_file(&path).map_err(failed("remove", &path))?,
                Err(error) => {
                    tracing::error!(path = %path.display(), %error, "Set an unreadable checkpoint aside");
                    fs::rename(&path, path.with_extension("unreadable"))
                        .map_err(failed("set aside", &path))?;
                }
            }
        }
        Ok(records)
    }

    /// The records as they stand, while they are being written: what every intent says that effects may follow.
    ///
    /// # Errors
    ///
    /// When the directory cannot be read.
    pub fn records(&self) -> Result<Vec<Record>, CheckpointError> {
        let mut records = Vec::new();
        for path in self.files("json")? {
            match fs::read(&path) {
                Ok(bytes) => records.extend(file::parse(&bytes, &self.boot_id).ok().flatten()),
                // Removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed("read", &path)(error)),
            }
        }
        Ok(records)
    }

    fn files(&self, extension: &str) -> Result<Vec<PathBuf>, CheckpointError> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(failed("read", &self.directory))? {
            let path = entry.map_err(failed("read", &self.directory))?.path();
            if path.extension().is_some_and(|found| found == extension) {
                files.push(path);
            }
        }
        Ok(files)
    }

    /// Writes a record, whole or not at all. No fsync: the directory is on tmpfs and outlives no power cut.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn write(&self, record: &Record) -> Result<(), CheckpointError> {
        let path = self.path(&record.sandbox);
        let temporary = path.with_extension("tmp");
        let written = fs::write(&temporary, file::render(record, &self.boot_id))
            .and_then(|()| fs::rename(&temporary, &path));
        if written.is_err() {
            // A full file system gets back what a part of the file took; the first error is the one to tell.
            let _ignored = fs::remove_file(&temporary);
        }
        written.map_err(failed("write", &path))
    }

    /// Forgets a sandbox; one that is unknown succeeds.
    ///
    /// # Errors
    ///
    /// When the file cannot be removed.
    pub fn remove(&self, sandbox: &SandboxRef) -> Result<(), CheckpointError> {
        let path = self.path(sandbox);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(failed("remove", &path)),
        }
    }

    /// Long ids are cut: a file name holds 255 bytes. The FNV-1a hash of the whole keeps names apart.
    fn path(&self, sandbox: &SandboxRef) -> PathBuf {
        let name = sandbox.to_string();
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let readable: String = sandbox.container_id.as_str().chars().take(64).collect();
        self.directory.join(format!("{readable}-{hash:016x}.json"))
    }
}

fn failed<'a>(
    act: &'static str,
    path: &'a Path,
) -> impl Fn(io::Error) -> CheckpointError + use<'a> {
    move |source| CheckpointError::Io {
        act,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests;
