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
