//! Spools events that the agent could not receive, each as one file in `stateDir/spool`.
//!
//! `pod-events` deletes a file once the effect of the event is checkpointed. File names sort by time; a leading dot
//! marks an unfinished write, which is in progress or has crashed.

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    process,
    time::{SystemTime, UNIX_EPOCH},
};

use inpod_types::{NetnsRef, SandboxRef};
use serde::{Deserialize, Serialize};

use crate::{args::NamedPod, directory::Directory};

pub const SPOOL_DIR: &str = "spool";

/// The version of the file format; readers skip and report entries of a later version.
pub const SCHEMA: u32 = 1;

/// A spool of this size has no reader, and more entries would only fill the disk.
const MAX_ENTRIES: usize = 20_000;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub schema: u32,
    pub verb: SpooledVerb,
    pub cause: Cause,
    pub time_unix_ms: u64,
    /// The boot of the event (`/proc/sys/kernel/random/boot_id`), because no sandbox survives a reboot. The text is
    /// empty if the boot is unknown.
    pub boot_id: String,
    pub sandbox: SandboxRef,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<NamedPod>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub netns: Option<NetnsRef>,
    /// The addresses assigned by the chain, none for a DEL and without a prevResult.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum SpooledVerb {
    /// A pod was admitted unenrolled, and its enrollment is undecided.
    Add,
    Del,
}

/// The reason why the agent did not receive the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// No process listened on the agent's socket.
    AgentAway,
    /// The agent failed, or did not answer in time.
    AgentFailed,
    Disabled,
}

impl Entry {
    /// Sets time, boot and sandbox, but neither pod nor netns nor addresses.
    pub fn new(verb: SpooledVerb, cause: Cause, sandbox: SandboxRef) -> Self {
        Self {
            schema: SCHEMA,
            verb,
            cause,
            time_unix_ms: now_unix_ms(),
            boot_id: boot_id(),
            sandbox,
            pod: None,
            netns: None,
            addresses: Vec::new(),
        }
    }

    /// Writes the entry atomically and durably. A failure leaves no file, unless only the fsync of the directory fails.
    ///
    /// # Errors
    ///
    /// Fails if the spool is full, cannot be written, or is not a directory. A symlink to a directory is refused, too.
    pub fn write(&self, state_dir: &Path) -> Result<(), SpoolError> {
        let dir = state_dir.join(SPOOL_DIR);
        let at = |source| SpoolError::Write {
            path: dir.clone(),
            source,
        };
        let spool = Directory::open_or_create(state_dir)
            .and_then(|directory| directory.open_or_create_subdirectory(SPOOL_DIR))
            .map_err(at)?;
        if spool.has_entries(MAX_ENTRIES).map_err(at)? {
            return Err(SpoolError::Full(dir));
        }
        let content = serde_json::to_vec(self).map_err(|error| at(error.into()))?;
        spool.write_file(&self.file_name(), &content).map_err(at)
    }

    /// Orders files by time; the process id distinguishes events of the same millisecond.
    fn file_name(&self) -> String {
        let verb = match self.verb {
            SpooledVerb::Add => "add",
            SpooledVerb::Del => "del",
        };
        format!("{:016}-{}-{verb}.json", self.time_unix_ms, process::id())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    #[error("cannot write to {}: {source}", .path.display())]
    Write { path: PathBuf, source: io::Error },
    /// No process has read the spool for a long time.
    #[error("{} holds {MAX_ENTRIES} entries that pod-events has not read", .0.display())]
    Full(PathBuf),
}

pub fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(0))
}

/// Returns the id of this boot, or an empty text if the kernel does not provide the id.
pub fn boot_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

#[cfg(test)]
mod tests;
