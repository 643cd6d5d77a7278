//! The settings of a redirection: values for which rules can be written.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU16,
    str::FromStr,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{identifier::identifier, parse_address, parse_digits};

/// The port of ztunnel or a sidecar for outbound connections.
pub const OUTBOUND_PORT: u16 = 15001;

/// ztunnel's port for inbound plaintext, and a sidecar's port for everything inbound.
pub const INBOUND_PLAINTEXT_PORT: u16 = 15006;

/// ztunnel's port for connections from other ztunnels (HBONE), which is never captured.
pub const INBOUND_HBONE_PORT: u16 = 15008;

/// The port of ztunnel or a sidecar for DNS over UDP and TCP.
pub const ZTUNNEL_DNS_PORT: u16 = 15053;

/// ztunnel's TCP ports in every enrolled pod (services/docs/facts/istio-ambient.md).
pub const ZTUNNEL_PORTS: [u16; 3] = [OUTBOUND_PORT, INBOUND_PLAINTEXT_PORT, INBOUND_HBONE_PORT];

/// The size of a name with the terminating NUL (IFNAMSIZ, linux/if.h).
const INTERFACE_NAME_BYTES: usize = 16;

/// Settings of ambient mode, whose defaults are Istio's, but without DNS capture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ambient {
    /// DNS queries go to ztunnel.
    pub dns_capture: bool,
    /// Inbound traffic is not captured.
    pub bypass_inbound_capture: bool,
    /// Interfaces whose inbound TCP counts as outbound, such as interfaces of virtual machines.
    pub virtual_interfaces: Vec<InterfaceName>,
    /// The choice whether IPv6 is captured.
    pub ipv6: Ipv6,
    /// Traffic that is not captured.
    pub exclusions: Exclusions,
    /// Connections from before the rules continue uncaptured.
    pub keep_existing_connections: bool,
    /// Source addresses of the kubelet's probes on this node, at most one per family, which rules do not capture.
    pub probe_sources: Vec<IpAddr>,
    /// TCP ports of the pod for the kubelet's probes, or `None` if any port may be probed.
    pub probe_ports: Option<Vec<NonZeroU16>>,
}

/// Settings of sidecar mode, which capture nothing by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sidecar {
    /// The way in which inbound TCP is captured.
    pub inbound_capture: InboundCapture,
    /// The choice whether IPv6 is captured.
    pub ipv6: Ipv6,
    /// Users of the proxy, whose connections are not captured.
    pub proxy_users: Vec<Owner>,
    /// Groups of the proxy, whose connections are not captured.
    pub proxy_groups: Vec<Owner>,
    /// TCP ports of the pod to capture.
    pub inbound_ports: Selection<NonZeroU16>,
    /// TCP ports of the pod not to capture, if all other ports are captured.
    pub excluded_inbound_ports: Vec<NonZeroU16>,
    /// Networks outside of the pod to capture.
    pub outbound_networks: Selection<Network>,
    /// Networks outside of the pod not to capture.
    pub excluded_outbound_networks: Vec<Network>,
    /// TCP ports outside of the pod to capture, in any network.
    pub outbound_ports: Vec<NonZeroU16>,
    /// TCP ports outside of the pod not to capture.
    pub excluded_outbound_ports: Vec<NonZeroU16>,
    /// Interfaces on which nothing is captured.
    pub excluded_interfaces: Vec<InterfaceName>,
    /// Interfaces whose inbound TCP counts as outbound, such as interfaces of virtual machines.
    pub virtual_interfaces: Vec<InterfaceName>,
    /// Groups whose outbound traffic is captured; `None` captures all groups.
    pub owner_groups: Option<Vec<Owner>>,
    /// Groups whose outbound traffic is not captured.
    pub excluded_owner_groups: Vec<Owner>,
    /// DNS servers whose queries go to the proxy.
    pub dns: Selection<IpAddr>,
    /// Packets that belong to no connection are dropped.
    pub drop_invalid: bool,
    /// The pod's own part of 127.0.0.0/8, which is never captured.
    pub loopback: Loopback,
    /// Connections from before the rules continue uncaptured.
    pub keep_existing_connections: bool,
}

impl Sidecar {
    /// Returns whether any inbound traffic is captured.
    pub fn captures_inbound(&self) -> bool {
        self.inbound_ports.is_any(|_| true)
    }

    /// Returns whether any inbound traffic is captured by TPROXY.
    pub fn captures_by_tproxy(&self) -> bool {
        self.inbound_capture == InboundCapture::Tproxy && self.captures_inbound()
    }

    /// Returns whether the outbound traffic of any group is captured.
    pub fn captures_any_group(&self) -> bool {
        let groups = self.owner_groups.as_ref();
        groups.is_none_or(|some| !some.is_empty())
    }
}

/// The choice whether IPv6 is captured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ipv6 {
    /// Captures IPv6 only in a netns with IPv6.
    #[default]
    Auto,
    /// Captures IPv6, and refuses a netns without IPv6.
    On,
    /// Does not capture IPv6.
    Off,
}

