//! Decodes the kernel's expressions, which become [`Op::Unknown`] if any attribute differs from inpod's.

use std::ffi::CStr;

use netlink_bindings::{
    nftables::{
        ExprListAttrs, ExprOps, IterableDataAttrs, IterableExprAttrs, IterableExprBitwiseAttrs,
        IterableExprCmpAttrs, IterableExprCtAttrs, IterableExprImmediateAttrs,
        IterableExprListAttrs, IterableExprMetaAttrs, IterableExprNatAttrs,
        IterableExprPayloadAttrs, IterableExprRejectAttrs, IterableExprTproxyAttrs,
    },
    utils::find_attr,
};

use super::{
    encode::{
        ACCEPT, DROP, EQUAL, EXPR_DATA, EXPR_NAME, ICMP_OF_EITHER_FAMILY, LOOKUP_REGISTER,
        LOOKUP_SET, NOT_EQUAL, PORT_UNREACHABLE, REDIR_PORT_MIN, REGISTER, SOCKET_DESTINATION,
        SOCKET_KEY, SOCKET_MARK, SOURCE_NAT, TCP_RESET, UNSPECIFIED, VERDICT_REGISTER,
    },
    lower::protocol_family,
    op::{Base, Ct, Meta, Numbered as _, Op},
};
use crate::{family::Family, marks::FROM_ZTUNNEL, rules::Transport};

/// The name of [`Op::Unknown`] for a match of packets of known connections only.
pub(crate) const ESTABLISHED_MATCH: &str = "match of known connections";

/// The name of [`Op::Unknown`] for iptables' target MARK with ztunnel's mark.
pub(crate) const MARK_TARGET: &str = "target that sets ztunnel's mark";

const TARGET_NAME: u16 = 1; // NFTA_TARGET_NAME
const TARGET_INFO: u16 = 3; // NFTA_TARGET_INFO
const MATCH_NAME: u16 = 1; // NFTA_MATCH_NAME
const MATCH_INFO: u16 = 3; // NFTA_MATCH_INFO
/// The offsets of match_flags, invert_flags and state_mask in struct xt_conntrack_mtinfo3.
const CONNTRACK_FIELDS: [usize; 3] = [146, 148, 150];
const CONNTRACK_STATE: u16 = 1; // XT_CONNTRACK_STATE
const CONNTRACK_NEW: u16 = 8; // XT_CONNTRACK_STATE_BIT(IP_CT_NEW)
const LOOKUP_RESULT: u16 = 3; // NFTA_LOOKUP_DREG
const LOOKUP_FLAGS: u16 = 5; // NFTA_LOOKUP_FLAGS
const REDIR_PORT_MAX: u16 = 2; // NFTA_REDIR_REG_PROTO_MAX
const REDIR_FLAGS: u16 = 3; // NFTA_REDIR_FLAGS
/// NF_NAT_RANGE_MAP_IPS, set by the kernel if the expression has an address.
const ADDRESS_GIVEN: u32 = 1;
/// NF_NAT_RANGE_PROTO_SPECIFIED, set by the kernel if the expression has a port.
const PORT_GIVEN: u32 = 2;

pub(super) fn ops(list: IterableExprListAttrs<'_>) -> Vec<Op> {
    let elements = list.filter_map(Result::ok);
    elements
        .map(|ExprListAttrs::Elem(expr)| op(&expr))
        .collect()
}

/// Returns the packets counted by the first counter of a rule.
pub(super) fn counted_packets(list: IterableExprListAttrs<'_>) -> Option<u64> {
    let mut elements = list.filter_map(Result::ok);
    elements.find_map(|ExprListAttrs::Elem(expr)| {
        let ExprOps::Counter(counter) = expr.get_data().ok()? else {
            return None;
        };
        counter.get_packets().ok()
    })
}

fn op(expr: &IterableExprAttrs<'_>) -> Op {
    known(expr).unwrap_or_else(|| Op::Unknown(name(expr)))
}

fn name(expr: &IterableExprAttrs<'_>) -> String {
    let name = expr
        .get_name()
        .map(|name| name.to_string_lossy().into_owned());
    match name {
        Ok(name) if name == "match" && matches_only_established(expr) == Some(true) => {
            ESTABLISHED_MATCH.to_owned()
        }
        Ok(name) if name == "target" && sets_ztunnels_mark(expr) == Some(true) => {
            MARK_TARGET.to_owned()
        }
        Ok(name) => name,
        Err(_) => "unnamed".to_owned(),
    }
}

