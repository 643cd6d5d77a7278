use super::Variant;

/// Why a program of iptables did not do what it was started for.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It is not on this machine.
    #[error("the programs of iptables ({0:?}) are not installed")]
    Missing(Variant),
}
