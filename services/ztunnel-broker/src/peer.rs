//! Who may connect to ZDS.

use std::io;

use tokio_seqpacket::UnixSeqpacket;
use workload::PodUid;

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

impl Peer {
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
}

/// Demands the broker's own uid. That keeps other users out, and proves no more than that: any root process that sees
/// the socket passes. Issue 5 demands a ztunnel pod's cgroup and capabilities as well.
///
/// # Errors
///
/// When the peer has another uid or cannot be seen.
pub fn admit(socket: &UnixSeqpacket) -> Result<Peer, Impostor> {
    let credentials = socket.peer_cred().map_err(Impostor::Unseen)?;
    let pid = credentials.pid().unwrap_or(0);
    let uid = credentials.uid();
    if uid != nix::unistd::geteuid().as_raw() {
        return Err(Impostor::Uid { pid, uid });
    }
    Ok(Peer::of_pid(pid))
}
