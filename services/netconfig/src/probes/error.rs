use std::{io, net::IpAddr};

use inpod_types::{Reason, with_causes};

use super::selector::SelectError;
use crate::netlink::KernelError;

/// Why the node's probe set is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum ProbeSetError {
    /// The kernel refused.
    #[error("cannot change the node's probe set")]
    Kernel(#[from] KernelError),
    /// A program of iptables did not do it.
    #[error("cannot change the node's probe rule")]
    Run(#[from] RunError),
    /// It is not known whose packets are probes.
    #[error("cannot write the node's probe rule")]
    SelectError(#[from] SelectError),
    /// The node's cgroups cannot be seen as the node sees them.
    #[error("cannot write the node's probe rule from the node's cgroup namespace")]
    View(#[source] io::Error),
    /// The kernel took it and holds something else.
    #[error("the node's probe set differs from what was written: {}", .0.join("; "))]
    Differs(Vec<String>),
    /// The ip rules for a pod with an interface of AWS's own could not be changed.
    #[error("cannot change the ip rules of the node for probes of {address}")]
    BranchEni {
        /// The pod's address.
        address: IpAddr,
        /// The cause.
        source: KernelError,
    },
}

/// Why the node's probe set stays on it.
#[derive(Debug, thiserror::Error)]
pub enum ClearError {
    /// Pods are probed by it.
    #[error("{0} addresses of pods are in the node's probe set")]
    Held(usize),
    /// It could not be taken away.
    #[error(transparent)]
    ProbeSet(#[from] ProbeSetError),
}

impl ProbeSetError {
    pub(crate) fn unless_empty(differences: Vec<String>) -> Result<(), Self> {
        if differences.is_empty() {
            Ok(())
        } else {
            Err(Self::Differs(differences))
        }
    }

    /// The cause in the closed list.
    pub(crate) fn reason(&self) -> Reason {
        match self {
            Self::Run(error) => error.reason,
            Self::Kernel(_)
            | Self::SelectError(_)
            | Self::View(_)
            | Self::Differs(_)
            | Self::BranchEni { .. } => Reason::KernelRefused,
        }
    }
}

/// Why a program of iptables did not do what it was started for in the node's netns.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RunError {
    /// The cause in the closed list.
    pub reason: Reason,
    /// What it said.
    pub message: String,
}

/// A change of the probe set that failed, and what is left of it.
#[derive(Debug, thiserror::Error)]
#[error("{}", with_causes(cause))]
pub struct SetAddressesError {
    /// Why.
    pub cause: ProbeSetError,
    /// What could not be put back.
    pub undo_failures: Vec<String>,
}
