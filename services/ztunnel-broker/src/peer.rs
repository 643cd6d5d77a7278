//! Authentication of the processes that connect to the ZDS socket.
//!
//! An admitted process receives every pod's network namespace, so being root is not enough: the process's cgroup must
//! name a pod that pod-events reports as a ztunnel. The process is inspected through its pidfd.

use std::collections::BTreeSet;

use inpod_service::peer::{Cgroup, Process, Setting};
use inpod_types::{
    PodUid,
    cgroup::{PodKey, find_container},
    with_causes,
};
use nix::sys::socket::{getsockopt, sockopt};
use tokio_seqpacket::UnixSeqpacket;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The process ID, or 0 if the broker cannot see the process.
    pub pid: i32,
    /// The cgroup at the time of the connection; `None` if the policy does not check cgroups.
    pub cgroup: Option<String>,
    pub pod_uid: Option<PodUid>,
    pub ztunnel: Ztunnel,
}

/// The pod of a ztunnel, or the process if the pod is not known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ztunnel {
    /// The identity stays the same if the container restarts.
    Pod(PodUid),
    Process(i32),
}

impl Peer {
    pub fn from_pid(pid: i32) -> Self {
        Self::new(pid, None, None)
    }

    pub(crate) fn new(pid: i32, cgroup: Option<String>, pod_uid: Option<PodUid>) -> Self {
        let ztunnel = pod_uid.clone().map_or(Ztunnel::Process(pid), Ztunnel::Pod);
        Self {
            pid,
            cgroup,
            pod_uid,
            ztunnel,
        }
    }

    /// Returns the cgroup, or whatever else identifies the peer. Limits and log lines count by origin.
    pub fn origin(&self) -> String {
        let cgroup = self.cgroup.clone();
        cgroup.unwrap_or_else(|| format!("process {}", self.pid))
    }
}

/// A refusal of a peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct NotAdmitted {
    pub why: String,
    /// See [`Peer::origin`].
    pub origin: String,
    /// True if the peer would be admitted if pod-events reported its pod as a ztunnel.
    pub may_come: bool,
}

impl NotAdmitted {
    pub(crate) fn new(origin: impl Into<String>, why: impl Into<String>) -> Self {
        Self {
            why: why.into(),
            origin: origin.into(),
            may_come: false,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Policy {
    uid: u32,
    setting: Setting,
}

/// A connected process with the user ID of the broker.
#[derive(Debug)]
pub struct Candidate {
    pid: i32,
    /// `None` if the user ID is sufficient.
    process: Option<Process>,
}

impl Policy {
    /// Requires the broker's user ID in addition to the setting.
    pub fn new(setting: Setting) -> Self {
        Self {
            uid: nix::unistd::geteuid().as_raw(),
            setting,
        }
    }

    pub fn needs_host_pid(&self) -> bool {
        self.setting != Setting::Uid
    }

    /// Identifies the connected process.
    ///
    /// # Errors
    ///
    /// If the process has another user ID, or cannot be inspected.
    pub fn identify(&self, socket: &UnixSeqpacket) -> Result<Candidate, NotAdmitted> {
        let credentials = getsockopt(socket, sockopt::PeerCredentials).map_err(|error| {
            NotAdmitted::new("", format!("cannot read the peer's credentials: {error}"))
        })?;
        let (pid, uid) = (credentials.pid(), credentials.uid());
        if uid != self.uid {
            let why = format!("process {pid} has uid {uid}, not ours");
            return Err(NotAdmitted::new(format!("uid {uid}"), why));
        }
        let process = self.needs_host_pid().then(|| Process::of_peer(socket));
        let process = process.transpose();
        Ok(Candidate {
            pid,
            process: process.map_err(|error| not_inspected(pid, &error))?,
        })
    }

    /// Decides by the process's current cgroup and the known ztunnel pods.
    ///
    /// # Errors
    ///
    /// If the process may not receive descriptors.
    pub fn admit(
        &self,
        candidate: &Candidate,
        ztunnels: Option<&BTreeSet<PodUid>>,
    ) -> Result<Peer, NotAdmitted> {
        let pid = candidate.pid;
        let Some(process) = &candidate.process else {
            return Ok(Peer::from_pid(pid));
        };
        let read = process.read("cgroup");
        let (pid, cgroup) = read.map_err(|error| not_inspected(pid, &error))?;
        self.check(pid, &cgroup, ztunnels)
    }

    /// Checks a process by the text of its `/proc/<pid>/cgroup`.
    fn check(
        &self,
        pid: i32,
        text: &str,
        ztunnels: Option<&BTreeSet<PodUid>>,
    ) -> Result<Peer, NotAdmitted> {
        let place = Cgroup::parse(text);
        let cgroup = place.to_string();
        let refuse =
            |why: &str| NotAdmitted::new(&*cgroup, format!("process {pid} in {cgroup} {why}"));
        let pod_uid =
            match &self.setting {
                Setting::Uid => return Ok(Peer::from_pid(pid)),
                Setting::Cgroup(root) if place.is_below(root) => None,
                Setting::Cgroup(root) => return Err(refuse(&format!("is not at {root} or below"))),
                // The cgroup may name no pod, or several.
                Setting::Pod => match find_container(text) {
                    None => return Err(refuse("is in no pod's container")),
                    Some(container) => Some(find_ztunnel(container.pod, ztunnels).map_err(
                        |why| NotAdmitted {
                            may_come: true,
                            ..refuse(why)
                        },
                    )?),
                },
            };
        Ok(Peer::new(pid, Some(cgroup), pod_uid))
    }
}

/// The process may have ended, and its PID may have been reused.
fn not_inspected(pid: i32, error: &inpod_service::peer::Refused) -> NotAdmitted {
    let why = format!("cannot inspect process {pid}: {}", with_causes(error));
    NotAdmitted::new(format!("process {pid}"), why)
}

/// Returns the UID of a pod that pod-events reports as a ztunnel.
fn find_ztunnel(pod: PodKey, ztunnels: Option<&BTreeSet<PodUid>>) -> Result<PodUid, &'static str> {
    let Some(ztunnels) = ztunnels else {
        return Err("may be a ztunnel: pod-events has not reported this node's ztunnel pods yet");
    };
    let is_there = |uid: &&PodUid| PodKey::from_uid(uid.as_str()) == Some(pod);
    let uid = ztunnels.iter().find(is_there).cloned();
    uid.ok_or("is in a pod that is not a ztunnel of this node")
}

#[cfg(test)]
mod tests;
