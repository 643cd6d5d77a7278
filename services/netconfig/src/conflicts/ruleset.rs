use crate::marks::FROM_ZTUNNEL;

/// The same in both marks.
pub(super) const OUR_BITS: u32 = FROM_ZTUNNEL.mask();

/// Families of tables (NFPROTO_* of linux/netfilter.h), without bridge and arp, which see no IP packets of a pod.
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

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Inet => "inet",
            Self::Ip => "ip",
            Self::Netdev => "netdev",
            Self::Ip6 => "ip6",
        }
    }

    pub(super) fn sees(self, is_ipv6: bool) -> bool {
        match self {
            Self::Inet | Self::Netdev => true,
            Self::Ip => !is_ipv6,
            Self::Ip6 => is_ipv6,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) family: Family,
    pub(super) name: String,
    /// Increases with each created table.
    pub(super) handle: u64,
    pub(super) chains: Vec<Chain>,
}

impl Table {
    pub(super) fn chain(&self, name: &str) -> Option<&Chain> {
        self.chains.iter().find(|chain| chain.name == name)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) name: String,
    /// `None` for chains only jumped to.
    pub(super) base: Option<Base>,
    pub(super) rules: Vec<Rule>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Base {
    /// Sees only each connection's first packet, and may translate the connection.
    pub(super) is_nat: bool,
    pub(super) hook: Hook,
    pub(super) priority: i32,
    /// Policy for packets without a verdict.
    pub(super) drops: bool,
}

/// Hooks of enum nf_inet_hooks; nf_dev_hooks for netdev.
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

/// Which packets a rule excludes, and what it does to the others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) excludes_tcp: bool,
    pub(super) excludes_dns: bool,
    /// Excludes packets that begin a connection.
    pub(super) excludes_new: bool,
    /// Depends on the connection's state.
    pub(super) has_state: bool,
    /// Has conditions that are not analysed.
    pub(super) is_partial: bool,
    pub(super) effects: Vec<Effect>,
}

/// Packets that inpod's rules act on, of either IP version, not sent to a loopback address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    /// A DNS query by UDP; otherwise TCP.
    pub(super) is_dns: bool,
    /// Begins a connection; unknown if `false`.
    pub(super) is_new: bool,
}

impl Rule {
    pub(super) fn may_match(&self, packet: Packet) -> bool {
        let is_excluded = if packet.is_dns {
            self.excludes_dns
        } else {
            self.excludes_tcp
        };
        !(is_excluded || packet.is_new && self.excludes_new)
    }

    /// Returns whether all packets match that may.
    pub(super) fn is_certain(&self, packet: Packet) -> bool {
        !self.is_partial && (packet.is_new || !self.has_state)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Ends the base chain; the packet continues.
    Accept,
    Drop,
    /// Returns to the calling chain; in a base chain, applies its policy.
    Return,
    Jump(String),
    Goto(String),
    /// A verdict map: any chain of the table may follow.
    JumpToAny,
    Translate,
    Untrack,
    /// Overwrites inpod's bits of a mark.
    Mark(MarkOf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MarkOf {
    Packet,
    Connection,
}
