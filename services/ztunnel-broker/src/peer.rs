//! Authentication of the processes that connect to the ZDS socket.
//!
//! An admitted process receives every pod's network namespace, so being root is not enough: the process's cgroup must
//! name a pod that pod-events reports as a ztunnel, and the process's capabilities must be exactly a ztunnel's. The
//! process is inspected through its pidfd.

use std::{collections::BTreeSet, io};

use inpod_service::peer::{Cgroup, Process, Refused, Setting};
use inpod_types::{
    PodUid,
    cgroup::{PodKey, find_container},
};
use nix::sys::socket::{getsockopt, sockopt};
use tokio_seqpacket::UnixSeqpacket;

use crate::capabilities::{Capabilities, RequiredCapabilities};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The process ID, or 0 if the broker cannot see the process.
    pub pid: i32,
    /// The cgroup at the time of the connection; `None` if the policy does not check cgroups.
    pub cgroup: Option<String>,
    pub pod_uid: Option<PodUid>,
}

/// The pod of a ztunnel, or the process if the pod is not known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ztunnel {
    /// The identity stays the same if the container restarts.
    Pod(PodUid),
    Process(i32),
}

impl Peer {
    pub fn ztunnel(&self) -> Ztunnel {
        let process = Ztunnel::Process(self.pid);
        self.pod_uid.clone().map_or(process, Ztunnel::Pod)
    }

    pub fn from_pid(pid: i32) -> Self {
        Self {
            pid,
            cgroup: None,
            pod_uid: None,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    #[error("cannot read the peer's credentials")]
    Credentials(#[source] io::Error),
    #[error("process {pid} has uid {uid}, not ours")]
    Uid { pid: i32, uid: u32 },
    /// The process may have ended, and its PID may have been reused.
    #[error("cannot inspect process {pid}")]
    Process { pid: i32, source: Refused },
    #[error("process {pid} in {cgroup} is not at {root} or below")]
    WrongCgroup {
        pid: i32,
        cgroup: String,
        /// The cgroup that the setting requires.
        root: String,
    },
    /// The cgroup names no pod or several pods.
    #[error("process {pid} in {cgroup} is in no pod's container")]
    NoPod { pid: i32, cgroup: String },
    #[error(
        "process {pid} in {cgroup} does not have the capabilities of a ztunnel: it {difference}"
    )]
    Capabilities {
        pid: i32,
        cgroup: String,
        difference: String,
    },
    #[error("process {pid} in {cgroup} is in a pod that is not a ztunnel of this node")]
    NotZtunnel { pid: i32, cgroup: String },
    #[error(
        "process {pid} in {cgroup} may be a ztunnel: pod-events has not reported this node's ztunnel pods yet"
    )]
    ZtunnelsUnknown { pid: i32, cgroup: String },
    #[error("process {pid}{}: too many connections", .cgroup.as_ref().map(|it| format!(" in {it}")).unwrap_or_default())]
    TooManyConnections {
        pid: i32,
        /// `None` if the policy does not check the cgroup.
        cgroup: Option<String>,
    },
}

impl AdmissionError {
    /// Returns whether the peer would be admitted if pod-events reported its pod as a ztunnel.
    pub fn may_be_admitted_later(&self) -> bool {
        matches!(self, Self::NotZtunnel { .. } | Self::ZtunnelsUnknown { .. })
    }