impl FromStr for Ipv6 {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err(format!("\"{text}\" is not auto, on or off")),
        }
    }
}

/// The way in which inbound TCP is captured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InboundCapture {
    /// Captures by destination NAT to a local port.
    #[default]
    Redirect,
    /// Captures by TPROXY, which preserves the client's address.
    Tproxy,
}

/// Traffic that is not captured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Exclusions {
    /// TCP ports outside of the pod.
    pub outbound_ports: Vec<NonZeroU16>,
    /// Networks outside of the pod.
    pub outbound_cidrs: Vec<Network>,
    /// TCP ports of the pod.
    pub inbound_ports: Vec<NonZeroU16>,
    /// Networks of clients.
    pub inbound_cidrs: Vec<Network>,
}

impl Exclusions {
    /// Returns the exclusions unless an inbound port is ztunnel's.
    ///
    /// # Errors
    ///
    /// If port 15008 is an inbound port: the error then concerns `inbound_ports`.
    pub fn without_hbone(self) -> Result<Self, ExcludedHbone> {
        let is_hbone = |port: &NonZeroU16| port.get() == INBOUND_HBONE_PORT;
        if self.inbound_ports.iter().any(is_hbone) {
            return Err(ExcludedHbone);
        }
        Ok(self)
    }
}

/// The error for an exclusion of ztunnel's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("port {INBOUND_HBONE_PORT} is ztunnel's and never captured")]
pub struct ExcludedHbone;

/// Everything of a kind, or some of the kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selection<T> {
    /// Everything is selected.
    All,
    /// The listed entries are selected.
    These(Vec<T>),
}

impl<T> Default for Selection<T> {
    fn default() -> Self {
        Self::These(Vec::new())
    }
}

impl<T> Selection<T> {
    /// Returns whether everything or an entry with the property is selected.
    pub fn is_any(&self, has_property: impl Fn(&T) -> bool) -> bool {
        match self {
            Self::All => true,
            Self::These(these) => these.iter().any(has_property),
        }
    }
}

identifier! {
    /// A name also accepted by `nft` and `iptables`, with a final `*` for any rest of a name. The kernel refuses only
    /// slash, colon and white space (dev_valid_name in net/core/dev.c).
    InterfaceName, "interface name",
    "expected 1 to 15 letters, digits, '.', '_' or '-', not starting with '-', and a final '*' for any rest",
    is_interface_name
}

impl InterfaceName {
    /// Returns the name `lo`, which exists in every netns.
    pub fn loopback() -> Self {
        Self("lo".into())
    }

    /// Returns the beginning of the names for which the pattern stands, or `None` for a single name.
    pub fn prefix(&self) -> Option<&str> {
        self.0.strip_suffix('*')
    }

    /// Returns whether the name or pattern stands for the name of an interface.
    pub fn matches(&self, name: &str) -> bool {
        self.prefix()
            .map_or(&*self.0 == name, |prefix| name.starts_with(prefix))
    }
}

fn is_interface_name(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let name = text.strip_suffix('*').unwrap_or(text);
    let fits = !name.is_empty() && text.len() < INTERFACE_NAME_BYTES;
    let is_option = text.starts_with('-');
    fits && name.bytes().all(is_allowed) && !is_option && !matches!(text, "." | "..")
}

/// An IP network without host bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "IpNet")]
pub struct Network(IpNet);

impl Network {
    /// Returns the network of one address.
    pub fn host(address: IpAddr) -> Self {
        Self(address.into())
    }

    /// Parses a network, and clears host bits.
    ///
    /// # Errors
    ///
    /// If the text is not of the form address/length.
    pub fn truncated(text: &str) -> Result<Self, NoNetwork> {
        parse_net(text).map(|net| Self(net.trunc()))
    }

    /// Returns the first address.
    pub fn address(self) -> IpAddr {
        self.0.network()
    }

    /// Returns the mask of the network's bits.
    pub fn mask(self) -> IpAddr {
        self.0.netmask()
    }

    /// Returns whether the address is part of the network.
    pub fn contains(self, address: IpAddr) -> bool {
        self.0.contains(&address)
    }

    /// Returns whether the network has only one address.
    pub fn is_host(self) -> bool {
        self.0.prefix_len() == self.0.max_prefix_len()
    }

    /// Returns the network of an address and a mask, or `None` if the mask has gaps or the address has host bits.
    pub fn of_mask(address: IpAddr, mask: IpAddr) -> Option<Self> {
        Self::try_from(IpNet::with_netmask(address, mask).ok()?).ok()
    }
}

/// Reasons why a text is no network without host bits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoNetwork {
    /// The text is not of the form address/length.
    #[error("is not a network: expected address/length, such as 10.0.0.0/8")]
    Form,
    /// The address has bits beyond the prefix.
    #[error("has host bits set: the network is {0}")]
    HostBits(IpNet),
}

