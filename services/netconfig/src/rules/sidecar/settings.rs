//! What can be chosen about a sidecar's redirection, parsed: what is here can be programmed.

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

/// Everything that can be chosen about sidecar mode in one netns. By default nothing is captured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sidecar {
    /// How inbound TCP is captured.
    pub inbound_capture: InboundCapture,
    /// Whether IPv6 is captured.
    pub ipv6: Ipv6,
    /// The users that the proxy runs as.
    pub proxy_users: Vec<Owner>,
    /// The groups that the proxy runs as.
    pub proxy_groups: Vec<Owner>,
    /// TCP ports of the pod that are captured.
    pub inbound_ports: Selection<NonZeroU16>,
    /// TCP ports of the pod that are not, where all are.
    pub excluded_inbound_ports: Vec<NonZeroU16>,
    /// Networks outside that are captured.
    pub outbound_networks: Selection<Network>,
    /// Networks outside that are not.
    pub excluded_outbound_networks: Vec<Network>,
    /// TCP ports outside that are captured, whatever the network is.
    pub outbound_ports: Vec<NonZeroU16>,
    /// Ports outside that are not.
    pub excluded_outbound_ports: Vec<NonZeroU16>,
    /// Interfaces by which nothing is captured.
    pub excluded_interfaces: Vec<InterfaceName>,
    /// Interfaces whose arriving TCP is taken for outbound.
    pub virtual_interfaces: Vec<InterfaceName>,
    /// Groups whose outbound traffic alone is captured; `None` where that of all is.
    pub owner_groups: Option<Vec<Owner>>,
    /// Groups whose outbound traffic is not captured.
    pub excluded_owner_groups: Vec<Owner>,
    /// Servers of names whose questions go to the proxy.
    pub dns: Selection<IpAddr>,
    /// Whether packets that belong to no connection are dropped.
    pub drop_invalid: bool,
    /// What of IPv4 is the pod's own loopback, and never captured.
    pub loopback: Loopback,
    /// Whether only connections that begin are captured.
    pub keep_existing_connections: bool,
}

impl Sidecar {
    /// The families that are captured.
    pub(crate) fn families(&self) -> &'static [Family] {
        self.ipv6.families()
    }

    /// The families of which questions for names go to the proxy: where port 53 is excluded, none.
    pub(super) fn dns_families(&self) -> Vec<Family> {
        let mut excluded = self.excluded_outbound_ports.iter();
        if !self.captures_any_group() || excluded.any(|port| port.get() == DNS_PORT) {
            return Vec::new();
        }
        let is_asked = |family: &Family| self.dns.is_any(|server| Family::of(*server) == *family);
        self.families().iter().copied().filter(is_asked).collect()
    }

    /// Whether TPROXY captures what arrives.
    pub(crate) fn captures_by_tproxy(&self) -> bool {
        self.inbound_capture == InboundCapture::Tproxy && self.captures_inbound()
    }

    /// Whether anything that arrives is captured.
    pub(super) fn captures_inbound(&self) -> bool {
        self.inbound_ports.is_any(|_| true)
    }

    /// Whether anything that is sent is captured, beside what the proxy says to the pod.
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

/// All of a kind, or some.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection<T> {
    /// All.
    All,
    /// These.
    These(Vec<T>),
}

impl<T> Default for Selection<T> {
    fn default() -> Self {
        Self::These(Vec::new())
    }
}

impl<T> Selection<T> {
    /// Whether there is one among them of which something holds; among all there is.
    pub(super) fn is_any(&self, holds: impl Fn(&T) -> bool) -> bool {
        match self {
            Self::All => true,
            Self::These(these) => these.iter().any(holds),
        }
    }
}

/// A user or a group, as the user namespace numbers it that owns the netns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(u32);

impl Owner {
    /// `None` for the number that means nobody ((uid_t) -1).
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
    /// The network.
    pub(super) fn network(self) -> Network {
        self.0
    }
}

/// 127.0.0.1, as with Istio.
impl Default for Loopback {
    fn default() -> Self {
        Self(Network::host(Ipv4Addr::LOCALHOST.into()))
    }
}

/// Why a text is no loopback network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoLoopback {
    /// It is no network.
    #[error(transparent)]
    Network(#[from] NoNetwork),
    /// It is another one.
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

/// Whether a network begins with a loopback address.
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
