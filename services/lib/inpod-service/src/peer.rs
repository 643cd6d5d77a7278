//! Identifies the peer of a Unix socket, and decides which classes of RPCs the peer may call.
//!
//! The user id proves nothing, because any root process in a container that sees a socket can connect. A peer is
//! identified by the cgroup of its process, read through a pidfd, for which no recycled pid can stand in.

mod process;

pub use process::Process;

use std::{
    fmt, fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    str::FromStr,
};

use inpod_proto::Class;
pub use inpod_types::cgroup::Cgroup;
use inpod_types::{Failure, Reason, cgroup::HostCgroup};
use nix::sys::socket::{getsockopt, sockopt};
use tonic::Status;

use crate::throttle_log;

/// The setting `peer`, which determines how inpod's services are identified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Services run in the same pod, identified by its cgroup.
    Pod,
    /// Services run in the named cgroup or below.
    Cgroup(String),
    /// Services are identified by the user id alone.
    Uid,
}

impl FromStr for Setting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "pod" => Ok(Self::Pod),
            None if text == "uid" => Ok(Self::Uid),
            Some(("cgroup", path)) if path.starts_with('/') => Ok(Self::Cgroup(path.to_owned())),
            Some(_) | None => Err(format!("\"{text}\" is not pod, cgroup:/PATH or uid")),
        }
    }
}

/// The rules by which services and host processes are recognized.
#[derive(Debug)]
pub struct Policy {
    uid: u32,
    service: Service,
    /// The cgroups of host processes in addition to the known names.
    host_cgroups: Vec<HostCgroup>,
    /// Asks the kernel for the pidfd of a peer; replaced in tests.
    pidfd_of: fn(BorrowedFd<'_>) -> nix::Result<OwnedFd>,
}

#[derive(Debug)]
enum Service {
    /// The pod cgroup of a service. `None` means that this process sees its own cgroup as the root.
    Pod(Option<String>),
    /// The cgroup of services, which are there or below.
    Below(String),
    /// Any process with this user id is both host process and service, for demos and development.
    Anyone,
}

/// Reasons why a setting yields no policy.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    #[error("cannot read /proc/self/cgroup")]
    Read(#[source] io::Error),
    /// The setting is `pod`, but this process runs outside of a pod.
    #[error(
        "setting peer = pod, but this process is not in the cgroup of a pod; use cgroup:PATH or, to try inpod, uid"
    )]
    NotInPod,
}

/// An identified peer and its rights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The pid in the pid namespace of this process.
    pub pid: i32,
    pub uid: u32,
    /// The cgroup at the connect, or `None` if the policy does not read cgroups.
    cgroup: Option<Cgroup>,
    host: bool,
    service: bool,
}

impl Peer {
    pub fn may_call(&self, class: Class) -> bool {
        match class {
            Class::Read => self.host || self.service,
            Class::Cni | Class::Operator => self.host,
            Class::Service => self.service,
        }
    }

    #[cfg(test)]
    pub(crate) fn of_test(pid: i32, is_service: bool) -> Self {
        Self {
            pid,
            service: is_service,
            host: !is_service,
            ..UNKNOWN_PEER
        }
    }

    /// Returns whether the peer is a service and not, as with the policy `uid`, possibly any host process.
    pub(crate) fn is_only_service(&self) -> bool {
        self.service && !self.host
    }

    /// Returns how to permit the call if the peer may be a process of the node with an unknown cgroup.
    fn remedy(&self, class: Class) -> Option<String> {
        let is_open_to_host = class != Class::Service;
        let cgroup = self.cgroup.as_ref().filter(|_| is_open_to_host)?;
        (!self.host && !cgroup.names_workload()).then(|| {
            format!(
                "{cgroup} is not known to be a cgroup of the node; the setting host_cgroups can name such a cgroup"
            )
        })
    }

    /// Logs and rejects a call of a class for which the peer has no right. Repeated refusals of a call are only counted.
    ///
    /// # Errors
    ///
    /// Fails with PERMISSION_DENIED and the reason CALLER_REFUSED.
    pub fn require(&self, class: Class, call: &str) -> Result<(), Status> {
        if self.may_call(class) {
            return Ok(());
        }
        let cgroup = self.cgroup.as_ref().map(ToString::to_string);
        let remedy = self.remedy(class);
        if let Some(suppressed) = throttle_log(&format!("{call} {cgroup:?}")) {
            tracing::warn!(
                uid = self.uid,
                pid = self.pid,
                cgroup = cgroup.as_deref().map(tracing::field::display),
                ?class,
                remedy,
                suppressed,
                "Refused a caller"
            );
        }
        let mut message = format!("{self} may not make calls of class {class:?}");
        if let Some(remedy) = remedy {
            message = format!("{message}: {remedy}");
        }
        Err(inpod_proto::into_status(&Failure::new(
            Reason::CallerRefused,
            message,
        )))
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of uid {}", self.pid, self.uid)
    }
}

