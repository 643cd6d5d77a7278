use serde::Deserialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The entry is in a copy of the primary configuration, in a file of inpod's own that sorts first. After a reboot
    /// pods wait for the agent instead of starting unenrolled.
    Owned,
    /// The entry is in the file of the primary network, as in istio-cni's default.
    InPlace,
    /// A separate file has only inpod's entry (Multus, OpenShift).
    Standalone,
}
