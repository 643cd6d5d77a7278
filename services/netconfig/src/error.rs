//! Why an operation failed: an enum for each, and the one place that says how it looks to a caller.

mod failure;

use std::io;

use inpod_linux::{EnterError, OpenError};
use inpod_types::{InvalidIdentifier, NetnsId, PodUid, SandboxRef};

pub(crate) use self::failure::{IntoFailure, reason_of_program};
pub use crate::{
    apply::NoIpv6, backend::BackendError, iptables::ProgramError, netlink::KernelError,
    probes::ProbeSetError,
};
use crate::{netns_session::ReachError, probes::SetAddressesError};

/// Why a redirection could not be applied.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The netns could not be reached.
    #[error("cannot apply the rules")]
    Reach(#[from] ReachError),
    /// Nothing can be redirected in a netns whose loopback interface is down.
    #[error("cannot apply the rules while `lo` is down in the netns: `ip link set lo up` there")]
    LoopbackDown(#[source] KernelError),
    /// IPv6 is to be captured where there is none.
    #[error(transparent)]
    NoIpv6(#[from] NoIpv6),
    /// The connections that go past ztunnel could not be counted; the rules are there.
    #[error("the rules are applied")]
    Inspect(#[from] InspectError),
    /// The pod's addresses could not be set_addresses in the node's probe set; nothing else was tried.
    #[error("cannot apply the rules")]
    ProbeSet {
        /// Why.
        source: ProbeSetError,
        /// What could not be put back after that.
        undo_failures: Vec<String>,
    },
    /// The kernel or a program refused.
    #[error("cannot apply the rules")]
    Backend {
        /// What it refused.
        source: BackendError,
        /// What could not be put back after that.
        undo_failures: Vec<String>,
    },
    /// The kernel took the rules and holds others.
    #[error("the kernel holds other rules than were written: {}", .differences.join("; "))]
    Differs {
        /// One sentence each.
        differences: Vec<String>,
        /// What could not be put back after that.
        undo_failures: Vec<String>,
    },
}

impl From<BackendError> for ApplyError {
    fn from(source: BackendError) -> Self {
        Self::Backend {
            source,
            undo_failures: Vec::new(),
        }
    }
}

impl From<SetAddressesError> for ApplyError {
    fn from(unnamed: SetAddressesError) -> Self {
        let SetAddressesError {
            cause,
            undo_failures,
        } = unnamed;
        Self::ProbeSet {
            source: cause,
            undo_failures,
        }
    }
}

impl From<KernelError> for ApplyError {
    fn from(source: KernelError) -> Self {
        BackendError::from(source).into()
    }
}

impl ApplyError {
    pub(crate) fn of_differences(differences: Vec<String>) -> Self {
        Self::Differs {
            differences,
            undo_failures: Vec::new(),
        }
    }

    pub(crate) fn with_undo_failures(mut self, failures: Vec<String>) -> Self {
        match &mut self {
            Self::Backend { undo_failures, .. }
            | Self::Differs { undo_failures, .. }
            | Self::ProbeSet { undo_failures, .. } => undo_failures.extend(failures),
            Self::Reach(_) | Self::LoopbackDown(_) | Self::NoIpv6(_) | Self::Inspect(_) => {
                for failure in failures {
                    tracing::warn!(failure, "Cannot undo a failed apply");
                }
            }
        }
        self
    }
}

/// Why a netns could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// The netns could not be reached.
    #[error("cannot read the rules")]
    Reach(#[from] ReachError),
    /// IPv6 is to be captured where there is none.
    #[error(transparent)]
    NoIpv6(#[from] NoIpv6),
    /// The kernel or a program refused.
    #[error("cannot read the rules")]
    Backend(#[from] BackendError),
}

/// Why a redirection could not be taken away.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// The netns could not be reached.
    #[error("cannot remove the rules")]
    Reach(#[from] ReachError),
    /// Its connections could not be counted.
    #[error("cannot remove the rules")]
    Inspect(#[from] InspectError),
    /// They could not be read.
    #[error("cannot remove the rules")]
    Backend(#[from] BackendError),
    /// They could not give way to those of the first phase.
    #[error("cannot remove the rules")]
    Drain(#[source] Box<ApplyError>),
    /// The pod's addresses are still in the node's probe set; the rules are gone.
    #[error("the rules are removed")]
    ProbeSet(#[from] ProbeSetError),
    /// What failed and what is left when it is read back, a sentence each.
    #[error("some rules were not removed: {}", .0.join("; "))]
    Left(Vec<String>),
}

impl From<KernelError> for RemoveError {
    fn from(source: KernelError) -> Self {
        BackendError::from(source).into()
    }
}

impl RemoveError {
    pub(crate) fn unless_empty(left: Vec<String>) -> Result<(), Self> {
        if left.is_empty() {
            Ok(())
        } else {
            Err(Self::Left(left))
        }
    }
}

/// Why a netns could not be looked into.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// It could not be entered.
    #[error("cannot inspect the netns")]
    Enter(#[from] EnterError),
    /// The kernel refused.
    #[error("cannot inspect the netns")]
    Kernel(#[from] KernelError),
    /// Something in it could not be read.
    #[error("cannot read {what} of the netns")]
    Read {
        /// What.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// Why a netns could not be claimed, or is not claimed.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// It could not be opened.
    #[error("cannot open the netns")]
    Open(#[from] OpenError),
    /// It could not be opened where it is said to be, and is alive.
    #[error("the netns is in use, but cannot be opened at its path")]
    Unreachable(#[source] OpenError),
    /// It could not be looked into.
    #[error("cannot validate the netns")]
    Inspect(#[from] InspectError),
    /// It is the node's own, or netconfig's.
    #[error("{0} is the node's own netns")]
    HostNetns(NetnsId),
    /// It is not what the caller means.
    #[error("found {found}, which is not the requested netns")]
    Mismatch {
        /// What is at the path.
        found: NetnsId,
    },
    /// The sandbox has another one, which is alive.
    #[error("the sandbox holds {held}, which is still in use, and the request names {found}")]
    Held {
        /// What it has.
        held: NetnsId,
        /// What is at the path.
        found: NetnsId,
    },
    /// Another sandbox has it.
    #[error("{found} is claimed for sandbox {other}")]
    InUse {
        /// What is at the path.
        found: NetnsId,
        /// Whose it is.
        other: SandboxRef,
    },
    /// It has none of the addresses.
    #[error("the netns holds {found}, none of the expected addresses")]
    Address {
        /// What it holds, as a list for people.
        found: String,
    },
    /// Nothing is claimed for the sandbox.
    #[error("no netns is claimed for sandbox {0}")]
    Unknown(SandboxRef),
}

/// Why a pod's netns could not be found, or not claimed.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The node's processes cannot be listed.
    #[error("cannot list the node's processes")]
    List(#[source] io::Error),
    /// None of the pod's processes is in a netns of the pod.
    #[error(
        "no process of pod {pod} is in a netns of its own that holds one of the pod's addresses{}",
        but(*.hidden, .others)
    )]
    Nowhere {
        /// The pod.
        pod: PodUid,
        /// How many of its processes cannot be inspected.
        hidden: usize,
        /// Why the netns that its processes are in are not its own, a sentence each.
        others: Vec<String>,
    },
    /// It was found, and could not be proven or claimed.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// It cannot be given a name.
    #[error("cannot name the sandbox")]
    Name(#[from] InvalidIdentifier),
}

/// What was seen instead.
fn but(hidden: usize, others: &[String]) -> String {
    let mut text = String::new();
    for other in others {
        text = format!("{text}; {other}");
    }
    if hidden > 0 {
        let needed = "CAP_SYS_PTRACE is needed";
        text = format!("{text}; {hidden} of its processes cannot be inspected ({needed})");
    }
    text
}
