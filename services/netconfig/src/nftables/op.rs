use crate::{family::Family, rules::Transport};

/// An expression as stored by the kernel. inpod's rules use only one register.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Meta(Meta),
    SetMeta(Meta),
    Ct(Ct),
    SetCt(Ct),
    Payload {
        base: Base,
        offset: u32,
        len: u32,
    },
    /// Loads the mark of the socket that receives the packet; without a socket, the rule ends.
    SocketMark,
    /// Ends the rule unless the register is in the set.
    Lookup(String),
    /// Ends the rule unless the register (un)equals the data.
    Cmp {
        equal: bool,
        data: Vec<u8>,
    },
    /// Computes `register & mask ^ xor`.
    Bitwise {
        mask: Vec<u8>,
        xor: Vec<u8>,
    },
    Immediate(Vec<u8>),
    /// Counts packets. The count is no part of the expression, so that rules compare equal whatever they have counted.
    Counter,
    Accept,
    Drop,
    /// Refuses by a TCP reset or, for UDP, by an ICMP message of either family that the port is unreachable.
    Reject(Transport),
    /// Redirects the connection to the port in the register.
    Redirect,
    /// Translates the source to the address in the register.
    SourceNat(Family),
    /// Delivers packets to the transparent socket on the port in the register; without such a socket, the rule
    /// ends.
    Tproxy(Option<Family>),
    Unknown(String),
}

/// A property with a number of the kernel's.
pub(super) trait Numbered: Copy + PartialEq + 'static {
    /// A test verifies that every variant is in the table.
    const NUMBERS: &'static [(Self, u32)];

    fn number(self) -> u32 {
        let mut numbers = Self::NUMBERS.iter();
        let found = numbers.find(|(candidate, _)| *candidate == self);
        found.map_or(u32::MAX, |(_, number)| *number)
    }

    fn from_number(number: u32) -> Option<Self> {
        let mut numbers = Self::NUMBERS.iter();
        let found = numbers.find(|(_, candidate)| *candidate == number);
        found.map(|(value, _)| *value)
    }
}

/// Packet properties used in inpod's rules (enum nft_meta_keys in linux/netfilter/nf_tables.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meta {
    EtherType,
    Mark,
    InName,
    OutName,
    SocketUser,
    SocketGroup,
    Family,
    Protocol,
}

impl Numbered for Meta {
    const NUMBERS: &'static [(Self, u32)] = &[
        (Self::EtherType, 1),
        (Self::Mark, 3),
        (Self::InName, 6),
        (Self::OutName, 7),
        (Self::SocketUser, 10),
        (Self::SocketGroup, 11),
        (Self::Family, 15),
        (Self::Protocol, 16),
    ];
}

/// Connection properties used in inpod's rules (enum nft_ct_keys).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ct {
    State,
    Mark,
    Zone,
}

impl Numbered for Ct {
    const NUMBERS: &'static [(Self, u32)] = &[(Self::State, 0), (Self::Mark, 3), (Self::Zone, 17)];
}

/// Headers from which offsets count (enum nft_payload_bases).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    Network,
    Transport,
}

impl Numbered for Base {
    const NUMBERS: &'static [(Self, u32)] = &[(Self::Network, 1), (Self::Transport, 2)];
}
