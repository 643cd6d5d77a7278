//! Decodes expressions (linux/netfilter/nf_tables.h). Unknown ones may match or not.

mod xt;

use netlink_bindings::{
    nftables::{ExprListAttrs, IterableExprListAttrs},
    utils::find_attr,
};

use super::op::{MarkOf, Op, Slot, Source, Verdict, Writes};

const VERDICT: u32 = 0; // NFT_REG_VERDICT

pub(super) fn ops(list: IterableExprListAttrs<'_>) -> Vec<Op> {
    let elements = list.filter_map(Result::ok);
    elements
        .map(|ExprListAttrs::Elem(expr)| op(Attributes(expr.get_buf())))
        .collect()
}

/// A list of attributes. Numbers are big-endian, as everywhere in nf_tables.
#[derive(Clone, Copy)]
struct Attributes<'a>(&'a [u8]);

impl<'a> Attributes<'a> {
    fn bytes(self, kind: u16) -> Option<&'a [u8]> {
        find_attr(self.0, kind)
    }

    fn nested(self, kind: u16) -> Option<Self> {
        self.bytes(kind).map(Self)
    }

    fn number(self, kind: u16) -> Option<u32> {
        self.bytes(kind)?.try_into().ok().map(u32::from_be_bytes)
    }

    fn text(self, kind: u16) -> Option<String> {
        let bytes = self.bytes(kind)?;
        let bytes = bytes.strip_suffix(&[0]).unwrap_or(bytes);
        Some(String::from_utf8_lossy(bytes).into_owned())
    }

    fn slot(self, kind: u16) -> Option<Slot> {
        slot(self.number(kind)?)
    }

    /// Returns NFTA_DATA_VALUE of attributes like NFTA_CMP_DATA.
    fn value(self, kind: u16) -> Option<Vec<u8>> {
        Some(self.nested(kind)?.bytes(1)?.to_vec())
    }
}

/// Maps NFT_REG_1 to 4, with 16 bytes each, and NFT_REG32_00 to 15, the same memory.
fn slot(register: u32) -> Option<Slot> {
    let slot = match register {
        1..=4 => register.checked_sub(1)?.checked_mul(4)?,
        8..=23 => register.checked_sub(8)?,
        _ => return None,
    };
    Slot::try_from(slot).ok()
}

/// Reads NFTA_EXPR_NAME and NFTA_EXPR_DATA.
fn op(expr: Attributes<'_>) -> Op {
    let name = expr.text(1).unwrap_or_default();
    let data = expr.nested(2).unwrap_or(Attributes(&[]));
    known(&name, data).unwrap_or(Op::Maybe(Writes::Any))
}

fn known(name: &str, data: Attributes<'_>) -> Option<Op> {
    match name {
        "immediate" => immediate(data),
        "meta" => meta(data),
        "ct" => ct(data),
        "payload" => payload(data),
        "cmp" => cmp(data),
        "bitwise" => bitwise(data),
        "lookup" => Some(lookup(data)),
        "redir" | "nat" | "masq" => Some(Op::Translate),
        "reject" => Some(Op::Verdict(Verdict::Drop)),
        "notrack" => Some(Op::Untrack),
        "counter" | "log" | "last" => Some(Op::Pass),
        "match" => Some(xt::matching(data)),
        "target" => Some(xt::target(data)),
        // May end the rule, and write no register.
        "limit" | "quota" | "connlimit" | "objref" | "range" => Some(Op::Maybe(Writes::Nothing)),
        _ => None,
    }
}

/// Reads NFTA_IMMEDIATE_DREG and NFTA_IMMEDIATE_DATA.
fn immediate(data: Attributes<'_>) -> Option<Op> {
    match data.number(1)? {
        // The attribute NFTA_DATA_VERDICT.
        VERDICT => verdict(data.nested(2)?.nested(2)?),
        register => Some(Op::Set {
            to: slot(register)?,
            data: data.value(2)?,
        }),
    }
}

/// Reads NFTA_VERDICT_CODE, NFTA_VERDICT_CHAIN. Codes are NF_* and, if negative, of enum nft_verdicts.
fn verdict(data: Attributes<'_>) -> Option<Op> {
    let chain = || data.text(2);
    let verdict = match data.number(1)?.cast_signed() {
        0 => Verdict::Drop,
        1 => Verdict::Accept,
        -3 => Verdict::Jump(chain()?),
        -4 => Verdict::Goto(chain()?),
        -5 => Verdict::Return,
        // Continue and queue: queued packets return to the rules.
        _ => return Some(Op::Maybe(Writes::Nothing)),
    };
    Some(Op::Verdict(verdict))
}

