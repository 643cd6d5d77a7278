//! What the expressions of a rule do, as far as it concerns inpod's rules.

/// A register, in words of 32 bits (NFT_REG32_00 and following).
pub(super) type Slot = usize;

/// One expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// Reads something of the packet into as many words.
    Load {
        to: Slot,
        words: usize,
        source: Source,
    },
    /// Writes a register.
    Set { to: Slot, data: Vec<u8> },
    /// `register & mask ^ xor`.
    Mask {
        from: Slot,
        to: Slot,
        mask: Vec<u8>,
        xor: Vec<u8>,
    },
    /// Ends the rule unless the register is (or is not) that.
    Compare {
        slot: Slot,
        equal: bool,
        data: Vec<u8>,
    },
    /// Ends the rule unless the connection's state is (or is not) one of these.
    State { mask: u32, inverted: bool },
    /// Writes a mark from a register.
    WriteMark { of: MarkOf, from: Slot },
    /// Changes these bits of a mark.
    ChangeMark { of: MarkOf, bits: u32 },
    /// Sends the connection elsewhere.
    Translate,
    /// Takes the packet out of connection tracking.
    Untrack,
    /// Decides.
    Verdict(Verdict),
    /// Decides by a map: any chain of the table may follow.
    VerdictMap,
    /// Always holds, and changes nothing that is looked at here.
    Pass,
    /// May hold or not.
    Maybe(Writes),
}

/// What an expression that is not looked into writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writes {
    Nothing,
    One(Slot),
    Any,
}

/// What decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The packet leaves the base chain and goes on.
    Accept,
    /// The packet is gone.
    Drop,
    /// Back to the chain that jumped here; from a base chain, its policy.
    Return,
    Jump(String),
    Goto(String),
}

/// Whose mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MarkOf {
    Packet,
    Connection,
}

/// What is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The protocol in IP, one byte.
    Protocol,
    /// NFPROTO_IPV4 or NFPROTO_IPV6, one byte.
    Family,
    /// The Ethernet type, two bytes.
    EtherType,
    /// A mark.
    Mark(MarkOf),
    /// Bits by number of enum ip_conntrack_info, and below them INVALID.
    State,
    /// The destination's address, or its beginning; of IPv6.
    Destination { is_ipv6: bool },
    /// The protocol in an IPv4 header, or the next header of IPv6.
    HeaderProtocol { is_ipv6: bool },
    /// The destination port of TCP and UDP.
    Port,
    /// Something that is not looked at.
    Other,
}
