use netlink_bindings::{
    nftables::{PushExprAttrs, PushExprListAttrs},
    traits::Pusher,
    utils::{finalize_nested_header, push_header, push_nested_header},
};

use super::{
    lower::protocol_family,
    op::{Numbered as _, Op},
};
use crate::rules::Transport;

/// The only register used by inpod's rules (NFT_REG_1).
pub(super) const REGISTER: u32 = 1;
pub(super) const VERDICT_REGISTER: u32 = 0; // NFT_REG_VERDICT
pub(super) const ACCEPT: u32 = 1; // NF_ACCEPT
pub(super) const DROP: u32 = 0; // NF_DROP
pub(super) const EQUAL: u32 = 0; // NFT_CMP_EQ
pub(super) const NOT_EQUAL: u32 = 1; // NFT_CMP_NEQ
pub(super) const UNSPECIFIED: u32 = 0; // NFPROTO_UNSPEC
pub(super) const EXPR_NAME: u16 = 1; // NFTA_EXPR_NAME
pub(super) const EXPR_DATA: u16 = 2; // NFTA_EXPR_DATA
pub(super) const REDIR_PORT_MIN: u16 = 1; // NFTA_REDIR_REG_PROTO_MIN

pub(super) const LOOKUP_SET: u16 = 1; // NFTA_LOOKUP_SET
pub(super) const LOOKUP_REGISTER: u16 = 2; // NFTA_LOOKUP_SREG
pub(super) const SOCKET_KEY: u16 = 1; // NFTA_SOCKET_KEY
pub(super) const SOCKET_DESTINATION: u16 = 2; // NFTA_SOCKET_DREG
pub(super) const SOCKET_MARK: u32 = 1; // NFT_SOCKET_MARK
pub(super) const TCP_RESET: u32 = 1; // NFT_REJECT_TCP_RST
pub(super) const ICMP_OF_EITHER_FAMILY: u32 = 2; // NFT_REJECT_ICMPX_UNREACH
pub(super) const PORT_UNREACHABLE: u8 = 1; // NFT_REJECT_ICMPX_PORT_UNREACH
pub(super) const SOURCE_NAT: u32 = 0; // NFT_NAT_SNAT

pub(super) fn push<P: Pusher>(list: PushExprListAttrs<P>, op: &Op) -> PushExprListAttrs<P> {
    let elem = list.nested_elem();
    match op {
        Op::Meta(key) => {
            let meta = elem.nested_data_meta().push_key(key.number());
            meta.push_dreg(REGISTER).end_nested().end_nested()
        }
        Op::SetMeta(key) => {
            let meta = elem.nested_data_meta().push_key(key.number());
            meta.push_sreg(REGISTER).end_nested().end_nested()
        }
        Op::Ct(key) => {
            let ct = elem.nested_data_ct().push_key(key.number());
            ct.push_dreg(REGISTER).end_nested().end_nested()
        }
        Op::SetCt(key) => {
            let ct = elem.nested_data_ct().push_key(key.number());
            ct.push_sreg(REGISTER).end_nested().end_nested()
        }
        Op::Payload { base, offset, len } => {
            let payload = elem.nested_data_payload().push_dreg(REGISTER);
            let payload = payload.push_base(base.number()).push_offset(*offset);
            payload.push_len(*len).end_nested().end_nested()
        }
        Op::SocketMark => push_socket_mark(elem),
        Op::Lookup(set) => push_lookup(elem, set),
        Op::Cmp { equal, data } => push_cmp(elem, *equal, data),
        Op::Bitwise { mask, xor } => push_bitwise(elem, mask, xor),
        Op::Immediate(data) => {
            let immediate = elem.nested_data_immediate().push_dreg(REGISTER);
            let value = immediate.nested_data().push_value(data);
            value.end_nested().end_nested().end_nested()
        }
        Op::Counter => elem.nested_data_counter().end_nested().end_nested(),
        Op::Accept => push_verdict(elem, ACCEPT),
        Op::Drop => push_verdict(elem, DROP),
        Op::Reject(Transport::Tcp) => {
            let reject = elem.nested_data_reject().push_type(TCP_RESET);
            reject.end_nested().end_nested()
        }
        Op::Reject(Transport::Udp) => {
            let reject = elem.nested_data_reject().push_type(ICMP_OF_EITHER_FAMILY);
            let reject = reject.push_icmp_code(PORT_UNREACHABLE);
            reject.end_nested().end_nested()
        }
        Op::Redirect => push_redirect(elem),
        Op::SourceNat(family) => {
            let nat = elem.nested_data_nat().push_type(SOURCE_NAT);
            let nat = nat.push_family(protocol_family(*family).into());
            nat.push_reg_addr_min(REGISTER).end_nested().end_nested()
        }
        Op::Tproxy(family) => {
            let family = family.map_or(UNSPECIFIED, |family| protocol_family(family).into());
            let tproxy = elem.nested_data_tproxy().push_family(family);
            tproxy.push_reg_port(REGISTER).end_nested().end_nested()
        }
        // Unknown expressions occur only in foreign tables, and the kernel rejects the unknown name.
        Op::Unknown(what) => elem.push_name_bytes(what.as_bytes()).end_nested(),
    }
}

