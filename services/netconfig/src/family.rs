use std::fmt;

use inpod_types::redirection::{Ipv6, Network};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// AF_INET and AF_INET6 (address_families(7)).
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::V4 => 2,
            Self::V6 => 10,
        }
    }

    pub(crate) fn of(address: std::net::IpAddr) -> Self {
        if address.is_ipv4() {
            Self::V4
        } else {
            Self::V6
        }
    }

    pub(crate) fn of_network(network: Network) -> Self {
        Self::of(network.address())
    }

    /// Returns the families that a redirection may capture.
    pub(crate) fn captured(ipv6: Ipv6) -> &'static [Self] {
        match ipv6 {
            Ipv6::Auto | Ipv6::On => &Self::ALL,
            Ipv6::Off => &[Self::V4],
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}
