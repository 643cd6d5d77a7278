//! The validated settings of a sidecar's redirection: every value can be written as rules.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU16,
    str::FromStr,
};

use crate::{
    family::Family,
    marks::DNS_PORT,
    rules::settings::{InboundCapture, InterfaceName, Ipv6, Network, NoNetwork},
};

/// The settings of sidecar mode. By default nothing is captured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sidecar {
    pub inbound_capture: InboundCapture,
    pub ipv6: Ipv6,
    pub proxy_users: Vec<Owner>,
    pub proxy_groups: Vec<Owner>,
    /// TCP ports of the pod to capture.
    pub inbound_ports: Selection<NonZeroU16>,
    /// TCP ports of the pod not to capture, if all others are.
    pub excluded_inbound_ports: Vec<NonZeroU16>,
    /// Networks outside of the pod to capture.
    pub outbound_networks: Selection<Network>,
    /// Networks outside of the pod not to capture.
    pub excluded_outbound_networks: Vec<Network>,
    /// TCP ports outside of the pod to capture, in any network.
    pub outbound_ports: Vec<NonZeroU16>,
    /// Ports outside of the pod not to capture.
    pub excluded_outbound_ports: Vec<NonZeroU16>,
    /// Interfaces whose traffic is not captured.
    pub excluded_interfaces: Vec<InterfaceName>,
    /// Interfaces whose inbound TCP is captured as outbound, as that of virtual machines.
    pub virtual_interfaces: Vec<InterfaceName>,
    /// The only groups whose outbound traffic is captured; `None` for all groups.
    pub owner_groups: Option<Vec<Owner>>,
    /// Groups whose outbound traffic is not captured.
    pub excluded_owner_groups: Vec<Owner>,
    /// DNS servers whose queries are redirected to the proxy.
    pub dns: Selection<IpAddr>,
    /// Drops packets that belong to no connection.
    pub drop_invalid: bool,
    /// The part of 127.0.0.0/8 that is the pod's own loopback and never captured.
    pub loopback: Loopback,
    /// Captures only new connections.
    pub keep_existing_connections: bool,
}

impl Sidecar {
    /// Returns the captured families.
    pub(crate) fn families(&self) -> &'static [Family] {
        self.ipv6.families()
    }

    /// Returns the families whose DNS queries go to the proxy; none if port 53 is excluded.
    pub(super) fn dns_families(&self) -> Vec<Family> {
        let mut excluded = self.excluded_outbound_ports.iter();
        if !self.captures_any_group() || excluded.any(|port| port.get() == DNS_PORT) {
            return Vec::new();
        }
        let is_asked = |family: &Family| self.dns.is_any(|server| Family::of(*server) == *family);
        self.families().iter().copied().filter(is_asked).collect()
    }

    /// Returns whether TPROXY captures inbound TCP.
    pub(crate) fn captures_by_tproxy(&self) -> bool {
        self.inbound_capture == InboundCapture::Tproxy && self.captures_inbound()
    }

    /// Returns whether any inbound traffic is captured.
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

/// All items of a kind, or some.
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
    /// Returns whether the selection contains an item that satisfies the predicate.
    pub(super) fn is_any(&self, holds: impl Fn(&T) -> bool) -> bool {
        match self {
            Self::All => true,
            Self::These(these) => these.iter().any(holds),
        }
    }
}

/// A user or group id of the user namespace that owns the netns.
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

/// A network within 127.0.0.0/8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loopback(Network);

impl Loopback {
    pub(super) fn network(self) -> Network {
        self.0
    }
}

/// Returns 127.0.0.1, as Istio does.
impl Default for Loopback {
    fn default() -> Self {
        Self(Network::host(Ipv4Addr::LOCALHOST.into()))
    }
}

/// A text is not a loopback network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoLoopback {
    /// The text is not a network.
    #[error(transparent)]
    Network(#[from] NoNetwork),
    /// The network is outside of 127.0.0.0/8.
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

/// Returns whether the network's first address is a loopback address.
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
