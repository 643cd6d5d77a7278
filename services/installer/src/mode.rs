//! The three ways into the chain, and the two out of it.

use std::str::FromStr;

/// How inpod gets into the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A file of its own ahead of the primary: a copy of it with the entry behind. After a reboot pods wait for the agent
    /// instead of slipping past it.
    Owned,
    /// The entry in the primary's own file, as the incumbent does by default.
    InPlace,
    /// A file with nothing but the entry, which something else calls: Multus, OpenShift.
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
