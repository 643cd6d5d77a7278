use std::fmt;

use serde::{Deserialize, Serialize};

use crate::identifier::{identifier, is_cni_name};

identifier! {
    /// The id that the runtime gave to a container (CNI spec, "Parameters").
    ContainerId, "container id", "expected a letter or digit, then letters, digits, '_', '.' or '-'",
    is_cni_name
}
identifier! {
    /// The name of an interface in a pod (CNI spec, "Parameters"), in the kernel at most 15 bytes long.
    IfName, "interface name", "expected 1 to 15 bytes without '/', ':' and white space",
    |text| (1..=15).contains(&text.len())
        && !matches!(text, "." | "..")
        && text.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '/' | ':'))
}
identifier! {
    /// The name of a CNI network, empty for a sandbox that was discovered without a CNI call.
    #[derive(Default)]
    NetworkName, "network name", "expected a letter or digit, then letters, digits, '_', '.' or '-'",
    |text| text.is_empty() || is_cni_name(text)
}

/// The attachment of a container to a network, which is the object of a CNI call and the key of all state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SandboxRef {
    /// The name of the network, or an empty name.
    pub network_name: NetworkName,
    /// The id of the container, assigned by the runtime.
    pub container_id: ContainerId,
    /// The name of the interface in the pod.
    pub ifname: IfName,
}

impl fmt::Display for SandboxRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}/{}/{}",
            self.network_name, self.container_id, self.ifname
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_name_with_a_newline_or_a_space_is_refused() {
        for bad in [
            "",
            "eth 0",
            "eth0\n",
            "a/b",
            "a:b",
            "..",
            "sixteen-bytes-xx",
        ] {
            assert!(bad.parse::<IfName>().is_err(), "{bad:?}");
        }
        assert!("eth0".parse::<IfName>().is_ok());
    }

    #[test]
    fn a_container_id_cannot_leave_a_directory() {
        assert!("../x".parse::<ContainerId>().is_err());
        assert!("a/b".parse::<ContainerId>().is_err());
    }
}