impl TryFrom<IpNet> for Network {
    type Error = NoNetwork;

    fn try_from(net: IpNet) -> Result<Self, NoNetwork> {
        if net == net.trunc() {
            Ok(Self(net))
        } else {
            Err(NoNetwork::HostBits(net.trunc()))
        }
    }
}

impl FromStr for Network {
    type Err = NoNetwork;

    fn from_str(text: &str) -> Result<Self, NoNetwork> {
        parse_net(text)?.try_into()
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

fn parse_net(text: &str) -> Result<IpNet, NoNetwork> {
    let net = text.split_once('/').and_then(|(address, bits)| {
        let address = parse_address(address).ok()?;
        IpNet::new(address, parse_digits(bits)?).ok()
    });
    net.ok_or(NoNetwork::Form)
}

/// A user or group id in the user namespace that owns the netns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner(u32);

impl Owner {
    /// Returns `None` for the invalid id, (uid_t) -1.
    pub fn new(number: u32) -> Option<Self> {
        (number != u32::MAX).then_some(Self(number))
    }

    /// Returns the id.
    pub fn number(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A network within 127.0.0.0/8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loopback(Network);

impl Loopback {
    /// Returns the network.
    pub fn network(self) -> Network {
        self.0
    }
}

/// The default is 127.0.0.1, as in Istio.
impl Default for Loopback {
    fn default() -> Self {
        Self(Network::host(Ipv4Addr::LOCALHOST.into()))
    }
}

/// Reasons why a text is no network within 127.0.0.0/8.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoLoopback {
    /// The text is no network.
    #[error(transparent)]
    Network(#[from] NoNetwork),
    /// The network exceeds 127.0.0.0/8.
    #[error("is not within 127.0.0.0/8")]
    Outside,
}

impl TryFrom<Network> for Loopback {
    type Error = NoLoopback;

    fn try_from(network: Network) -> Result<Self, NoLoopback> {
        let is_within = network.0.addr().is_ipv4() && network.0.addr().is_loopback();
        if is_within && network.0.prefix_len() >= 8 {
            Ok(Self(network))
        } else {
            Err(NoLoopback::Outside)
        }
    }
}

impl FromStr for Loopback {
    type Err = NoLoopback;

    fn from_str(text: &str) -> Result<Self, NoLoopback> {
        Network::from_str(text)?.try_into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_names_with_other_characters_are_refused() {
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
            assert!(bad.parse::<InterfaceName>().is_err(), "{bad}");
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
    fn networks_with_host_bits_are_refused_and_truncated() {
        for (bad, net) in [("10.1.2.3/8", "10.0.0.0/8"), ("fd00::1/64", "fd00::/64")] {
            let error = bad.parse::<Network>().unwrap_err();
            assert!(error.to_string().contains(net), "{error}");
            assert_eq!(Network::truncated(bad), Ok(net.parse().unwrap()));
        }
        for bad in [
            "10.0.0.0",
            "10.0.0.0/33",
            "10.0.0.0/-1",
            "10.0.0.0/+8",
            "10.0.0.0/",
            "10.0.0.0/8\nx",
            "fd00::/129",
            "::ffff:10.0.0.0/104",
            "x/8",
            " 10.0.0.0/8",
        ] {
            assert_eq!(bad.parse::<Network>(), Err(NoNetwork::Form), "{bad}");
        }
        for good in ["10.0.0.0/8", "0.0.0.0/0", "fd00::/8", "192.168.1.1/32"] {
            assert_eq!(good.parse::<Network>().unwrap().to_string(), good);
        }
    }

    #[test]
    fn masks_with_gaps_or_host_bits_are_no_network() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(Network::of_mask(ip("10.0.0.0"), ip("255.0.255.0")), None);
        assert_eq!(Network::of_mask(ip("10.1.0.0"), ip("255.0.0.0")), None);
        let found = Network::of_mask(ip("10.0.0.0"), ip("255.0.0.0"));
        assert_eq!(found.unwrap().to_string(), "10.0.0.0/8");
    }

    #[test]
    fn a_loopback_network_is_within_127_0_0_0() {
        for good in ["127.0.0.0/8", "127.0.0.1/32", "127.4.0.0/16"] {
            good.parse::<Loopback>().unwrap();
        }
        for bad in ["126.0.0.0/7", "10.0.0.0/8", "::1/128", "0.0.0.0/0"] {
            assert_eq!(bad.parse::<Loopback>(), Err(NoLoopback::Outside), "{bad}");
        }
        assert!("127.0.0.1/8".parse::<Loopback>().is_err());
        assert_eq!("127.0.0.1/32".parse(), Ok(Loopback::default()));
    }

    #[test]
    fn the_invalid_id_is_no_owner() {
        assert_eq!(Owner::new(u32::MAX), None);
        assert_eq!(Owner::new(0).unwrap().to_string(), "0");
    }
}