pub fn of_request<T>(request: &tonic::Request<T>) -> Peer {
    request
        .extensions()
        .get::<Peer>()
        .cloned()
        .unwrap_or(UNKNOWN_PEER)
}

/// A peer that could not be identified and may call nothing.
pub(crate) const UNKNOWN_PEER: Peer = Peer {
    pid: 0,
    uid: u32::MAX,
    cgroup: None,
    host: false,
    service: false,
};

/// Reasons for rejecting a peer.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The kernel reports no credentials of the peer.
    #[error("cannot identify the peer")]
    Unseen(#[source] io::Error),
    /// The process is in an invisible pid namespace, or has exited.
    #[error("the peer's process is not visible from here; run in the host's pid namespace")]
    Invisible,
    /// The process has another user id.
    #[error("the peer has uid {0}")]
    Uid(u32),
    /// The peer is not authorized for the class of the call.
    #[error("{0} may not make calls of class {1:?}")]
    Class(Peer, Class),
}

impl Policy {
    pub(crate) fn new(
        setting: &Setting,
        host_cgroups: Vec<HostCgroup>,
    ) -> Result<Self, PolicyError> {
        let service = match setting {
            Setting::Uid => Service::Anyone,
            Setting::Cgroup(path) => Service::Below(path.clone()),
            Setting::Pod => {
                let text = fs::read_to_string("/proc/self/cgroup").map_err(PolicyError::Read)?;
                own_pod(&Cgroup::parse(&text))?
            }
        };
        Ok(Self {
            uid: nix::unistd::geteuid().as_raw(),
            service,
            host_cgroups,
            pidfd_of,
        })
    }

    /// Returns the policy `uid`, which admits all processes with this user id, for tests.
    pub fn same_uid() -> Self {
        Self {
            uid: nix::unistd::geteuid().as_raw(),
            service: Service::Anyone,
            host_cgroups: Vec::new(),
            pidfd_of,
        }
    }

    /// Identifies the peer of a connected socket.
    ///
    /// # Errors
    ///
    /// Fails if the peer cannot be identified, or has another user id.
    pub fn identify(&self, socket: impl AsFd) -> Result<Peer, Refused> {
        let unseen = |error: nix::Error| Refused::Unseen(error.into());
        let credentials = getsockopt(&socket, sockopt::PeerCredentials).map_err(unseen)?;
        if credentials.uid() != self.uid {
            return Err(Refused::Uid(credentials.uid()));
        }
        let peer = Peer {
            pid: credentials.pid(),
            uid: credentials.uid(),
            cgroup: None,
            host: true,
            service: true,
        };
        if matches!(self.service, Service::Anyone) {
            return Ok(peer);
        }
        let (pid, cgroup) = cgroup_of((self.pidfd_of)(socket.as_fd()), credentials.pid())?;
        Ok(Peer {
            pid,
            host: cgroup.is_host(&self.host_cgroups),
            service: self.is_service(&cgroup),
            cgroup: Some(cgroup),
            ..peer
        })
    }

    /// Identifies a peer and checks its right to call RPCs of the class.
    ///
    /// # Errors
    ///
    /// See [`Refused`] for the reasons.
    pub fn authorize(&self, socket: impl AsFd, class: Class) -> Result<Peer, Refused> {
        let peer = self.identify(socket)?;
        if peer.may_call(class) {
            Ok(peer)
        } else {
            Err(Refused::Class(peer, class))
        }
    }

    fn is_service(&self, cgroup: &Cgroup) -> bool {
        match &self.service {
            Service::Anyone => true,
            Service::Below(root) => cgroup.is_below(root),
            Service::Pod(Some(own)) => cgroup.pod().as_ref() == Some(own),
            // Within a cgroup namespace, the containers of a pod are siblings.
            Service::Pod(None) => cgroup.pod().as_deref() == Some("/.."),
        }
    }
}

fn own_pod(cgroup: &Cgroup) -> Result<Service, PolicyError> {
    match cgroup.pod() {
        Some(pod) => Ok(Service::Pod(Some(pod))),
        None if cgroup.is_below("")
            && !std::path::Path::new("/var/run/secrets/kubernetes.io").exists() =>
        {
            Err(PolicyError::NotInPod)
        }
        None => Ok(Service::Pod(None)),
    }
}

fn pidfd_of(socket: BorrowedFd<'_>) -> nix::Result<OwnedFd> {
    getsockopt(&socket, sockopt::PeerPidfd)
}

fn cgroup_of(pidfd: nix::Result<OwnedFd>, credentials_pid: i32) -> Result<(i32, Cgroup), Refused> {
    let process = Process::new(pidfd, credentials_pid)?;
    let (pid, text) = process.read("cgroup")?;
    Ok((pid, Cgroup::parse(&text)))
}

#[cfg(test)]
mod tests;