fn push_verdict<P: Pusher>(elem: PushExprAttrs<P>, code: u32) -> P {
    let immediate = elem.nested_data_immediate().push_dreg(VERDICT_REGISTER);
    let verdict = immediate.nested_data().nested_verdict().push_code(code);
    verdict.end_nested().end_nested().end_nested().end_nested()
}

fn push_cmp<P: Pusher>(elem: PushExprAttrs<P>, equal: bool, data: &[u8]) -> P {
    let operator = if equal { EQUAL } else { NOT_EQUAL };
    let cmp = elem.nested_data_cmp().push_sreg(REGISTER).push_op(operator);
    let value = cmp.nested_data().push_value(data);
    value.end_nested().end_nested().end_nested()
}

fn push_bitwise<P: Pusher>(elem: PushExprAttrs<P>, mask: &[u8], xor: &[u8]) -> P {
    let len = u32::try_from(mask.len()).unwrap_or(u32::MAX);
    let bitwise = elem.nested_data_bitwise().push_sreg(REGISTER);
    let bitwise = bitwise.push_dreg(REGISTER).push_len(len);
    let bitwise = bitwise.nested_mask().push_value(mask).end_nested();
    let bitwise = bitwise.nested_xor().push_value(xor).end_nested();
    bitwise.end_nested().end_nested()
}

/// Encodes by hand, because the specification behind `netlink-bindings` 0.3.5 has wrong attribute numbers for
/// `lookup`.
fn push_lookup<P: Pusher>(elem: PushExprAttrs<P>, set: &str) -> P {
    let mut elem = elem.push_name(c"lookup");
    let bytes = elem.as_vec_mut();
    let data = push_nested_header(bytes, EXPR_DATA);
    let name = [set.as_bytes(), &[0]].concat();
    push_header(
        bytes,
        LOOKUP_SET,
        u16::try_from(name.len()).unwrap_or(u16::MAX),
    );
    bytes.extend(name);
    push_header(bytes, LOOKUP_REGISTER, 4);
    bytes.extend(REGISTER.to_be_bytes());
    finalize_nested_header(bytes, data);
    elem.end_nested()
}

/// Encodes `redir`, which the kernel's specification and `netlink-bindings` lack.
fn push_redirect<P: Pusher>(elem: PushExprAttrs<P>) -> P {
    let mut elem = elem.push_name(c"redir");
    let bytes = elem.as_vec_mut();
    let data = push_nested_header(bytes, EXPR_DATA);
    push_header(bytes, REDIR_PORT_MIN, 4);
    bytes.extend(REGISTER.to_be_bytes());
    finalize_nested_header(bytes, data);
    elem.end_nested()
}

/// Encodes `socket`, which the kernel's specification and `netlink-bindings` lack.
fn push_socket_mark<P: Pusher>(elem: PushExprAttrs<P>) -> P {
    let mut elem = elem.push_name(c"socket");
    let bytes = elem.as_vec_mut();
    let data = push_nested_header(bytes, EXPR_DATA);
    push_header(bytes, SOCKET_KEY, 4);
    bytes.extend(SOCKET_MARK.to_be_bytes());
    push_header(bytes, SOCKET_DESTINATION, 4);
    bytes.extend(REGISTER.to_be_bytes());
    finalize_nested_header(bytes, data);
    elem.end_nested()
}
