//! Holds validated settings, of which every value can be written as rules.

use std::{fmt, net::IpAddr, num::NonZeroU16, str::FromStr};

use ipnet::IpNet;

use crate::family::Family;

/// IFNAMSIZ of linux/if.h, with the terminating zero.
const INTERFACE_NAME_BYTES: usize = 16;

/// Settings of ambient mode, whose defaults are Istio's, but without DNS capture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ambient {
    pub dns_capture: bool,
    pub bypass_inbound_capture: bool,
    /// Interfaces whose inbound TCP counts as outbound, such as interfaces of virtual machines.
    pub virtual_interfaces: Vec<InterfaceName>,
    pub ipv6: Ipv6,
    pub exclusions: Exclusions,
    pub keep_existing_connections: bool,
    /// Source addresses of the kubelet's probes on this node, at most one per family, which rules do not capture.
    pub probe_sources: Vec<IpAddr>,
    /// TCP ports of the pod for the kubelet's probes, or `None` if any port may be probed.
    pub probe_ports: Option<Vec<NonZeroU16>>,
}

impl Ambient {
    pub(crate) fn families(&self) -> &'static [Family] {
        self.ipv6.families()
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ipv6 {
    /// Captures IPv6 only in a netns with IPv6.
    #[default]
    Auto,
    /// Captures IPv6, and refuses a netns without IPv6.
    On,
    Off,
}

impl Ipv6 {
    pub(crate) fn families(self) -> &'static [Family] {
        match self {
            Self::Auto | Self::On => &Family::ALL,
            Self::Off => &[Family::V4],
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exclusions {
    /// TCP ports outside of the pod.
    pub outbound_ports: Vec<NonZeroU16>,
    /// Networks outside of the pod.
    pub outbound_networks: Vec<Network>,
    /// TCP ports of the pod.
    pub inbound_ports: Vec<NonZeroU16>,
    pub inbound_networks: Vec<Network>,
}

/// A name also accepted by `nft` and `iptables`: 1 to 15 letters, digits and `._-`, not `.` or `..`, not starting
/// with `-`. A final `*` stands for any rest of a name. The kernel refuses only slash, colon and white space
/// (dev_valid_name in net/core/dev.c).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceName(String);

impl InterfaceName {
    /// Returns the name `lo`, which exists in every netns.
    pub fn loopback() -> Self {
        Self("lo".to_owned())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the beginning of the names for which the pattern stands, or `None` for a single name.
    pub(crate) fn prefix(&self) -> Option<&str> {
        self.0.strip_suffix('*')
    }

    pub(crate) fn matches(&self, name: &str) -> bool {
        self.prefix()
            .map_or(self.0 == name, |prefix| name.starts_with(prefix))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "is not an interface name: expected 1 to 15 letters, digits, `.`, `_` or `-`, not starting with `-`, and a final `*` \
     for any rest"
)]
pub struct NoInterfaceName;

impl FromStr for InterfaceName {
    type Err = NoInterfaceName;

    fn from_str(text: &str) -> Result<Self, NoInterfaceName> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let name = text.strip_suffix('*').unwrap_or(text);
        let fits = !name.is_empty() && text.len() < INTERFACE_NAME_BYTES;
        let is_option = text.starts_with('-');
        if fits && name.bytes().all(is_allowed) && !is_option && !matches!(text, "." | "..") {
            Ok(Self(text.to_owned()))
        } else {
            Err(NoInterfaceName)
        }
    }
}

impl fmt::Display for InterfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An IP network without host bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network(IpNet);

impl Network {
    pub fn host(address: IpAddr) -> Self {
        Self(address.into())
    }

    pub(crate) fn address(self) -> IpAddr {
        self.0.network()
    }

    pub(crate) fn mask(self) -> IpAddr {
        self.0.netmask()
    }

    pub(crate) fn family(self) -> Family {
        Family::of(self.address())
    }

    pub(crate) fn prefix_len(self) -> u8 {
        self.0.prefix_len()
    }

    pub(crate) fn is_host(self) -> bool {
        self.0.prefix_len() == self.0.max_prefix_len()
    }

    /// Returns the network of an address and a mask, or `None` if the mask has gaps or the address has host bits.
    pub(crate) fn of_mask(address: IpAddr, mask: IpAddr) -> Option<Self> {
        let net = IpNet::with_netmask(address, mask).ok()?;
        (net == net.trunc()).then_some(Self(net))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoNetwork {
    /// The text is not of the form address/length.
    #[error("is not a network: expected address/length, such as 10.0.0.0/8")]
    Form,
    #[error("has host bits set: the network is {0}")]
    HostBits(IpNet),
}

impl FromStr for Network {
    type Err = NoNetwork;

    fn from_str(text: &str) -> Result<Self, NoNetwork> {
        let net: IpNet = text.parse().map_err(|_| NoNetwork::Form)?;
        if net == net.trunc() {
            Ok(Self(net))
        } else {
            Err(NoNetwork::HostBits(net.trunc()))
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_host() {
            self.address().fmt(f)
        } else {
            self.0.fmt(f)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_names_that_a_shell_or_a_script_could_take_for_more_are_refused() {
        for bad in [
            "",
            ".",
            "..",
            "a b",
            "a\nb",
            "a/b",
            "a:b",
            "a\"b",
            "a;b",
            "a+",
            "*",
            "a*b",
            "a**",
            "fifteen-bytes-a*",
            "ä",
            "sixteen-bytes-ab",
            "-",
            "-j",
        ] {
            assert_eq!(bad.parse::<InterfaceName>(), Err(NoInterfaceName), "{bad}");
        }
        for good in [
            "eth0",
            "net1.100",
            "k6t-eth0",
            "a_b",
            "fifteen-bytes-a",
            "br-*",
        ] {
            assert_eq!(good.parse::<InterfaceName>().unwrap().as_str(), good);
        }
    }

    #[test]
    fn networks_with_host_bits_are_refused_and_the_network_is_named() {
        let error = "10.1.2.3/8".parse::<Network>().unwrap_err();
        assert!(error.to_string().contains("10.0.0.0/8"), "{error}");
        for bad in [
            "10.0.0.0",
            "10.0.0.0/33",
            "10.0.0.0/-1",
            "fd00::/129",
            "x/8",
            " 10.0.0.0/8",
        ] {
            assert_eq!(bad.parse::<Network>(), Err(NoNetwork::Form), "{bad}");
        }
        for good in ["10.0.0.0/8", "0.0.0.0/0", "fd00::/8", "192.168.1.1/32"] {
            good.parse::<Network>().unwrap();
        }
    }

    #[test]
    fn a_mask_with_gaps_is_no_network() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(Network::of_mask(ip("10.0.0.0"), ip("255.0.255.0")), None);
        assert_eq!(Network::of_mask(ip("10.1.0.0"), ip("255.0.0.0")), None);
        let found = Network::of_mask(ip("10.0.0.0"), ip("255.0.0.0"));
        assert_eq!(found.unwrap().to_string(), "10.0.0.0/8");
    }
}