/// Returns whether a match of iptables accepts packets of known connections only: `-m conntrack --ctstate` without NEW,
/// and nothing else (struct xt_conntrack_mtinfo3 of linux/netfilter/xt_conntrack.h).
fn matches_only_established(expr: &IterableExprAttrs<'_>) -> Option<bool> {
    let data = find_attr(expr.get_buf(), EXPR_DATA)?;
    let name = CStr::from_bytes_until_nul(find_attr(data, MATCH_NAME)?).ok()?;
    let info = find_attr(data, MATCH_INFO)?;
    let number = |at: usize| {
        let bytes = info.get(at..)?.first_chunk()?;
        Some(u16::from_ne_bytes(*bytes))
    };
    let [flags, inverted, states] = CONNTRACK_FIELDS.map(number);
    Some(
        name.to_bytes() == b"conntrack"
            && flags? == CONNTRACK_STATE
            && inverted? == 0
            && states? & CONNTRACK_NEW == 0,
    )
}

/// Returns whether a target of iptables gives packets ztunnel's mark (struct xt_mark_tginfo2 of
/// linux/netfilter/xt_mark.h, which begins with the mark).
fn sets_ztunnels_mark(expr: &IterableExprAttrs<'_>) -> Option<bool> {
    let data = find_attr(expr.get_buf(), EXPR_DATA)?;
    let name = CStr::from_bytes_until_nul(find_attr(data, TARGET_NAME)?).ok()?;
    let mark = find_attr(data, TARGET_INFO)?.first_chunk()?;
    let mark = u32::from_ne_bytes(*mark) & FROM_ZTUNNEL.mask();
    let names = [c"MARK", c"CONNMARK"];
    Some(names.contains(&name) && mark == FROM_ZTUNNEL.value())
}

fn known(expr: &IterableExprAttrs<'_>) -> Option<Op> {
    match find_attr(expr.get_buf(), EXPR_NAME) {
        Some(b"redir\0") => return redirect(expr),
        Some(b"lookup\0") => return lookup(expr),
        Some(b"socket\0") => return socket(expr),
        _ => {}
    }
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "the kernel's list, of which ours use these"
    )]
    match expr.get_data().ok()? {
        ExprOps::Meta(meta) => decode_meta(&meta),
        ExprOps::Ct(ct) => decode_ct(&ct),
        ExprOps::Payload(payload) => decode_payload(&payload),
        ExprOps::Cmp(cmp) => decode_cmp(&cmp),
        ExprOps::Bitwise(bitwise) => decode_bitwise(&bitwise),
        ExprOps::Immediate(immediate) => decode_immediate(&immediate),
        ExprOps::Counter(_) => Some(Op::Counter),
        ExprOps::Nat(nat) => decode_nat(&nat),
        ExprOps::Reject(reject) => decode_reject(&reject),
        ExprOps::Tproxy(tproxy) => decode_tproxy(&tproxy),
        _ => None,
    }
}

fn decode_meta(meta: &IterableExprMetaAttrs<'_>) -> Option<Op> {
    let key = Meta::from_number(meta.get_key().ok()?)?;
    match (meta.get_dreg(), meta.get_sreg()) {
        (Ok(REGISTER), Err(_)) => Some(Op::Meta(key)),
        (Err(_), Ok(REGISTER)) => Some(Op::SetMeta(key)),
        _ => None,
    }
}

fn decode_ct(ct: &IterableExprCtAttrs<'_>) -> Option<Op> {
    let key = Ct::from_number(ct.get_key().ok()?)?;
    match (ct.get_dreg(), ct.get_sreg()) {
        (Ok(REGISTER), Err(_)) => Some(Op::Ct(key)),
        (Err(_), Ok(REGISTER)) => Some(Op::SetCt(key)),
        _ => None,
    }
}

fn decode_payload(payload: &IterableExprPayloadAttrs<'_>) -> Option<Op> {
    is_register(payload.get_dreg().ok()?)?;
    Some(Op::Payload {
        base: Base::from_number(payload.get_base().ok()?)?,
        offset: payload.get_offset().ok()?,
        len: payload.get_len().ok()?,
    })
}

fn decode_cmp(cmp: &IterableExprCmpAttrs<'_>) -> Option<Op> {
    is_register(cmp.get_sreg().ok()?)?;
    let equal = match cmp.get_op().ok()? {
        EQUAL => true,
        NOT_EQUAL => false,
        _ => return None,
    };
    Some(Op::Cmp {
        equal,
        data: value(&cmp.get_data().ok()?)?,
    })
}

