use std::str::FromStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A copy of the primary with inpod's entry, in a file of inpod's own that sorts first. After a reboot pods wait
    /// for the agent instead of starting unenrolled.
    Owned,
    /// An entry in the primary's file, istio-cni's default.
    InPlace,
    /// A file with only inpod's entry (Multus, OpenShift).
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
