//! Turns rules into the kernel's expressions, as the inverse of [`super::lift`].

use std::net::IpAddr;

use super::op::{Base, Ct, Meta, Op};
use crate::{
    family::Family,
    marks::Mark,
    rules::{Expr, InterfaceName, Network, Rule, Transport},
};

const IPV4: u8 = 2; // NFPROTO_IPV4
const IPV6: u8 = 10; // NFPROTO_IPV6
pub(super) const STATE_NEW: u32 = 8; // NF_CT_STATE_BIT(IP_CT_NEW) of linux/netfilter/nf_conntrack_common.h
pub(super) const STATE_KNOWN: u32 = 2 | 4; // NF_CT_STATE_BIT of IP_CT_ESTABLISHED and IP_CT_RELATED
pub(super) const STATE_INVALID: u32 = 1; // NF_CT_STATE_INVALID_BIT
/// Offset and length in the data behind the first VLAN tag of a frame.
const SECOND_TAG: (u32, u32) = (0, 2);
const VLAN_MASK: u16 = 0x0fff; // VLAN_VID_MASK of linux/if_vlan.h
/// Offset and length in an IPv4 header.
const SOURCE_V4: (u32, u32) = (12, 4);
const DESTINATION_V4: (u32, u32) = (16, 4);
/// Offset and length in an IPv6 header.
const SOURCE_V6: (u32, u32) = (8, 16);
const DESTINATION_V6: (u32, u32) = (24, 16);
/// Offset and length in TCP and UDP headers.
pub(super) const SOURCE_PORT: (u32, u32) = (0, 2);
pub(super) const DESTINATION_PORT: (u32, u32) = (2, 2);
/// Offset and length in a TCP header.
pub(super) const TCP_FLAGS: (u32, u32) = (13, 1);
/// The TCP flags FIN, SYN, RST and ACK.
pub(super) const TCP_FLAGS_MASK: u8 = 0x17;
pub(crate) const SYN: u8 = 0x02;
/// (uid_t) -1, which no user has. Loading the owner ends the rule if there is no socket (nft_meta_get_eval_skugid
/// in net/netfilter/nft_meta.c), and otherwise the comparison with this value is true. Without a comparison, nft
/// would not list the expression.
pub(super) const INVALID_UID: u32 = u32::MAX;
/// IFNAMSIZ, since names are compared with their padding.
const INTERFACE_NAME_BYTES: usize = 16;

pub(crate) fn lower(rule: &Rule) -> Vec<Op> {
    rule.0.iter().flat_map(lower_expr).collect()
}

