//! Holds validated settings, of which every value can be written as rules.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU16,
    str::FromStr,
};

use crate::{
    family::Family,
    marks::DNS_PORT,
    rules::settings::{InterfaceName, Ipv6, Network, NoNetwork},
};

/// Settings of sidecar mode, which capture nothing by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InboundCapture {
    /// Captures by destination NAT to a local port.
    #[default]
    Redirect,
    /// Captures by TPROXY, which preserves the client's address.
    Tproxy,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sidecar {
    pub inbound_capture: InboundCapture,
    pub ipv6: Ipv6,
    pub proxy_users: Vec<Owner>,
    pub proxy_groups: Vec<Owner>,
    /// TCP ports of the pod to capture.
    pub inbound_ports: Selection<NonZeroU16>,
    /// TCP ports of the pod not to capture, if all other ports are captured.
    pub excluded_inbound_ports: Vec<NonZeroU16>,
    /// Networks outside of the pod to capture.
    pub outbound_networks: Selection<Network>,
    pub excluded_outbound_networks: Vec<Network>,
    /// TCP ports outside of the pod to capture, in any network.
    pub outbound_ports: Vec<NonZeroU16>,
    pub excluded_outbound_ports: Vec<NonZeroU16>,
    pub excluded_interfaces: Vec<InterfaceName>,
    /// Interfaces whose inbound TCP counts as outbound, such as interfaces of virtual machines.
    pub virtual_interfaces: Vec<InterfaceName>,
    /// Groups whose outbound traffic is captured; `None` captures all groups.
    pub owner_groups: Option<Vec<Owner>>,
    /// Groups whose outbound traffic is not captured.
    pub excluded_owner_groups: Vec<Owner>,
    /// DNS servers whose queries go to the proxy.
    pub dns: Selection<IpAddr>,
    pub drop_invalid: bool,
    /// The pod's own part of 127.0.0.0/8, which is never captured.
    pub loopback: Loopback,
    pub keep_existing_connections: bool,
}

impl Sidecar {
    pub(crate) fn families(&self) -> &'static [Family] {
        self.ipv6.families()
    }

    /// Returns the families whose DNS queries go to the proxy, and none if port 53 is excluded.
    pub(super) fn dns_families(&self) -> Vec<Family> {
        let mut excluded = self.excluded_outbound_ports.iter();
        if !self.captures_any_group() || excluded.any(|port| port.get() == DNS_PORT) {
            return Vec::new();
        }
        let is_asked = |family: &Family| self.dns.is_any(|server| Family::of(*server) == *family);
        self.families().iter().copied().filter(is_asked).collect()
    }

    pub(crate) fn captures_by_tproxy(&self) -> bool {
        self.inbound_capture == InboundCapture::Tproxy && self.captures_inbound()
    }

    pub(super) fn captures_inbound(&self) -> bool {
        self.inbound_ports.is_any(|_| true)
    }

    /// Returns whether any outbound traffic is captured, apart from the proxy's calls to the pod.
    pub(super) fn captures_outbound(&self) -> bool {
        let is_any = self.outbound_networks.is_any(|_| true)
            || !self.outbound_ports.is_empty()
            || !self.dns_families().is_empty();
        self.captures_any_group() && is_any
    }

    fn captures_any_group(&self) -> bool {
        let groups = self.owner_groups.as_ref();
        groups.is_none_or(|some| !some.is_empty())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection<T> {
    All,
    These(Vec<T>),
}

impl<T> Default for Selection<T> {
    fn default() -> Self {
        Self::These(Vec::new())
    }
}

impl<T> Selection<T> {
    pub(super) fn is_any(&self, holds: impl Fn(&T) -> bool) -> bool {
        match self {
            Self::All => true,
            Self::These(these) => these.iter().any(holds),
        }
    }
}

/// A user or group id in the user namespace that owns the netns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(u32);

impl Owner {
    /// Returns `None` for the invalid id, (uid_t) -1.
    pub fn new(number: u32) -> Option<Self> {
        (number != u32::MAX).then_some(Self(number))
    }

    pub(super) fn number(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loopback(Network);

impl Loopback {
    pub(super) fn network(self) -> Network {
        self.0
    }
}

/// The default is 127.0.0.1, as in Istio.
impl Default for Loopback {
    fn default() -> Self {
        Self(Network::host(Ipv4Addr::LOCALHOST.into()))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoLoopback {
    #[error(transparent)]
    Network(#[from] NoNetwork),
    /// The network exceeds 127.0.0.0/8.
    #[error("is not within 127.0.0.0/8")]
    Outside,
}

impl FromStr for Loopback {
    type Err = NoLoopback;

    fn from_str(text: &str) -> Result<Self, NoLoopback> {
        let network: Network = text.parse()?;
        let is_within = network.family() == Family::V4 && is_loopback(network);
        let is_whole = network.prefix_len() >= 8;
        if is_within && is_whole {
            Ok(Self(network))
        } else {
            Err(NoLoopback::Outside)
        }
    }
}

/// Returns whether the network is a loopback network, judging by its first address.
pub(super) fn is_loopback(network: Network) -> bool {
    network.address().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn where_port_53_is_excluded_no_question_is_led_anywhere() {
        let settings = Sidecar {
            dns: Selection::All,
            ..Sidecar::default()
        };
        assert_eq!(settings.dns_families(), Family::ALL);
        let excluded = Sidecar {
            excluded_outbound_ports: vec![53.try_into().unwrap()],
            ..settings
        };
        assert_eq!(excluded.dns_families(), []);
    }
}
