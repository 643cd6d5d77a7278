//! The checkpoint of sandboxes: one file per sandbox, written before the first effect.
//!
//! The files are on tmpfs and carry the boot id, because the sandboxes of an earlier boot are gone.

mod file;
mod intent;

use std::{
    collections::BTreeMap,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use inpod_service::{is_unusable, read_bounded_nofollow, remove_if_exists};
use inpod_types::{
    NetnsId, NetnsRef, NetworkName, PodRef, PodUid, Revision, SandboxRef, ServiceAccountName,
};
use serde::{Deserialize, Serialize};

use crate::{pod::Pod, redirection::Redirection};

use file::ParseError;
pub use intent::Intent;

/// The limit of the size of a file with state: a sandbox with the largest annotations needs less.
pub(crate) const MAX_STATE_BYTES: u64 = 4 << 20;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    #[serde(flatten)]
    pub sandbox: SandboxRef,
    #[serde(flatten)]
    pub pod: PodRef,
    pub service_account: ServiceAccountName,
    /// The netns as the plugin reported it.
    #[serde(flatten, with = "file::Netns")]
    pub netns: NetnsRef,
    /// The netns as netconfig verified it.
    #[serde(rename = "proven")]
    pub netns_id: Option<NetnsId>,
    pub addresses: Vec<IpAddr>,
    pub revision: Revision,
    pub intent: Intent,
    /// The UID known to kubelet and runtime, if it differs from the API server's.
    pub runtime_uid: Option<PodUid>,
    /// Set if the pod was admitted unenrolled before the source showed the pod. The UID (the runtime's, or else the
    /// container id) and the service account (`default`) are placeholders then.
    #[serde(default, rename = "let_through")]
    pub admitted_unenrolled: bool,
    /// The redirection last applied.
    #[serde(flatten, with = "file::Settings")]
    pub redirection: Redirection,
}

impl Record {
    /// Returns the sandbox's netns with everything known to identify the netns.
    pub(crate) fn expected_netns(&self) -> NetnsRef {
        let (netns, id) = (&self.netns, self.netns_id);
        NetnsRef {
            device: id.map(|id| id.device).or(netns.device),
            inode: id.map(|id| id.inode).or(netns.inode),
            cookie: id.map(|id| id.cookie).or(netns.cookie),
            path: netns.path.clone(),
        }
    }

    /// Returns the UID in the names of the pod's cgroups, which kubelet and runtime name after the hash of a static pod.
    pub(crate) fn cgroup_uid(&self) -> &PodUid {
        self.runtime_uid.as_ref().unwrap_or(&self.pod.uid)
    }

    /// Returns whether the record belongs to a pod of the source. A static pod keeps its sandbox when its mirror pod is
    /// recreated.
    pub fn belongs_to(&self, pod: &Pod) -> bool {
        let by_hash = self.runtime_uid.is_some() && self.runtime_uid == pod.runtime_uid;
        let unnamed =
            self.admitted_unenrolled && self.pod.uid.as_str() == self.sandbox.container_id.as_str();
        pod.has_uid(&self.pod.uid) || by_hash || (unnamed && !pod.terminal)
    }

    /// Returns whether a CNI request refers to this record. A sandbox found by its processes has no network name and
    /// matches any network of its container.
    pub fn matches_request(&self, sandbox: &SandboxRef) -> bool {
        let own = &self.sandbox;
        let found = self.was_found();
        own == sandbox
            || (found && own.container_id == sandbox.container_id && own.ifname == sandbox.ifname)
    }

    /// Returns whether a CNI request names the recorded netns. The netns of a sandbox found by its processes has
    /// another path, and the netns of a sidecar's pod is recorded with more identifiers after an uninstall.
    pub fn has_netns(&self, netns: &NetnsRef) -> bool {
        let own = &self.netns;
        let verified = self.netns_id.map(|id| (Some(id.device), Some(id.inode)));
        let id = verified.unwrap_or((own.device, own.inode));
        own == netns || (netns.inode.is_some() && id == (netns.device, netns.inode))
    }

    pub fn uses_sidecar(&self) -> bool {
        self.redirection.is_sidecar() && self.intent.has_effects()
    }

    /// Returns whether no service holds anything for the sandbox.
    pub fn is_bare(&self) -> bool {
        !self.intent.has_effects() && self.netns_id.is_none()
    }

    /// Returns whether the redirection to a sidecar is in place but unmanaged, as after an uninstall: the rules stay so
    /// that the pod sends no plain text.
    pub fn is_detached(&self) -> bool {
        let is_applied = matches!(self.intent, Intent::Enrolled { .. });
        self.redirection.is_sidecar() && is_applied && self.netns_id.is_none()
    }

    pub fn is_managed(&self) -> bool {
        self.intent.has_effects() && !self.is_detached() && !self.is_legacy()
    }

    /// Returns whether the sandbox was found on the node instead of being named by a CNI call.
    pub(crate) fn was_found(&self) -> bool {
        self.sandbox.network_name == NetworkName::default()
    }

    /// Returns whether another agent's rules, which inpod cannot replace, lead the pod's traffic to ztunnel.
    pub(crate) fn is_legacy(&self) -> bool {
        matches!(self.intent, Intent::Legacy | Intent::ServedLegacy)
    }

