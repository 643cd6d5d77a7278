//! Effects of a rule's expressions, as far as they matter to inpod's rules.

/// Index of a 32-bit register (NFT_REG32_00 and following).
pub(super) type Slot = usize;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// Loads a packet property into consecutive registers.
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
    /// Ends the rule unless the register (un)equals the data.
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
    WriteMark {
        of: MarkOf,
        from: Slot,
    },
    ChangeMark {
        of: MarkOf,
        bits: u32,
    },
    Translate,
    Untrack,
    Verdict(Verdict),
    /// A verdict map: any chain of the table may follow.
    VerdictMap,
    /// Continues, without an effect that matters here.
    Pass,
    /// May end the rule or not.
    Maybe(Writes),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writes {
    Nothing,
    One(Slot),
    Any,
}

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MarkOf {
    Packet,
    Connection,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Protocol,
    /// NFPROTO_IPV4 or NFPROTO_IPV6, one byte.
    Family,
    /// Two bytes of Ethernet type.
    EtherType,
    Mark(MarkOf),
    /// Bit mask of enum ip_conntrack_info, INVALID as the lowest bit.
    State,
    /// The address or a prefix of it.
    Destination {
        is_ipv6: bool,
    },
    /// IPv4's protocol or IPv6's next header.
    HeaderProtocol {
        is_ipv6: bool,
    },
    /// Of TCP and UDP.
    Port,
    /// Anything that is not analysed.
    Other,
}