fn lower_expr(expr: &Expr) -> Vec<Op> {
    match expr {
        Expr::Version(family) => version(*family),
        Expr::Source(network) => address(*network, source_of, is),
        Expr::Destination(network) => address(*network, destination_of, is),
        Expr::DestinationNot(other) => address(*other, destination_of, not),
        Expr::DestinationIn(family, set) => {
            let mut ops = version(*family);
            ops.push(payload(Base::Network, destination_of(*family)));
            ops.push(Op::Lookup(set.clone()));
            ops
        }
        Expr::FrameFrom(from) => {
            let family = Family::of(*from);
            let mut ops = ether_type(ether_type_of(family));
            ops.extend([payload(Base::Network, source_of(family)), is(bytes(*from))]);
            ops
        }
        Expr::FrameTagged(inner) => {
            let mut ops = priority_tag().to_vec();
            ops.extend(ether_type(*inner));
            ops
        }
        Expr::ArrivesBy(name) => vec![Op::Meta(Meta::InName), is(interface_name(name))],
        Expr::LeavesBy(name) => vec![Op::Meta(Meta::OutName), is(interface_name(name))],
        Expr::NotLeavesBy(name) => vec![Op::Meta(Meta::OutName), not(interface_name(name))],
        Expr::Protocol(transport) => vec![Op::Meta(Meta::Protocol), is([protocol(*transport)])],
        Expr::SourcePort(port) => vec![transport(SOURCE_PORT), is(port.to_be_bytes())],
        Expr::Port(port) => vec![transport(DESTINATION_PORT), is(port.to_be_bytes())],
        Expr::PortNot(port) => vec![transport(DESTINATION_PORT), not(port.to_be_bytes())],
        Expr::TcpSyn => vec![
            transport(TCP_FLAGS),
            bitwise([TCP_FLAGS_MASK], [0]),
            is([SYN]),
        ],
        Expr::Marked(mark) => masked(Op::Meta(Meta::Mark), *mark, is),
        Expr::NotMarked(mark) => masked(Op::Meta(Meta::Mark), *mark, not),
        Expr::ConnectionMarked(mark) => masked(Op::Ct(Ct::Mark), *mark, is),
        Expr::ReceiverNotMarked(mark) => masked(Op::SocketMark, *mark, not),
        Expr::NewConnection => state(STATE_NEW),
        Expr::KnownConnection => state(STATE_KNOWN),
        Expr::InvalidConnection => state(STATE_INVALID),
        Expr::FromAnySocket => vec![Op::Meta(Meta::SocketUser), not(encode_number(INVALID_UID))],
        Expr::FromUser(user) => vec![Op::Meta(Meta::SocketUser), is(encode_number(*user))],
        Expr::FromGroup(group) => vec![Op::Meta(Meta::SocketGroup), is(encode_number(*group))],
        Expr::NotFromGroup(group) => vec![Op::Meta(Meta::SocketGroup), not(encode_number(*group))],
        Expr::Counter => vec![Op::Counter],
        Expr::Mark(mark) => set_mark(*mark),
        Expr::MarkConnection(mark) => vec![Op::Ct(Ct::Mark), with_bits(*mark), Op::SetCt(Ct::Mark)],
        Expr::Zone(zone) => vec![
            Op::Immediate(zone.to_ne_bytes().into()),
            Op::SetCt(Ct::Zone),
        ],
        Expr::Accept => vec![Op::Accept],
        Expr::Drop => vec![Op::Drop],
        Expr::Refuse(transport) => vec![Op::Reject(*transport)],
        Expr::Redirect(port) => vec![Op::Immediate(port.to_be_bytes().into()), Op::Redirect],
        Expr::SourceNat(to) => vec![Op::Immediate(bytes(*to)), Op::SourceNat(Family::of(*to))],
        Expr::Tproxy(family, port, mark) => tproxy(*family, *port, *mark),
        Expr::Unknown(what) => vec![Op::Unknown(what.clone())],
    }
}

/// Lowers a TPROXY statement. Without a socket, the TPROXY expression ends the rule before the mark is set.
fn tproxy(family: Option<Family>, port: u16, mark: Mark) -> Vec<Op> {
    let mut ops = vec![Op::Immediate(port.to_be_bytes().into()), Op::Tproxy(family)];
    ops.extend(set_mark(mark));
    ops.push(Op::Accept);
    ops
}

/// Compares an address, which a rule in an inet table can only load once the family is certain.
fn address(
    network: Network,
    field: fn(Family) -> (u32, u32),
    compare: fn(Vec<u8>) -> Op,
) -> Vec<Op> {
    let family = Family::of_network(network);
    let mut ops = version(family);
    ops.push(payload(Base::Network, field(family)));
    if !network.is_host() {
        let mask = bytes(network.mask());
        let xor = vec![0; mask.len()];
        ops.push(bitwise(mask, xor));
    }
    ops.push(compare(bytes(network.address())));
    ops
}

fn version(family: Family) -> Vec<Op> {
    vec![Op::Meta(Meta::Family), is([protocol_family(family)])]
}

pub(crate) fn protocol_family(family: Family) -> u8 {
    match family {
        Family::V4 => IPV4,
        Family::V6 => IPV6,
    }
}