/// Reads NFTA_META_DREG, NFTA_META_KEY (enum nft_meta_keys), NFTA_META_SREG.
fn meta(data: Attributes<'_>) -> Option<Op> {
    const MARK: u32 = 3;
    let key = data.number(2)?;
    if let Some(from) = data.slot(3) {
        let of = MarkOf::Packet;
        return Some(if key == MARK {
            Op::WriteMark { of, from }
        } else {
            Op::Pass
        });
    }
    let source = match key {
        1 => Source::EtherType,
        MARK => Source::Mark(MarkOf::Packet),
        15 => Source::Family,
        16 => Source::Protocol,
        _ => Source::Other,
    };
    load(data.slot(1)?, source)
}

/// Reads NFTA_CT_DREG, NFTA_CT_KEY (enum nft_ct_keys), NFTA_CT_SREG.
fn ct(data: Attributes<'_>) -> Option<Op> {
    const MARK: u32 = 3;
    let key = data.number(2)?;
    if let Some(from) = data.slot(4) {
        let of = MarkOf::Connection;
        return Some(if key == MARK {
            Op::WriteMark { of, from }
        } else {
            Op::Pass
        });
    }
    let source = match key {
        0 => Source::State,
        MARK => Source::Mark(MarkOf::Connection),
        _ => Source::Other,
    };
    load(data.slot(1)?, source)
}

/// Values not analysed may be as long as a name or an IPv6 address.
fn load(to: Slot, source: Source) -> Option<Op> {
    let words = if source == Source::Other { 4 } else { 1 };
    Some(Op::Load { to, words, source })
}

/// Reads NFTA_PAYLOAD_DREG, _BASE, _OFFSET, _LEN. Without a register it writes into the packet.
fn payload(data: Attributes<'_>) -> Option<Op> {
    let Some(to) = data.slot(1) else {
        return Some(Op::Pass);
    };
    let destination = |is_ipv6| Source::Destination { is_ipv6 };
    let protocol = |is_ipv6| Source::HeaderProtocol { is_ipv6 };
    // NFT_PAYLOAD_NETWORK_HEADER is 1, NFT_PAYLOAD_TRANSPORT_HEADER is 2.
    let length = data.number(4)?;
    let source = match (data.number(2)?, data.number(3)?, length) {
        (1, 9, 1) => protocol(false),
        (1, 6, 1) => protocol(true),
        (1, 16, 1..=4) => destination(false),
        (1, 24, 1..=16) => destination(true),
        (2, 2, 2) => Source::Port,
        _ => Source::Other,
    };
    let words = usize::try_from(length.div_ceil(4)).ok()?;
    Some(Op::Load { to, words, source })
}

/// Reads NFTA_CMP_SREG, _OP (enum nft_cmp_ops), _DATA.
fn cmp(data: Attributes<'_>) -> Option<Op> {
    let equal = match data.number(2)? {
        0 => true,
        1 => false,
        _ => return Some(Op::Maybe(Writes::Nothing)),
    };
    Some(Op::Compare {
        slot: data.slot(1)?,
        equal,
        data: data.value(3)?,
    })
}

/// Reads NFTA_BITWISE_SREG, _DREG, _MASK, _XOR, _OP. NFT_BITWISE_MASK_XOR is 0, and absent on
/// kernels without other operations.
fn bitwise(data: Attributes<'_>) -> Option<Op> {
    let to = data.slot(2)?;
    if data.number(6).is_some_and(|op| op != 0) {
        return load(to, Source::Other);
    }
    Some(Op::Mask {
        from: data.slot(1)?,
        to,
        mask: data.value(4)?,
        xor: data.value(5)?,
    })
}

/// NFTA_LOOKUP_DREG is absent for sets and NFT_REG_VERDICT for verdict maps.
fn lookup(data: Attributes<'_>) -> Op {
    match data.number(3) {
        None => Op::Maybe(Writes::Nothing),
        Some(VERDICT) => Op::VerdictMap,
        Some(register) => Op::Maybe(slot(register).map_or(Writes::Any, Writes::One)),
    }
}