    /// Returns the cgroup, or whatever else identifies the peer.
    pub fn origin(&self) -> String {
        match self {
            Self::Credentials(_) => String::new(),
            Self::Uid { uid, .. } => format!("uid {uid}"),
            Self::Process { pid, .. } | Self::TooManyConnections { pid, cgroup: None } => {
                format!("process {pid}")
            }
            Self::WrongCgroup { cgroup, .. }
            | Self::NoPod { cgroup, .. }
            | Self::Capabilities { cgroup, .. }
            | Self::NotZtunnel { cgroup, .. }
            | Self::ZtunnelsUnknown { cgroup, .. }
            | Self::TooManyConnections {
                cgroup: Some(cgroup),
                ..
            } => cgroup.clone(),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Policy {
    uid: u32,
    setting: Setting,
    capabilities: RequiredCapabilities,
}

/// A connected process with the user ID of the broker.
#[derive(Debug)]
pub struct Candidate {
    pid: i32,
    /// `None` if the user ID is sufficient.
    process: Option<Process>,
}

impl Policy {
    /// Requires the broker's user ID in addition to the settings.
    pub fn new(setting: Setting, capabilities: RequiredCapabilities) -> Self {
        Self {
            uid: nix::unistd::geteuid().as_raw(),
            setting,
            capabilities,
        }
    }

    /// Creates a policy that checks only the user ID, for demos and development.
    pub fn same_uid() -> Self {
        Self::new(Setting::Uid, RequiredCapabilities::Any)
    }

    pub fn needs_host_pid(&self) -> bool {
        self.setting != Setting::Uid
    }

    /// Identifies the connected process.
    ///
    /// # Errors
    ///
    /// If the process has another user ID, or cannot be inspected.
    pub fn identify(&self, socket: &UnixSeqpacket) -> Result<Candidate, AdmissionError> {
        let unreadable = |error: nix::Error| AdmissionError::Credentials(error.into());
        let credentials = getsockopt(socket, sockopt::PeerCredentials).map_err(unreadable)?;
        let (pid, uid) = (credentials.pid(), credentials.uid());
        if uid != self.uid {
            return Err(AdmissionError::Uid { pid, uid });
        }
        let process = self
            .needs_host_pid()
            .then(|| Process::of_peer(socket))
            .transpose()
            .map_err(|source| AdmissionError::Process { pid, source })?;
        Ok(Candidate { pid, process })
    }

    /// Decides by the process's current state and the known ztunnel pods.
    ///
    /// # Errors
    ///
    /// If the process may not receive descriptors; see [`AdmissionError::may_be_admitted_later`].
    pub fn admit(
        &self,
        candidate: &Candidate,
        ztunnels: Option<&BTreeSet<PodUid>>,
    ) -> Result<Peer, AdmissionError> {
        let pid = candidate.pid;
        let Some(process) = &candidate.process else {
            return Ok(Peer::from_pid(pid));
        };
        let unreadable = |source| AdmissionError::Process { pid, source };
        let (pid, cgroup) = process.read("cgroup").map_err(unreadable)?;
        let (_, status) = process.read("status").map_err(unreadable)?;
        let process = ProcessInfo {
            pid,
            cgroup,
            permitted: Capabilities::permitted(&status),
        };
        self.check(&process, ztunnels)
    }

    fn check(
        &self,
        process: &ProcessInfo,
        ztunnels: Option<&BTreeSet<PodUid>>,
    ) -> Result<Peer, AdmissionError> {
        let (pid, place) = (process.pid, Cgroup::parse(&process.cgroup));
        let cgroup = place.to_string();
        match &self.setting {
            Setting::Uid => Ok(Peer::from_pid(pid)),
            Setting::Cgroup(root) if place.is_below(root) => Ok(Peer {
                pid,
                cgroup: Some(cgroup),
                pod_uid: None,
            }),
            Setting::Cgroup(root) => Err(AdmissionError::WrongCgroup {
                pid,
                cgroup,
                root: root.clone(),
            }),
            Setting::Pod => {
                let uid = self.ztunnel(process, &cgroup, ztunnels)?;
                Ok(Peer {
                    pid,
                    cgroup: Some(cgroup),
                    pod_uid: Some(uid),
                })
            }
        }
    }

    /// Returns the process's pod if the pod is a known ztunnel.
    fn ztunnel(
        &self,
        process: &ProcessInfo,
        cgroup: &str,
        ztunnels: Option<&BTreeSet<PodUid>>,
    ) -> Result<PodUid, AdmissionError> {
        let (pid, cgroup) = (process.pid, cgroup.to_owned());
        let Some(place) = find_container(&process.cgroup) else {
            return Err(AdmissionError::NoPod { pid, cgroup });
        };
        if let Some(difference) = self.difference(process) {
            return Err(AdmissionError::Capabilities {
                pid,
                cgroup,
                difference,
            });
        }
        let Some(ztunnels) = ztunnels else {
            return Err(AdmissionError::ZtunnelsUnknown { pid, cgroup });
        };
        let is_there = |uid: &&PodUid| PodKey::from_uid(uid.as_str()) == Some(place.pod);
        let uid = ztunnels.iter().find(is_there).cloned();
        uid.ok_or(AdmissionError::NotZtunnel { pid, cgroup })
    }

    fn difference(&self, process: &ProcessInfo) -> Option<String> {
        match (self.capabilities, process.permitted) {
            (RequiredCapabilities::Any, _) => None,
            (RequiredCapabilities::Exactly(_), None) => Some("does not report them".to_owned()),
            (demand, Some(found)) => demand.difference(found),
        }
    }
}

struct ProcessInfo {
    pid: i32,
    cgroup: String,
    permitted: Option<Capabilities>,
}

#[cfg(test)]
mod tests;
