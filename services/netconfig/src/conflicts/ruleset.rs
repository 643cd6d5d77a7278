//! A netns's whole packet filter as plain data, as far as the radar understands it.

use super::op::Op;

/// What a table is for (NFPROTO_* in linux/netfilter.h). Those for bridges and ARP meet no IP packet of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Inet,
    Ip,
    Netdev,
    Ip6,
}

impl Family {
    pub(super) fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Inet),
            2 => Some(Self::Ip),
            5 => Some(Self::Netdev),
            10 => Some(Self::Ip6),
            _ => None,
        }
    }

    pub(super) fn number(self) -> u8 {
        match self {
            Self::Inet => 1,
            Self::Ip => 2,
            Self::Netdev => 5,
            Self::Ip6 => 10,
        }
    }

    /// As nft names it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Inet => "inet",
            Self::Ip => "ip",
            Self::Netdev => "netdev",
            Self::Ip6 => "ip6",
        }
    }

    /// Whether its tables see packets of IPv4, or of IPv6.
    pub(super) fn sees(self, is_ipv6: bool) -> bool {
        match self {
            Self::Inet | Self::Netdev => true,
            Self::Ip => !is_ipv6,
            Self::Ip6 => is_ipv6,
        }
    }
}

/// A table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) family: Family,
    pub(super) name: String,
    /// Tables that are made later have greater ones.
    pub(super) handle: u64,
    pub(super) chains: Vec<Chain>,
}

impl Table {
    pub(super) fn chain(&self, name: &str) -> Option<&Chain> {
        self.chains.iter().find(|chain| chain.name == name)
    }
}

/// A chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) name: String,
    /// Where packets enter it; `None` for one that is only jumped to.
    pub(super) base: Option<Base>,
    pub(super) rules: Vec<Vec<Op>>,
}

/// Where packets enter a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Base {
    /// Whether it sees the first packet of a connection alone, and may translate it.
    pub(super) is_nat: bool,
    pub(super) hook: Hook,
    pub(super) priority: i32,
    /// Whether a packet that no rule decided on is gone.
    pub(super) drops: bool,
}

/// A point of a packet's way (enum nf_inet_hooks, and nf_dev_hooks of a device).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hook {
    Ingress,
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
    Egress,
}

impl Hook {
    pub(super) fn from_number(family: Family, number: u32) -> Option<Self> {
        let hooks = match family {
            Family::Netdev => &[Self::Ingress, Self::Egress][..],
            Family::Inet | Family::Ip | Family::Ip6 => &[
                Self::Prerouting,
                Self::Input,
                Self::Forward,
                Self::Output,
                Self::Postrouting,
                Self::Ingress,
            ],
        };
        hooks.get(usize::try_from(number).ok()?).copied()
    }

    /// As nft names it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Prerouting => "prerouting",
            Self::Input => "input",
            Self::Forward => "forward",
            Self::Output => "output",
            Self::Postrouting => "postrouting",
            Self::Egress => "egress",
        }
    }
}
