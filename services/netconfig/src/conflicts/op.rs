//! The effects of a rule's expressions, as far as they matter to inpod's rules.

/// The index of a 32-bit register (NFT_REG32_00 and following).
pub(super) type Slot = usize;

/// An expression of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// Loads something of the packet into consecutive registers.
    Load {
        to: Slot,
        words: usize,
        source: Source,
    },
    Set {
        to: Slot,
        data: Vec<u8>,
    },
    /// Computes `register & mask ^ xor`.
    Mask {
        from: Slot,
        to: Slot,
        mask: Vec<u8>,
        xor: Vec<u8>,
    },
    /// Ends the rule unless the register is (or is not) equal to the data.
    Compare {
        slot: Slot,
        equal: bool,
        data: Vec<u8>,
    },
    /// Ends the rule unless the connection's state is (or is not) in the mask.
    State {
        mask: u32,
        inverted: bool,
    },
    /// Writes a register into a mark.
    WriteMark {
        of: MarkOf,
        from: Slot,
    },
    /// Changes these bits of a mark.
    ChangeMark {
        of: MarkOf,
        bits: u32,
    },
    /// Translates the connection's address or port.
    Translate,
    /// Excludes the packet from connection tracking.
    Untrack,
    Verdict(Verdict),
    /// Decides by a verdict map: any chain of the table may follow.
    VerdictMap,
    /// Always continues, without an effect that matters here.
    Pass,
    /// May end the rule or not.
    Maybe(Writes),
}

/// The registers that an unknown expression writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writes {
    Nothing,
    One(Slot),
    Any,
}

/// A verdict of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Ends the base chain; the packet continues.
    Accept,
    Drop,
    /// Returns to the calling chain; in a base chain, applies its policy.
    Return,
    Jump(String),
    Goto(String),
}

/// The owner of a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MarkOf {
    Packet,
    Connection,
}

/// The source of a loaded value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The transport protocol, one byte.
    Protocol,
    /// NFPROTO_IPV4 or NFPROTO_IPV6, one byte.
    Family,
    /// The Ethernet type, two bytes.
    EtherType,
    Mark(MarkOf),
    /// A bit mask of enum ip_conntrack_info, with INVALID as the lowest bit.
    State,
    /// The destination address or a prefix of it.
    Destination {
        is_ipv6: bool,
    },
    /// The protocol of an IPv4 header or the next header of IPv6.
    HeaderProtocol {
        is_ipv6: bool,
    },
    /// The destination port of TCP and UDP.
    Port,
    /// Anything that is not analysed.
    Other,
}
