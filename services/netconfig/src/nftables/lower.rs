//! From what a rule means to what the kernel holds. [`super::lift`] is the way back.

use std::net::IpAddr;

use super::op::{Base, Ct, Meta, Op};
use crate::{
    marks::Mark,
    rules::{Expr, Rule},
};

/// IPPROTO_TCP.
pub(super) const TCP: u8 = 6;
/// NFPROTO_IPV4.
pub(super) const IPV4: u8 = 2;
/// NFPROTO_IPV6.
pub(super) const IPV6: u8 = 10;
/// NF_CT_STATE_BIT(IP_CT_NEW) of linux/netfilter/nf_conntrack_common.h.
pub(super) const STATE_NEW: u32 = 8;
/// Where the destination address stands in an IPv4 header.
pub(super) const DESTINATION_V4: (u32, u32) = (16, 4);
/// Where the destination address stands in an IPv6 header.
pub(super) const DESTINATION_V6: (u32, u32) = (24, 16);
/// Where the destination port stands in a TCP header.
pub(super) const DESTINATION_PORT: (u32, u32) = (2, 2);
/// IFNAMSIZ: an interface name is compared with its padding.
const INTERFACE_NAME_BYTES: usize = 16;

/// The kernel's expressions for a rule.
pub(crate) fn lower(rule: &Rule) -> Vec<Op> {
    rule.0.iter().flat_map(lower_expr).collect()
}

fn lower_expr(expr: &Expr) -> Vec<Op> {
    match expr {
        Expr::DestinationNot(address) => destination_not(*address),
        Expr::LeavesBy(name) => vec![Op::Meta(Meta::OutName), is(interface_name(name))],
        Expr::Tcp => vec![Op::Meta(Meta::Protocol), is([TCP])],
        Expr::PortNot(port) => vec![
            payload(Base::Transport, DESTINATION_PORT),
            not(port.to_be_bytes()),
        ],
        Expr::Marked(mark) => masked(Op::Meta(Meta::Mark), *mark, is),
        Expr::NotMarked(mark) => masked(Op::Meta(Meta::Mark), *mark, not),
        Expr::ConnectionMarked(mark) => masked(Op::Ct(Ct::Mark), *mark, is),
        Expr::NewConnection => {
            let new = Op::Bitwise {
                mask: number(STATE_NEW),
                xor: number(0),
            };
            vec![Op::Ct(Ct::State), new, not(number(0))]
        }
        Expr::Counter => vec![Op::Counter],
        Expr::Mark(mark) => vec![
            Op::Meta(Meta::Mark),
            with_bits(*mark),
            Op::SetMeta(Meta::Mark),
        ],
        Expr::MarkConnection(mark) => vec![Op::Ct(Ct::Mark), with_bits(*mark), Op::SetCt(Ct::Mark)],
        Expr::Accept => vec![Op::Accept],
        Expr::Redirect(port) => vec![Op::Immediate(port.to_be_bytes().into()), Op::Redirect],
        Expr::Unknown(what) => vec![Op::Unknown(what.clone())],
    }
}

/// In a table of family inet an address can only be looked at when the packet is known to have one of its family.
fn destination_not(address: IpAddr) -> Vec<Op> {
    let (family, place, bytes) = match address {
        IpAddr::V4(v4) => (IPV4, DESTINATION_V4, v4.octets().to_vec()),
        IpAddr::V6(v6) => (IPV6, DESTINATION_V6, v6.octets().to_vec()),
    };
    vec![
        Op::Meta(Meta::Family),
        is([family]),
        payload(Base::Network, place),
        not(bytes),
    ]
}

fn masked<C: Fn(Vec<u8>) -> Op>(load: Op, mark: Mark, compare: C) -> Vec<Op> {
    let mask = Op::Bitwise {
        mask: number(mark.mask()),
        xor: number(0),
    };
    vec![load, mask, compare(number(mark.value()))]
}

/// The register with the mark in the mark's bits.
fn with_bits(mark: Mark) -> Op {
    Op::Bitwise {
        mask: number(!mark.mask()),
        xor: number(mark.value()),
    }
}

fn payload(base: Base, (offset, len): (u32, u32)) -> Op {
    Op::Payload { base, offset, len }
}

fn is(data: impl Into<Vec<u8>>) -> Op {
    Op::Cmp {
        equal: true,
        data: data.into(),
    }
}

fn not(data: impl Into<Vec<u8>>) -> Op {
    Op::Cmp {
        equal: false,
        data: data.into(),
    }
}

/// Marks and states are numbers of the machine, not of the network.
fn number(number: u32) -> Vec<u8> {
    number.to_ne_bytes().into()
}

fn interface_name(name: &str) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.resize(INTERFACE_NAME_BYTES, 0);
    bytes
}
