use std::str::FromStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The entry is in a copy of the primary configuration, in a file of inpod's own that sorts first. After a reboot
    /// pods wait for the agent instead of starting unenrolled.
    Owned,
    /// The entry is in the file of the primary network, as in istio-cni's default.
    InPlace,
    /// A separate file has only inpod's entry (Multus, OpenShift).
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
