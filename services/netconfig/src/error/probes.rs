use std::{io, net::IpAddr};

use inpod_types::with_causes;

use crate::netlink::KernelError;

#[derive(Debug, thiserror::Error)]
pub enum ProbeSetError {
    #[error("cannot change the node's probe set")]
    Kernel(#[from] KernelError),
    /// netconfig cannot determine which packets are probes.
    #[error("cannot write the node's probe rule")]
    Select(#[from] SelectError),
    /// The node's cgroup namespace could not be entered.
    #[error("cannot write the node's probe rule from the node's cgroup namespace")]
    View(#[source] io::Error),
    /// The kernel accepted the probe set, but reading back shows other elements.
    #[error("the node's probe set differs from what was written: {}", .0.join("; "))]
    Differs(Vec<String>),
    #[error("cannot change the ip rules of the node for probes of {address}")]
    BranchEni {
        address: IpAddr,
        source: KernelError,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum ClearError {
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
}

#[derive(Debug, thiserror::Error)]
#[error("{}", with_causes(cause))]
pub struct SetAddressesError {
    pub cause: ProbeSetError,
    /// A sentence per step that could not be undone.
    pub undo_failures: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
    #[error(
        "found no kubelet: no process outside of containers listens on port 10250 or is named kubelet; set \
         probe_match=uid:NUMBER to its user"
    )]
    NoKubelet,
    /// Either cgroup2 is mounted without its root, or cgroup2 is not mounted at all.
    #[error("cgroup2 is not mounted with its root")]
    NoCgroups,
    #[error("there is no cgroup {0}")]
    NoCgroup(String),
}
