//! What the agent could not be told, written down for it: one file per event in `stateDir/spool`.
//!
//! The plugin only writes and `pod-events` only reads and deletes, a file after its effect is checkpointed. Names sort by
//! time; a name that begins with a dot is still being written, or was left by a plugin that died meanwhile.

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    process,
    time::{SystemTime, UNIX_EPOCH},
};

use inpod_types::{InvalidIdentifier, NetnsRef, SandboxRef};
use serde::{Deserialize, Serialize};

use crate::{args::NamedPod, durable};

/// The directory's name in `stateDir`.
pub const SPOOL_DIR: &str = "spool";

/// The schema that this version writes. A reader skips and reports entries of a later one.
pub const SCHEMA: u32 = 1;

/// So many entries mean that nobody reads them: writing more would only fill the disk.
const MAX_ENTRIES: usize = 20_000;

/// One event, the content of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The schema of this entry, [`SCHEMA`].
    pub schema: u32,
    /// What the runtime asked for.
    pub verb: SpooledVerb,
    /// Why the agent was not told.
    pub cause: Cause,
    /// When, in milliseconds since 1970.
    pub time_unix_ms: u64,
    /// The boot (`/proc/sys/kernel/random/boot_id`) that the event belongs to: no sandbox survives it. Empty: not known.
    pub boot_id: String,
    /// The sandbox.
    pub sandbox: Sandbox,
    /// The pod; absent where the runtime did not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<Pod>,
    /// The sandbox's netns; absent where the runtime did not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns: Option<Netns>,
    /// The addresses that the chain gave to the interface; empty for DEL, and where there was no prevResult.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
}

/// The verbs that are written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum SpooledVerb {
    /// A pod was let through without the agent: whether it belongs to the mesh is still to be decided.
    Add,
    /// A sandbox ended.
    Del,
}

/// Why the agent was not told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// Nobody listened on its socket.
    AgentAway,
    /// It answered with an error, or not in time.
    AgentFailed,
    /// The kill switch was set.
    Disabled,
}

/// The sandbox of an event; see [`SandboxRef`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// The network's name.
    pub network_name: String,
    /// The container's id.
    pub container_id: String,
    /// The interface's name.
    pub ifname: String,
}

/// The pod of an event, as the runtime named it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's UID; absent where the runtime did not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

/// The netns of an event, as it was then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Netns {
    /// The path.
    pub path: PathBuf,
    /// `st_dev`; absent where nobody looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<u64>,
    /// `st_ino`; absent where nobody looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inode: Option<u64>,
}

impl Entry {
    /// An event of now and of this boot, of which only the sandbox is known.
    pub fn new(verb: SpooledVerb, cause: Cause, sandbox: &SandboxRef) -> Self {
        Self {
            schema: SCHEMA,
            verb,
            cause,
            time_unix_ms: now_unix_ms(),
            boot_id: boot_id(),
            sandbox: sandbox.into(),
            pod: None,
            netns: None,
            addresses: Vec::new(),
        }
    }

    /// Writes the event so that it is there whole or not at all, also after a power failure.
    ///
    /// # Errors
    ///
    /// When it could not be written; then nothing is there.
    pub fn write(&self, state_dir: &Path) -> Result<(), SpoolError> {
        let dir = state_dir.join(SPOOL_DIR);
        let at = |source| SpoolError::Write {
            path: dir.clone(),
            source,
        };
        durable::create_dir(&dir).map_err(at)?;
        if fs::read_dir(&dir).map_err(at)?.count() >= MAX_ENTRIES {
            return Err(SpoolError::Full(dir));
        }
        let content = serde_json::to_vec(self).map_err(|error| at(error.into()))?;
        durable::write_file(&dir, &self.file_name(), &content).map_err(at)
    }

    /// Time first, for the order of reading; the process id tells apart what comes in the same millisecond.
    fn file_name(&self) -> String {
        let verb = match self.verb {
            SpooledVerb::Add => "add",
            SpooledVerb::Del => "del",
        };
        format!("{:016}-{}-{verb}.json", self.time_unix_ms, process::id())
    }
}

/// Why an event could not be written down.
#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    /// The file system refused.
    #[error("cannot write to {}: {source}", .path.display())]
    Write {
        /// The spool.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Nobody has read the spool for long.
    #[error("{} holds {MAX_ENTRIES} entries that pod-events has not read", .0.display())]
    Full(PathBuf),
}

/// Milliseconds since 1970; 0 before.
pub fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(0))
}

/// The boot that is running; empty where the kernel does not say.
pub fn boot_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

impl From<&SandboxRef> for Sandbox {
    fn from(sandbox: &SandboxRef) -> Self {
        Self {
            network_name: sandbox.network_name.to_string(),
            container_id: sandbox.container_id.to_string(),
            ifname: sandbox.ifname.to_string(),
        }
    }
}

impl TryFrom<&Sandbox> for SandboxRef {
    type Error = InvalidIdentifier;

    fn try_from(sandbox: &Sandbox) -> Result<Self, InvalidIdentifier> {
        Ok(Self {
            network_name: sandbox.network_name.parse()?,
            container_id: sandbox.container_id.parse()?,
            ifname: sandbox.ifname.parse()?,
        })
    }
}

impl From<&NamedPod> for Pod {
    fn from(pod: &NamedPod) -> Self {
        Self {
            namespace: pod.namespace.to_string(),
            name: pod.name.to_string(),
            uid: pod.uid.as_ref().map(ToString::to_string),
        }
    }
}

impl From<&Netns> for NetnsRef {
    fn from(netns: &Netns) -> Self {
        Self {
            device: netns.device,
            inode: netns.inode,
            ..Self::at(&netns.path)
        }
    }
}

impl From<&NetnsRef> for Netns {
    fn from(netns: &NetnsRef) -> Self {
        Self {
            path: netns.path.clone(),
            device: netns.device,
            inode: netns.inode,
        }
    }
}

#[cfg(test)]
mod tests;
