use inpod_types::with_causes;

use crate::netlink::KernelError;

#[derive(Debug, thiserror::Error)]
pub enum ProbeSetError {
    #[error("cannot change the node's probe set")]
    Kernel(#[from] KernelError),
    /// The kernel accepted the probe set, but reading back shows other elements.
    #[error("the node's probe set differs from what was written: {}", .0.join("; "))]
    Differs(Vec<String>),
    #[error("cannot change the node's ip rules for probes")]
    BranchEni(#[source] KernelError),
}

#[derive(Debug, thiserror::Error)]
pub enum ClearError {
    #[error("{0} addresses of pods are in the node's probe set")]
    Held(usize),
    #[error(transparent)]
    ProbeSet(#[from] ProbeSetError),
}

#[derive(Debug, thiserror::Error)]
#[error("{}", with_causes(cause))]
pub struct SetAddressesError {
    pub cause: ProbeSetError,
    /// A sentence per step that could not be undone.
    pub undo_failures: Vec<String>,
}
