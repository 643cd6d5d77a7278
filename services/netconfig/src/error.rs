//! Errors of each operation; `failure` maps the errors to failures for callers.

mod failure;
mod probes;

use std::io;

use inpod_linux::OpenError;
use inpod_types::{InvalidIdentifier, NetnsId, PodUid, SandboxRef};

pub(crate) use self::failure::IntoFailure;
use crate::netns_session::ReachError;
pub use crate::{inspect::InspectError, netlink::KernelError, routes::Blocked};
pub use probes::{ClearError, ProbeSetError, SetAddressesError};

#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    #[error("cannot apply the rules")]
    Reach(#[from] ReachError),
    #[error(transparent)]
    NoIpv6(#[from] NoIpv6),
    /// The rules are applied, but connections bypassing ztunnel could not be counted.
    #[error("the rules are applied")]
    Inspect(#[from] InspectError),
    /// Foreign routing is in the way; no rules were written.
    #[error("cannot apply the rules")]
    Blocked(#[from] Blocked),
    /// ztunnel does not listen where the rules would lead; no rules were written.
    #[error("cannot apply the rules")]
    Listeners(#[from] ListenerError),
    /// The addresses could not be added to the node's probe set; no rules were written.
    #[error("cannot apply the rules")]
    ProbeSet {
        source: ProbeSetError,
        undo_failures: Vec<String>,
    },
    #[error("cannot apply the rules")]
    Kernel {
        source: KernelError,
        undo_failures: Vec<String>,
    },
    /// The kernel accepted the rules, but reading back shows other rules.
    #[error("the kernel holds other rules than were written: {}", .differences.join("; "))]
    Differs {
        /// A sentence per difference between expected and observed rules.
        differences: Vec<String>,
        undo_failures: Vec<String>,
    },
}

impl From<KernelError> for ApplyError {
    fn from(source: KernelError) -> Self {
        Self::Kernel {
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

/// Fails with the sentences, if there are any.
pub(crate) fn require_none<E>(
    sentences: Vec<String>,
    error: impl FnOnce(Vec<String>) -> E,
) -> Result<(), E> {
    if sentences.is_empty() {
        Ok(())
    } else {
        Err(error(sentences))
    }
}

impl ApplyError {
    pub(crate) fn differs(differences: Vec<String>) -> Self {
        Self::Differs {
            differences,
            undo_failures: Vec::new(),
        }
    }

    pub(crate) fn with_undo_failures(mut self, failures: Vec<String>) -> Self {
        match &mut self {
            Self::Kernel { undo_failures, .. }
            | Self::Differs { undo_failures, .. }
            | Self::ProbeSet { undo_failures, .. } => undo_failures.extend(failures),
            Self::Reach(_)
            | Self::NoIpv6(_)
            | Self::Inspect(_)
            | Self::Blocked(_)
            | Self::Listeners(_) => {
                for failure in failures {
                    tracing::warn!(failure, "Cannot undo a failed apply");
                }
            }
        }
        self
    }
}

/// The error of a redirection to ports without ztunnel, or with another listener.
#[derive(Debug, thiserror::Error)]
pub enum ListenerError {
    #[error("{0}")]
    Missing(String),
    #[error("{0}")]
    Taken(String),
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// The error of a redirection that requires IPv6 capture in a netns without IPv6.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("IPv6 capture is requested, but IPv6 is disabled in the netns")]
pub struct NoIpv6;

#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    #[error("cannot read the rules")]
    Reach(#[from] ReachError),
    #[error(transparent)]
    NoIpv6(#[from] NoIpv6),
    #[error("cannot read the rules")]
    Kernel(#[from] KernelError),
}

#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    #[error("cannot remove the rules")]
    Reach(#[from] ReachError),
    #[error("cannot remove the rules")]
    Inspect(#[from] InspectError),
    #[error("cannot remove the rules")]
    Kernel(#[from] KernelError),
    #[error("cannot remove the rules")]
    Drain(#[source] Box<ApplyError>),
    /// The rules are removed, but the addresses are still in the node's probe set.
    #[error("the rules are removed")]
    ProbeSet(#[from] ProbeSetError),
    /// A sentence per failed step, and per rule left in the kernel.
    #[error("some rules were not removed: {}", .0.join("; "))]
    Left(Vec<String>),
}

#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    #[error("cannot open the netns")]
    Open(#[from] OpenError),
    /// The netns cannot be opened at the path, but processes use the netns.
    #[error("the netns is in use, but cannot be opened at its path")]
    Unreachable(#[source] OpenError),
    #[error("cannot validate the netns")]
    Inspect(#[from] InspectError),
    /// The netns is the node's own, or netconfig's.
    #[error("{0} is the node's own netns")]
    HostNetns(NetnsId),
    /// The netns at the path is not the one identified by the caller.
    #[error("found {found}, which is not the requested netns")]
    Mismatch { found: NetnsId },
    /// The sandbox holds another netns, which is still in use.
    #[error("the sandbox holds {held}, which is still in use, and the request names {found}")]
    Held { held: NetnsId, found: NetnsId },
    #[error("{found} is claimed for sandbox {other}")]
    InUse { found: NetnsId, other: SandboxRef },
    /// The netns has none of the expected addresses.
    #[error("the netns holds {found}, none of the expected addresses")]
    Address { found: String },
    #[error("no netns is claimed for sandbox {0}")]
    Unknown(SandboxRef),
}

#[derive(Debug, thiserror::Error)]
pub enum FindError {
    #[error("cannot list the node's processes")]
    List(#[source] io::Error),
    #[error(
        "no process of pod {pod} is in a netns of its own that holds one of the pod's addresses{}",
        describe_rejected(*.hidden, .others)
    )]
    Nowhere {
        pod: PodUid,
        /// The number of the pod's processes that netconfig could not inspect.
        hidden: usize,
        /// A sentence per rejected netns.
        others: Vec<String>,
    },
    /// A netns that the pod made for itself resembles the pod's own.
    #[error(
        "pod {pod} has two netns with its address: of process {} and of process {}",
        .processes[0], .processes[1]
    )]
    Ambiguous { pod: PodUid, processes: [u32; 2] },
    /// The netns was found, but could not be validated or claimed.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error("cannot name the sandbox")]
    Name(#[from] InvalidIdentifier),
    #[error(transparent)]
    Rules(#[from] VerifyError),
}

fn describe_rejected(hidden: usize, others: &[String]) -> String {
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
