use std::{io, net::IpAddr};

use inpod_types::{Reason, with_causes};

use super::selector::SelectError;
use crate::netlink::KernelError;

/// An error of writing the node's probe set or its rule.
#[derive(Debug, thiserror::Error)]
pub enum ProbeSetError {
    #[error("cannot change the node's probe set")]
    Kernel(#[from] KernelError),
    #[error("cannot change the node's probe rule")]
    Run(#[from] RunError),
    /// It is not known which packets are probes.
    #[error("cannot write the node's probe rule")]
    Select(#[from] SelectError),
    /// The node's cgroup namespace could not be entered.
    #[error("cannot write the node's probe rule from the node's cgroup namespace")]
    View(#[source] io::Error),
    /// The kernel accepted the change, but holds something else.
    #[error("the node's probe set differs from what was written: {}", .0.join("; "))]
    Differs(Vec<String>),
    #[error("cannot change the ip rules of the node for probes of {address}")]
    BranchEni {
        address: IpAddr,
        source: KernelError,
    },
}

/// An error of removing the probe set from the node.
#[derive(Debug, thiserror::Error)]
pub enum ClearError {
    /// The set still has addresses of pods.
    #[error("{0} addresses of pods are in the node's probe set")]
    Held(usize),
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

    pub(crate) fn reason(&self) -> Reason {
        match self {
            Self::Run(error) => error.reason,
            Self::Kernel(_)
            | Self::Select(_)
            | Self::View(_)
            | Self::Differs(_)
            | Self::BranchEni { .. } => Reason::KernelRefused,
        }
    }
}

/// An error of an iptables program that ran in the node's netns.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RunError {
    pub reason: Reason,
    /// The program's own message, or a description.
    pub message: String,
}

/// A failed change of the probe set, and what could not be undone of it.
#[derive(Debug, thiserror::Error)]
#[error("{}", with_causes(cause))]
pub struct SetAddressesError {
    pub cause: ProbeSetError,
    /// The steps that could not be undone.
    pub undo_failures: Vec<String>,
}
