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

use crate::capabilities::{Capabilities, Demand};

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
    pub fn of_pid(pid: i32) -> Self {
        Self {
            pid,
            cgroup: None,
            pod_uid: None,
        }
    }
}

/// Why a connection is not served.
#[derive(Debug, thiserror::Error)]
pub enum Impostor {
    /// The kernel does not say who it is.
    #[error("cannot see who connected")]
    Unseen(#[source] io::Error),
    /// Another user.
    #[error("process {pid} has uid {uid}, not ours")]
    Uid {
        /// Its pid.
        pid: i32,
        /// Its uid.
        uid: u32,
    },
    /// It cannot be looked at. It may have ended, and what its pid shows be another process.
    #[error("cannot look at process {pid}")]
    Process {
        /// The pid that it connected with.
        pid: i32,
        /// The cause.
        source: Refused,
    },
    /// It is not where a ztunnel has to be.
    #[error("process {pid} in {cgroup} is not at {root} or below")]
    Elsewhere {
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
    #[error("process {pid} in {cgroup} has not the capabilities of a ztunnel: it {difference}")]
    Capabilities {
        /// Its pid.
        pid: i32,
        /// Its cgroup.
        cgroup: String,
        /// What it has too many or too few.
        difference: String,
    },
    /// Its pod is none of those that are ztunnels.
    #[error("process {pid} in {cgroup} is in a pod that is no ztunnel of this node")]
    OtherPod {
        /// Its pid.
        pid: i32,
        /// Its cgroup.
        cgroup: String,
    },
    /// Nobody has said which pods are ztunnels.
    #[error("process {pid} in {cgroup} may be a ztunnel: pod-events has not said which pods are")]
    Unsaid {
        /// Its pid.
        pid: i32,
        /// Its cgroup.
        cgroup: String,
    },
    /// There are as many as there may be.
    #[error("process {pid}{}: too many connections", .cgroup.as_ref().map(|it| format!(" in {it}")).unwrap_or_default())]
    TooMany {
        /// Its pid.
        pid: i32,
        /// Its cgroup, where that is looked at.
        cgroup: Option<String>,
    },
}

impl Impostor {
    /// Whether another word of pod-events would make it welcome.
    pub fn may_be_welcome_later(&self) -> bool {
        matches!(self, Self::OtherPod { .. } | Self::Unsaid { .. })
    }

    /// Where it is, or what else tells it from others.
    pub fn whence(&self) -> String {
        match self {
            Self::Unseen(_) => String::new(),
            Self::Uid { uid, .. } => format!("uid {uid}"),
            Self::Process { pid, .. } | Self::TooMany { pid, cgroup: None } => {
                format!("process {pid}")
            }
            Self::Elsewhere { cgroup, .. }
            | Self::NoPod { cgroup, .. }
            | Self::Capabilities { cgroup, .. }
            | Self::OtherPod { cgroup, .. }
            | Self::Unsaid { cgroup, .. }
            | Self::TooMany {
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
    capabilities: Demand,
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
    pub fn new(setting: Setting, capabilities: Demand) -> Self {
        Self {
            uid: nix::unistd::geteuid().as_raw(),
            setting,
            capabilities,
        }
    }

    /// Whoever has our user id: for demos, and for development.
    pub fn same_uid() -> Self {
        Self::new(Setting::Uid, Demand::Any)
    }

    /// Whether pids of peers must be seen.
    pub fn looks_at_pids(&self) -> bool {
        self.setting != Setting::Uid
    }

    /// Finds out which process connected.
    ///
    /// # Errors
    ///
    /// When it has another uid or cannot be seen.
    pub fn look(&self, socket: &UnixSeqpacket) -> Result<Candidate, Impostor> {
        let unseen = |error: nix::Error| Impostor::Unseen(error.into());
        let credentials = getsockopt(socket, sockopt::PeerCredentials).map_err(unseen)?;
        let (pid, uid) = (credentials.pid(), credentials.uid());
        if uid != self.uid {
            return Err(Impostor::Uid { pid, uid });
        }
        let process = self
            .looks_at_pids()
            .then(|| Process::behind(socket))
            .transpose()
            .map_err(|source| Impostor::Process { pid, source })?;
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
    ) -> Result<Peer, Impostor> {
        let pid = candidate.pid;
        let Some(process) = &candidate.process else {
            return Ok(Peer::of_pid(pid));
        };
        let unseen = |source| Impostor::Process { pid, source };
        let (pid, cgroup) = process.read("cgroup").map_err(unseen)?;
        let (_, status) = process.read("status").map_err(unseen)?;
        let seen = Seen {
            pid,
            cgroup,
            permitted: Capabilities::permitted(&status),
        };
        self.judge(&seen, ztunnels)
    }

    fn judge(&self, seen: &Seen, ztunnels: Option<&BTreeSet<PodUid>>) -> Result<Peer, Impostor> {
        let (pid, place) = (seen.pid, Cgroup::parse(&seen.cgroup));
        let cgroup = place.to_string();
        match &self.setting {
            Setting::Uid => Ok(Peer::of_pid(pid)),
            Setting::Cgroup(root) if place.is_below(root) => Ok(Peer {
                pid,
                cgroup: Some(cgroup),
                pod_uid: None,
            }),
            Setting::Cgroup(root) => Err(Impostor::Elsewhere {
                pid,
                cgroup,
                root: root.clone(),
            }),
            Setting::Pod => {
                let uid = self.ztunnel(seen, &cgroup, ztunnels)?;
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
        seen: &Seen,
        cgroup: &str,
        ztunnels: Option<&BTreeSet<PodUid>>,
    ) -> Result<PodUid, Impostor> {
        let (pid, cgroup) = (seen.pid, cgroup.to_owned());
        let Some(place) = place(&seen.cgroup) else {
            return Err(Impostor::NoPod { pid, cgroup });
        };
        if let Some(difference) = self.difference(seen) {
            return Err(Impostor::Capabilities {
                pid,
                cgroup,
                difference,
            });
        }
        let Some(ztunnels) = ztunnels else {
            return Err(Impostor::Unsaid { pid, cgroup });
        };
        let is_there = |uid: &&PodUid| PodKey::of(uid.as_str()) == Some(place.pod);
        let uid = ztunnels.iter().find(is_there).cloned();
        uid.ok_or(Impostor::OtherPod { pid, cgroup })
    }

    fn difference(&self, seen: &Seen) -> Option<String> {
        match (self.capabilities, seen.permitted) {
            (Demand::Any, _) => None,
            (Demand::Exactly(_), None) => Some("does not show them".to_owned()),
            (demand, Some(found)) => demand.difference(found),
        }
    }
}

/// What procfs tells of a process.
struct Seen {
    pid: i32,
    /// The text of its `cgroup`.
    cgroup: String,
    permitted: Option<Capabilities>,
}

#[cfg(test)]
mod tests;
