use crate::family::Family;

/// An expression as the kernel holds it. All of ours work on one register.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Reads a property of the packet.
    Meta(Meta),
    /// Writes a property of the packet.
    SetMeta(Meta),
    /// Reads a property of the packet's connection.
    Ct(Ct),
    /// Writes a property of the packet's connection.
    SetCt(Ct),
    /// Reads bytes of the packet.
    Payload { base: Base, offset: u32, len: u32 },
    /// Reads the id of the cgroup of the packet's socket, or of the one above it at that level.
    SocketCgroup(u32),
    /// Ends the rule unless the register is in that set.
    Lookup(String),
    /// Ends the rule unless the register is (or is not) that.
    Cmp { equal: bool, data: Vec<u8> },
    /// `register & mask ^ xor`.
    Bitwise { mask: Vec<u8>, xor: Vec<u8> },
    /// Writes the register.
    Immediate(Vec<u8>),
    /// Counts; what was counted is not looked at.
    Counter,
    /// The packet goes on.
    Accept,
    /// The packet is gone.
    Drop,
    /// Redirects the connection to the port in the register.
    Redirect,
    /// Gives the connection the address of that family in the register as its source.
    SourceNat(Family),
    /// Hands the packet to the transparent socket on the port in the register; ends the rule where there is none.
    Tproxy(Option<Family>),
    /// Not among ours.
    Unknown(String),
}

/// Properties of a packet that ours use (enum nft_meta_keys in linux/netfilter/nf_tables.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meta {
    Mark,
    InName,
    OutName,
    SocketUser,
    SocketGroup,
    Family,
    Protocol,
}

impl Meta {
    const NUMBERS: [(Self, u32); 7] = [
        (Self::Mark, 3),
        (Self::InName, 6),
        (Self::OutName, 7),
        (Self::SocketUser, 10),
        (Self::SocketGroup, 11),
        (Self::Family, 15),
        (Self::Protocol, 16),
    ];

    pub(crate) fn number(self) -> u32 {
        number_of(self, &Self::NUMBERS)
    }

    pub(crate) fn from_number(number: u32) -> Option<Self> {
        with_number(number, &Self::NUMBERS)
    }
}

/// Properties of a connection that ours use (enum nft_ct_keys).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ct {
    State,
    Mark,
    Labels,
    Zone,
}

impl Ct {
    const NUMBERS: [(Self, u32); 4] = [
        (Self::State, 0),
        (Self::Mark, 3),
        (Self::Labels, 13),
        (Self::Zone, 17),
    ];

    pub(crate) fn number(self) -> u32 {
        number_of(self, &Self::NUMBERS)
    }

    pub(crate) fn from_number(number: u32) -> Option<Self> {
        with_number(number, &Self::NUMBERS)
    }
}

/// From where bytes of a packet are counted (enum nft_payload_bases).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    Network,
    Transport,
}

impl Base {
    const NUMBERS: [(Self, u32); 2] = [(Self::Network, 1), (Self::Transport, 2)];

    pub(crate) fn number(self) -> u32 {
        number_of(self, &Self::NUMBERS)
    }

    pub(crate) fn from_number(number: u32) -> Option<Self> {
        with_number(number, &Self::NUMBERS)
    }
}

/// Every variant stands in its table; a test shows it.
fn number_of<T: Copy + PartialEq>(value: T, numbers: &[(T, u32)]) -> u32 {
    let found = numbers.iter().find(|(candidate, _)| *candidate == value);
    found.map_or(u32::MAX, |(_, number)| *number)
}

fn with_number<T: Copy>(number: u32, numbers: &[(T, u32)]) -> Option<T> {
    let found = numbers.iter().find(|(_, candidate)| *candidate == number);
    found.map(|(value, _)| *value)
}