    /// Returns whether another agent enrolled the pod and its netns is not known yet.
    pub fn has_unknown_netns(&self) -> bool {
        matches!(self.intent, Intent::Adopted) && self.netns_id.is_none()
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("cannot {act} checkpoint {}", .path.display())]
    Io {
        act: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

#[derive(Clone, Debug)]
pub struct Checkpoint {
    directory: PathBuf,
    boot_id: String,
    held: Arc<Mutex<BTreeMap<SandboxRef, Record>>>,
}

impl Checkpoint {
    /// Opens the directory, creating it if needed.
    pub fn open(directory: &Path) -> Result<Self, CheckpointError> {
        let boot = Path::new("/proc/sys/kernel/random/boot_id");
        let boot_id = fs::read_to_string(boot).map_err(failed("read", boot))?;
        fs::create_dir_all(directory).map_err(failed("make", directory))?;
        Ok(Self {
            directory: directory.to_owned(),
            boot_id: boot_id.trim().to_owned(),
            held: Arc::default(),
        })
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<SandboxRef, Record>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads all records of this boot at startup and removes leftovers. Unreadable files are set aside and logged, so
    /// that other pods are served.
    pub fn load(&self) -> Result<BTreeMap<SandboxRef, Record>, CheckpointError> {
        // A crash interrupted the write of a temporary file: the record was never in force.
        for path in self.files("tmp")? {
            if let Err(error) = fs::remove_file(&path) {
                set_aside(&path, &error);
            }
        }
        let mut records = BTreeMap::new();
        for path in self.files("json")? {
            match self.read(&path)? {
                Ok(Some(record)) => {
                    records.insert(record.sandbox.clone(), record);
                }
                Ok(None) => fs::remove_file(&path).map_err(failed("remove", &path))?,
                Err(error) => set_aside(&path, &error),
            }
        }
        Ok(records)
    }

    /// Reads the records while others may be written. The records cover every effect, because intents are written
    /// first.
    pub fn records(&self) -> Result<Vec<Record>, CheckpointError> {
        // The held records are copied first: a record written meanwhile is read from its file.
        let held = self.held().clone();
        let mut records = Vec::new();
        for path in self.files("json")? {
            match self.read(&path) {
                Ok(record) => records.extend(record.ok().flatten()),
                // The file was removed after the directory was listed.
                Err(CheckpointError::Io { source, .. })
                    if source.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        for record in &mut records {
            let later = held.get(&record.sandbox);
            let is_current = |later: &&Record| {
                (later.revision, &later.intent) == (record.revision, &record.intent)
            };
            if let Some(later) = later.filter(is_current) {
                record.clone_from(later);
            }
        }
        Ok(records)
    }

    /// Returns the record of a file, none if the file is of another boot, or why the file is unusable.
    fn read(&self, path: &Path) -> Result<Result<Option<Record>, ParseError>, CheckpointError> {
        match read_bounded_nofollow(path, MAX_STATE_BYTES) {
            Ok(bytes) => Ok(file::parse(&bytes, &self.boot_id)),
            Err(error) if is_unusable(&error) => Ok(Err(ParseError::Unusable(error))),
            Err(error) => Err(failed("read", path)(error)),
        }
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

    /// Writes a record atomically, without fsync because tmpfs does not survive a power failure.
    pub fn write(&self, record: &Record) -> Result<(), CheckpointError> {
        let path = self.path(&record.sandbox);
        #[cfg(test)]
        if let Some(injected) = crate::testing::disk_fault(false) {
            self.held().remove(&record.sandbox);
            return injected.map_err(failed("write", &path));
        }
        let temporary = path.with_extension("tmp");
        let written = fs::write(&temporary, file::render(record, &self.boot_id))
            .and_then(|()| fs::rename(&temporary, &path));
        if written.is_err() {
            // Frees the partial file's space on a full file system; only the first error is reported.
            let _ignored = fs::remove_file(&temporary);
        }
        self.held().remove(&record.sandbox);
        written.map_err(failed("write", &path))
    }

    /// Keeps the findings of a step of a begun enrollment until the record is written next: [`Self::records`] returns
    /// the findings. After a crash, the step finds them out again.
    pub fn hold(&self, record: &Record) {
        self.held().insert(record.sandbox.clone(), record.clone());
    }

    pub fn remove(&self, sandbox: &SandboxRef) -> Result<(), CheckpointError> {
        self.held().remove(sandbox);
        let path = self.path(sandbox);
        #[cfg(test)]
        if let Some(injected) = crate::testing::disk_fault(true) {
            return injected.map_err(failed("remove", &path));
        }
        remove_if_exists(&path).map_err(failed("remove", &path))
    }

    /// Returns the path of a record. Cuts long container ids, because a file name holds 255 bytes; an FNV-1a hash of
    /// the whole sandbox name keeps files apart.
    fn path(&self, sandbox: &SandboxRef) -> PathBuf {
        let name = sandbox.to_string();
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let readable: String = sandbox.container_id.as_str().chars().take(64).collect();
        self.directory.join(format!("{readable}-{hash:016x}.json"))
    }
}

/// Renames a file that cannot be used. A failure to do so keeps no other pod from its service.
fn set_aside(path: &Path, error: &dyn std::error::Error) {
    tracing::error!(path = %path.display(), %error, "Set aside an unreadable checkpoint file");
    if let Err(error) = fs::rename(path, path.with_extension("unreadable")) {
        tracing::error!(path = %path.display(), %error, "Cannot rename the file; it is ignored");
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
