//! Who is on the other end of a Unix socket, and whether they may call.
//!
//! The user id alone proves nothing: any root process in any container that sees a socket can connect. A peer is
//! proven by its process's cgroup, read through a pidfd so that a recycled pid cannot stand in for it.

mod process;

pub use process::Process;

use std::{
    fmt, fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    str::FromStr,
};

use inpod_proto::Class;
use inpod_types::{Failure, Reason};
use nix::sys::socket::{getsockopt, sockopt};
use tonic::Status;

pub use crate::cgroup::Cgroup;

/// How a peer is proven, as configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Setting {
    /// By the pod that its cgroup names.
    Pod,
    /// By a cgroup: it is there or below.
    Cgroup(String),
    /// By its user id alone.
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

/// Who counts as a service of inpod, and as a host process.
#[derive(Debug)]
pub struct Policy {
    uid: u32,
    service: Service,
    /// How the kernel is asked for a peer's pidfd.
    pidfd_of: fn(BorrowedFd<'_>) -> nix::Result<OwnedFd>,
}

#[derive(Debug)]
enum Service {
    /// The peer's pod cgroup equals this one. `None`: this process sees its own cgroup as the root.
    Pod(Option<String>),
    /// The peer is at this path or below.
    Below(String),
    /// Whoever has this process's user id, host process and service alike. For demos and development.
    Anyone,
}

/// Why there is no policy.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// This process's own cgroup cannot be read.
    #[error("cannot read /proc/self/cgroup")]
    Read(#[source] io::Error),
    /// The policy `pod` outside of a pod.
    #[error(
        "setting peer = pod, but this process is in no pod's cgroup; set it to cgroup:PATH or, to try inpod, to uid"
    )]
    NotInPod,
}

/// A process that may connect, and what it may call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its pid as this process sees it.
    pub pid: i32,
    /// Its user id.
    pub uid: u32,
    /// Where it ran when it connected; `None` where the policy does not look.
    cgroup: Option<Cgroup>,
    host: bool,
    service: bool,
}

impl Peer {
    /// Whether it may make a call of a class.
    pub fn may_call(&self, class: Class) -> bool {
        match class {
            Class::Read => self.host || self.service,
            Class::Cni | Class::Operator => self.host,
            Class::Service => self.service,
        }
    }

    /// Refuses a call of a class that the peer may not make, audited.
    ///
    /// # Errors
    ///
    /// PERMISSION_DENIED with CALLER_REFUSED.
    pub fn require(&self, class: Class) -> Result<(), Status> {
        if self.may_call(class) {
            return Ok(());
        }
        let cgroup = self.cgroup.as_ref().map(tracing::field::display);
        tracing::warn!(
            uid = self.uid,
            pid = self.pid,
            cgroup,
            ?class,
            "Refused a caller"
        );
        let message = format!("{self} may not make calls of class {class:?}");
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

/// The peer of a gRPC call.
pub fn of_request<T>(request: &tonic::Request<T>) -> Peer {
    request
        .extensions()
        .get::<Peer>()
        .cloned()
        .unwrap_or(NOBODY)
}

/// Who a call without a known peer is from: may do nothing.
pub(crate) const NOBODY: Peer = Peer {
    pid: 0,
    uid: u32::MAX,
    cgroup: None,
    host: false,
    service: false,
};

/// Why a peer is sent away.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The kernel does not say who it is.
    #[error("cannot see the peer")]
    Unseen(#[source] io::Error),
    /// It is in a pid namespace that this process does not see, or has ended.
    #[error("the peer's process is not visible from here; run with the host's pids")]
    Invisible,
    /// It has another user id.
    #[error("the peer has uid {0}")]
    Uid(u32),
    /// It may not make calls of the class.
    #[error("{0} may not make calls of class {1:?}")]
    Class(Peer, Class),
}

impl Policy {
    pub(crate) fn new(setting: &Setting) -> Result<Self, PolicyError> {
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
            pidfd_of,
        })
    }

    /// The policy `uid`: whoever has this process's user id. For tests.
    pub fn same_uid() -> Self {
        Self {
            uid: nix::unistd::geteuid().as_raw(),
            service: Service::Anyone,
            pidfd_of,
        }
    }

    /// Finds out who is on the other end of a connected socket.
    ///
    /// # Errors
    ///
    /// When it cannot be seen, or has another user id.
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
            host: cgroup.is_host(),
            service: self.is_service(&cgroup),
            cgroup: Some(cgroup),
            ..peer
        })
    }

    /// Finds out who is on the other end, and refuses whoever may not make calls of a class.
    ///
    /// # Errors
    ///
    /// See [`Refused`].
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
            // Seen from a cgroup namespace, containers of the same pod are siblings.
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

/// The peer's pid and cgroup.
fn cgroup_of(pidfd: nix::Result<OwnedFd>, credentials_pid: i32) -> Result<(i32, Cgroup), Refused> {
    let process = Process::new(pidfd, credentials_pid)?;
    let (pid, text) = process.read("cgroup")?;
    Ok((pid, Cgroup::parse(&text)))
}

#[cfg(test)]
mod tests;