/// Compares the EtherType behind the first VLAN tag: the kernel removes the tag on arrival (skb_vlan_untag in
/// net/core/skbuff.c).
fn ether_type(number: u16) -> Vec<Op> {
    vec![Op::Meta(Meta::EtherType), is(number.to_be_bytes())]
}

pub(crate) fn ether_type_of(family: Family) -> u16 {
    match family {
        Family::V4 => 0x0800, // ETH_P_IP
        Family::V6 => 0x86dd, // ETH_P_IPV6
    }
}

/// Compares the VLAN of a frame's second tag with 0. The kernel keeps the first tag beside the frame, so that the second
/// tag is where the network header is expected (skb_vlan_untag in net/core/skbuff.c).
/// Behind a match of the EtherType, nft 1.0.6 could not list the comparison (an assertion of payload_expr_complete).
pub(super) fn priority_tag() -> [Op; 3] {
    [
        payload(Base::Network, SECOND_TAG),
        bitwise(VLAN_MASK.to_be_bytes(), [0, 0]),
        is([0, 0]),
    ]
}

pub(super) fn source_of(family: Family) -> (u32, u32) {
    match family {
        Family::V4 => SOURCE_V4,
        Family::V6 => SOURCE_V6,
    }
}

pub(crate) fn destination_of(family: Family) -> (u32, u32) {
    match family {
        Family::V4 => DESTINATION_V4,
        Family::V6 => DESTINATION_V6,
    }
}

/// Returns IPPROTO_TCP or IPPROTO_UDP.
pub(super) fn protocol(transport: Transport) -> u8 {
    match transport {
        Transport::Tcp => 6,
        Transport::Udp => 17,
    }
}

pub(super) fn bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().into(),
        IpAddr::V6(v6) => v6.octets().into(),
    }
}

fn state(bits: u32) -> Vec<Op> {
    let mask = bitwise(encode_number(bits), encode_number(0));
    vec![Op::Ct(Ct::State), mask, not(encode_number(0))]
}

fn set_mark(mark: Mark) -> Vec<Op> {
    vec![
        Op::Meta(Meta::Mark),
        with_bits(mark),
        Op::SetMeta(Meta::Mark),
    ]
}

fn transport(field: (u32, u32)) -> Op {
    payload(Base::Transport, field)
}

fn masked<C: Fn(Vec<u8>) -> Op>(load: Op, mark: Mark, compare: C) -> Vec<Op> {
    let mask = bitwise(encode_number(mark.mask()), encode_number(0));
    vec![load, mask, compare(encode_number(mark.value()))]
}

fn with_bits(mark: Mark) -> Op {
    bitwise(encode_number(!mark.mask()), encode_number(mark.value()))
}

fn bitwise(mask: impl Into<Vec<u8>>, xor: impl Into<Vec<u8>>) -> Op {
    let (mask, xor) = (mask.into(), xor.into());
    Op::Bitwise { mask, xor }
}

pub(super) fn payload(base: Base, (offset, len): (u32, u32)) -> Op {
    Op::Payload { base, offset, len }
}

pub(super) fn is(data: impl Into<Vec<u8>>) -> Op {
    let (equal, data) = (true, data.into());
    Op::Cmp { equal, data }
}

fn not(data: impl Into<Vec<u8>>) -> Op {
    let (equal, data) = (false, data.into());
    Op::Cmp { equal, data }
}

fn encode_number(number: u32) -> Vec<u8> {
    number.to_ne_bytes().into()
}

/// Returns the name with its padding, or the beginning for which a pattern stands.
fn interface_name(name: &InterfaceName) -> Vec<u8> {
    if let Some(prefix) = name.prefix() {
        return prefix.as_bytes().to_vec();
    }
    let mut bytes = name.as_str().as_bytes().to_vec();
    bytes.resize(INTERFACE_NAME_BYTES, 0);
    bytes
}