fn decode_bitwise(bitwise: &IterableExprBitwiseAttrs<'_>) -> Option<Op> {
    is_register(bitwise.get_sreg().ok()?)?;
    is_register(bitwise.get_dreg().ok()?)?;
    // NFT_BITWISE_MASK_XOR is 0; the attribute is absent on kernels without other operations.
    if bitwise.get_op().is_ok_and(|op| op != 0) {
        return None;
    }
    Some(Op::Bitwise {
        mask: value(&bitwise.get_mask().ok()?)?,
        xor: value(&bitwise.get_xor().ok()?)?,
    })
}

fn decode_immediate(immediate: &IterableExprImmediateAttrs<'_>) -> Option<Op> {
    let data = immediate.get_data().ok()?;
    match immediate.get_dreg().ok()? {
        REGISTER => Some(Op::Immediate(value(&data)?)),
        VERDICT_REGISTER => {
            let code = data.get_verdict().ok()?.get_code().ok()?;
            match code {
                ACCEPT => Some(Op::Accept),
                DROP => Some(Op::Drop),
                _ => None,
            }
        }
        _ => None,
    }
}

fn decode_reject(reject: &IterableExprRejectAttrs<'_>) -> Option<Op> {
    match (reject.get_type().ok()?, reject.get_icmp_code()) {
        (TCP_RESET, _) => Some(Op::Reject(Transport::Tcp)),
        (ICMP_OF_EITHER_FAMILY, Ok(PORT_UNREACHABLE)) => Some(Op::Reject(Transport::Udp)),
        _ => None,
    }
}

fn decode_tproxy(tproxy: &IterableExprTproxyAttrs<'_>) -> Option<Op> {
    is_register(tproxy.get_reg_port().ok()?)?;
    let number = tproxy.get_family().ok()?;
    let mut families = Family::ALL.into_iter();
    let family = families.find(|family| u32::from(protocol_family(*family)) == number);
    let is_plain = tproxy.get_reg_addr().is_err() && (family.is_some() || number == UNSPECIFIED);
    is_plain.then_some(Op::Tproxy(family))
}

/// Decodes a lookup that is neither inverted nor loads a result.
fn lookup(expr: &IterableExprAttrs<'_>) -> Option<Op> {
    let data = find_attr(expr.get_buf(), EXPR_DATA)?;
    is_register(number(data, LOOKUP_REGISTER)?)?;
    let is_plain =
        find_attr(data, LOOKUP_RESULT).is_none() && number(data, LOOKUP_FLAGS).unwrap_or(0) == 0;
    let set = CStr::from_bytes_until_nul(find_attr(data, LOOKUP_SET)?).ok()?;
    let set = set.to_str().ok()?.to_owned();
    is_plain.then_some(Op::Lookup(set))
}

fn socket(expr: &IterableExprAttrs<'_>) -> Option<Op> {
    let data = find_attr(expr.get_buf(), EXPR_DATA)?;
    is_register(number(data, SOCKET_DESTINATION)?)?;
    (number(data, SOCKET_KEY)? == SOCKET_MARK).then_some(Op::SocketMark)
}

/// Decodes a source NAT to one address, without ports or flags of another effect.
fn decode_nat(nat: &IterableExprNatAttrs<'_>) -> Option<Op> {
    is_register(nat.get_reg_addr_min().ok()?)?;
    is_register(nat.get_reg_addr_max().unwrap_or(REGISTER))?;
    let number = nat.get_family().ok()?;
    let mut families = Family::ALL.into_iter();
    let family = families.find(|family| u32::from(protocol_family(*family)) == number)?;
    let is_plain = nat.get_type().ok()? == SOURCE_NAT
        && nat.get_reg_proto_min().is_err()
        && nat.get_flags().unwrap_or(ADDRESS_GIVEN) == ADDRESS_GIVEN;
    is_plain.then_some(Op::SourceNat(family))
}

fn number(data: &[u8], kind: u16) -> Option<u32> {
    let bytes = find_attr(data, kind)?.try_into().ok()?;
    Some(u32::from_be_bytes(bytes))
}

/// Decodes a redirection to one port, without flags of another effect.
fn redirect(expr: &IterableExprAttrs<'_>) -> Option<Op> {
    let data = find_attr(expr.get_buf(), EXPR_DATA)?;
    is_register(number(data, REDIR_PORT_MIN)?)?;
    is_register(number(data, REDIR_PORT_MAX).unwrap_or(REGISTER))?;
    (number(data, REDIR_FLAGS).unwrap_or(PORT_GIVEN) == PORT_GIVEN).then_some(Op::Redirect)
}

fn is_register(register: u32) -> Option<()> {
    (register == REGISTER).then_some(())
}

fn value(data: &IterableDataAttrs<'_>) -> Option<Vec<u8>> {
    Some(data.get_value().ok()?.to_vec())
}
