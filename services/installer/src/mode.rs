//! Ways of joining the CNI chain.

use std::str::FromStr;

/// Way of joining the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A file of inpod's own that sorts before the primary: a copy of it with inpod's entry appended. After a reboot
    /// pods wait for the agent instead of starting unenrolled.
    Owned,
    /// An entry in the primary's own file, the default of istio-cni.
    InPlace,
    /// A file with only inpod's entry, for Multus and OpenShift.
    Standalone,
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "owned" => Ok(Self::Owned),
            "in-place" => Ok(Self::InPlace),
            "standalone" => Ok(Self::Standalone),
            _ => Err("expected owned, in-place or standalone".to_owned()),
        }
    }
}
