//! Who may connect to ZDS.
//!
//! Whoever is admitted is given every pod's network, so a root process that sees the socket is not enough: its cgroup
//! must name a pod that pod-events says is a ztunnel, and it may do exactly what a ztunnel may. What is looked at is
//! the process that connected, through its pidfd.

use std::{collections::BTreeSet, io};

use inpod_service::peer::{Cgroup, Process, Refused, Setting};
use inpod_types::{
    PodUid,
    cgroup::{PodKey, place},
};
use nix::sys::socket::{getsockopt, sockopt};
use tokio_seqpacket::UnixSeqpacket;

use crate::capabilities::{Capabilities, RequiredCapabilities};

/// A process that may be given descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its pid as the broker sees it; 0 when it is not visible from here.
    pub pid: i32,
    /// Its cgroup when it connected; `None` where that is not looked at.
    pub cgroup: Option<String>,
    /// The pod that its cgroup names.
    pub pod_uid: Option<PodUid>,
}

/// Which ztunnel a process is: its pod's, or itself where no pod is seen.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ztunnel {
    /// The container may start anew in it.
    Pod(PodUid),
    /// By its pid.
    Process(i32),
}

impl Peer {
    /// Which ztunnel it is.
    pub fn ztunnel(&self) -> Ztunnel {
        let process = Ztunnel::Process(self.pid);
        self.pod_uid.clone().map_or(process, Ztunnel::Pod)
    }

    /// A process of which no more is known.
    pub fn from_pid(pid: i32) -> Self {
        Self {
            pid,
            cgroup: None,
            pod_uid: None,
        }
    }
}

/// Why a connection is not served.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// The kernel does not say who it is.
    #[error("cannot read the peer's credentials")]
    Credentials(#[source] io::Error),
    /// Another user.
    #[error("process {pid} has uid {uid}, not ours")]
    Uid {
        /// Its pid.
        pid: i32,
        /// Its uid.
        uid: u32,
    },
    /// It cannot be looked at. It may have ended, and what its pid shows be another process.
    #[error("cannot inspect process {pid}")]
    Process {
        /// The pid that it connected with.
        pid: i32,
        /// The cause.
        source: Refused,
    },
    /// It is not where a ztunnel has to be.
    #[error("process {pid} in {cgroup} is not at {root} or below")]
    WrongCgroup {
        /// Its pid.
        pid: i32,
        /// Its cgroup.
        cgroup: String,
        /// Where it has to be.
        root: String,
    },
    /// It is in no pod, or it cannot be told in which.
    #[error("process {pid} in {cgroup} is in no pod's container")]
    NoPod {
        /// Its pid.
        pid: i32,
        /// Its cgroup.
        cgroup: String,
    },
    /// It may do more or less than a ztunnel.
    #[error(
        "process {pid} in {cgroup} does not have the capabilities of a ztunnel: it {difference}"
    )]
    Capabilities {
        /// Its pid.
        pid: i32,
        /// Its cgroup.
        cgroup: String,
        /// What it has too many or too few.
        difference: String,
    },
    /// Its pod is none of those that are ztunnels.
    #[error("process {pid} in {cgroup} is in a pod that is not a ztunnel of this node")]
    NotZtunnel {
        /// Its pid.
        pid: i32,
        /// Its cgroup.
        cgroup: String,
    },
    /// Nobody has said which pods are ztunnels.
    #[error(
        "process {pid} in {cgroup} may be a ztunnel: pod-events has not reported this node's ztunnel pods yet"
    )]
    ZtunnelsUnknown {
        /// Its pid.
        pid: i32,
        /// Its cgroup.
        cgroup: String,
    },
    /// There are as many as there may be.
    #[error("process {pid}{}: too many connections", .cgroup.as_ref().map(|it| format!(" in {it}")).unwrap_or_default())]
    TooManyConnections {
        /// Its pid.
        pid: i32,
        /// Its cgroup, where that is looked at.
        cgroup: Option<String>,
    },
}

impl AdmissionError {
    /// Whether another word of pod-events would make it welcome.
    pub fn may_be_admitted_later(&self) -> bool {
        matches!(self, Self::NotZtunnel { .. } | Self::ZtunnelsUnknown { .. })
    }

    /// Where it is, or what else tells it from others.
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

/// What a process must be to be a ztunnel.
#[derive(Clone, Debug)]
pub struct Policy {
    uid: u32,
    setting: Setting,
    capabilities: RequiredCapabilities,
}

/// One that has connected and has our user id.
#[derive(Debug)]
pub struct Candidate {
    pid: i32,
    /// `None` where the user id is enough.
    process: Option<Process>,
}

impl Policy {
    /// As configured. The user id is ours in any case.
    pub fn new(setting: Setting, capabilities: RequiredCapabilities) -> Self {
        Self {
            uid: nix::unistd::geteuid().as_raw(),
            setting,
            capabilities,
        }
    }

    /// Whoever has our user id: for demos, and for development.
    pub fn same_uid() -> Self {
        Self::new(Setting::Uid, RequiredCapabilities::Any)
    }

    /// Whether pids of peers must be seen.
    pub fn needs_host_pid(&self) -> bool {
        self.setting != Setting::Uid
    }

    /// Finds out which process connected.
    ///
    /// # Errors
    ///
    /// When it has another uid or cannot be seen.
    pub fn identify(&self, socket: &UnixSeqpacket) -> Result<Candidate, AdmissionError> {
        let unreadable = |error: nix::Error| AdmissionError::Credentials(error.into());
        let credentials = getsockopt(socket, sockopt::PeerCredentials).map_err(unreadable)?;
        let (pid, uid) = (credentials.pid(), credentials.uid());
        if uid != self.uid {
            return Err(AdmissionError::Uid { pid, uid });
        }
        let process = self
            .needs_host_pid()
            .then(|| Process::behind(socket))
            .transpose()
            .map_err(|source| AdmissionError::Process { pid, source })?;
        Ok(Candidate { pid, process })
    }

    /// Whether it may be given descriptors, by what it is now and by what was said of ztunnels so far.
    ///
    /// # Errors
    ///
    /// When it may not; see [`Impostor::may_be_welcome_later`].
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

    /// The pod, if it is a ztunnel's.
    fn ztunnel(
        &self,
        process: &ProcessInfo,
        cgroup: &str,
        ztunnels: Option<&BTreeSet<PodUid>>,
    ) -> Result<PodUid, AdmissionError> {
        let (pid, cgroup) = (process.pid, cgroup.to_owned());
        let Some(place) = place(&process.cgroup) else {
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
        let is_there = |uid: &&PodUid| PodKey::of(uid.as_str()) == Some(place.pod);
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

/// What procfs tells of a process.
struct ProcessInfo {
    pid: i32,
    /// The text of its `cgroup`.
    cgroup: String,
    permitted: Option<Capabilities>,
}

#[cfg(test)]
mod tests;
