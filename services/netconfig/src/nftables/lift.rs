//! Turns the kernel's expressions into rules, as the inverse of [`super::lower`].

use std::net::IpAddr;

use super::{
    lower::{
        DESTINATION_PORT, INVALID_UID, SOURCE_PORT, STATE_INVALID, STATE_KNOWN, STATE_NEW, SYN,
        TCP_FLAGS, TCP_FLAGS_MASK, destination_of, ether_type_of, is, payload, priority_tag,
        protocol, protocol_family, source_of,
    },
    op::{Base, Ct, Meta, Op},
};
use crate::{
    family::Family,
    marks::Mark,
    rules::{Expr, InterfaceName, Network, Rule, Transport},
};

/// Turns expressions into a rule by repeatedly taking the longest meaningful prefix. Expressions that inpod does
/// not write become [`Expr::Unknown`].
pub(crate) fn lift(mut ops: &[Op]) -> Rule {
    let mut exprs = Vec::new();
    while let Some((first, rest)) = ops.split_first() {
        let lifted = [tproxy, in_set, frame, address, three_ops, two_ops, one_op]
            .iter()
            .find_map(|lift| lift(ops));
        let (expr, after) = lifted.unwrap_or_else(|| (unknown(first), rest));
        exprs.push(expr);
        ops = after;
    }
    Rule(exprs)
}

type Lifted<'a> = Option<(Expr, &'a [Op])>;

fn tproxy(ops: &[Op]) -> Lifted<'_> {
    let ([Op::Immediate(to), Op::Tproxy(family)], rest) = ops.split_first_chunk()? else {
        return None;
    };
    let (Expr::Mark(mark), rest) = three_ops(rest)? else {
        return None;
    };
    let (Op::Accept, rest) = rest.split_first()? else {
        return None;
    };
    Some((Expr::Tproxy(*family, port(to)?, mark), rest))
}

fn in_set(ops: &[Op]) -> Lifted<'_> {
    let (Expr::Version(family), rest) = two_ops(ops)? else {
        return None;
    };
    let ([load, Op::Lookup(set)], rest) = rest.split_first_chunk()? else {
        return None;
    };
    let is_destination = *load == payload(Base::Network, destination_of(family));
    is_destination.then(|| (Expr::DestinationIn(family, set.clone()), rest))
}

/// Lifts a match of the content of a bridged frame.
fn frame(ops: &[Op]) -> Lifted<'_> {
    let tagged = ops.strip_prefix(&priority_tag());
    let ([Op::Meta(Meta::EtherType), Op::Cmp { equal: true, data }], rest) =
        tagged.unwrap_or(ops).split_first_chunk()?
    else {
        return None;
    };
    let found = u16::from_be_bytes(data.as_slice().try_into().ok()?);
    if tagged.is_some() {
        return Some((Expr::FrameTagged(found), rest));
    }
    let mut families = Family::ALL.into_iter();
    let family = families.find(|family| ether_type_of(*family) == found)?;
    let ([load, Op::Cmp { equal: true, data }], rest) = rest.split_first_chunk()? else {
        return None;
    };
    let is_source = *load == payload(Base::Network, source_of(family));
    let from = is_source.then(|| ip(family, data)).flatten()?;
    Some((Expr::FrameFrom(from), rest))
}

/// Lifts a match of a whole address or, after a mask, of a network.
fn address(ops: &[Op]) -> Lifted<'_> {
    let (Expr::Version(family), rest) = two_ops(ops)? else {
        return None;
    };
    let (load, rest) = rest.split_first()?;
    let (mask, rest) = match rest.split_first()? {
        (Op::Bitwise { mask, xor }, rest) if xor.iter().all(|byte| *byte == 0) => {
            (Some(mask), rest)
        }
        _ => (None, rest),
    };
    let (Op::Cmp { equal, data }, rest) = rest.split_first()? else {
        return None;
    };
    let found = ip(family, data)?;
    let network = match mask {
        Some(mask) => {
            Network::of_mask(found, ip(family, mask)?).filter(|found| !found.is_host())?
        }
        None => Network::host(found),
    };
    let is_of = |field| *load == payload(Base::Network, field);
    let expr = match (
        *equal,
        is_of(source_of(family)),
        is_of(destination_of(family)),
    ) {
        (true, true, _) => Expr::Source(network),
        (true, _, true) => Expr::Destination(network),
        (false, _, true) => Expr::DestinationNot(network),
        _ => return None,
    };
    Some((expr, rest))
}

pub(super) fn ip(family: Family, data: &[u8]) -> Option<IpAddr> {
    match family {
        Family::V4 => Some(<[u8; 4]>::try_from(data).ok()?.into()),
        Family::V6 => Some(<[u8; 16]>::try_from(data).ok()?.into()),
    }
}

fn three_ops(ops: &[Op]) -> Lifted<'_> {
    let ([first, Op::Bitwise { mask, xor }, last], rest) = ops.split_first_chunk()? else {
        return None;
    };
    if is_syn(first, mask, xor, last) {
        return Some((Expr::TcpSyn, rest));
    }
    let (mask, xor) = (number(mask)?, number(xor)?);
    let expr = match (first, last) {
        (Op::Meta(Meta::Mark), Op::SetMeta(Meta::Mark)) => Expr::Mark(Mark::new(xor, !mask)?),
        (Op::Ct(Ct::Mark), Op::SetCt(Ct::Mark)) => Expr::MarkConnection(Mark::new(xor, !mask)?),
        (load, Op::Cmp { equal, data }) if xor == 0 => compared(load, mask, *equal, number(data)?)?,
        _ => return None,
    };
    Some((expr, rest))
}

fn is_syn(load: &Op, mask: &[u8], xor: &[u8], compare: &Op) -> bool {
    *load == payload(Base::Transport, TCP_FLAGS)
        && (mask, xor) == (&[TCP_FLAGS_MASK], &[0])
        && *compare == is([SYN])
}

fn compared(load: &Op, mask: u32, equal: bool, value: u32) -> Option<Expr> {
    match (load, equal) {
        (Op::Meta(Meta::Mark), true) => Some(Expr::Marked(Mark::new(value, mask)?)),
        (Op::Meta(Meta::Mark), false) => Some(Expr::NotMarked(Mark::new(value, mask)?)),
        (Op::Ct(Ct::Mark), true) => Some(Expr::ConnectionMarked(Mark::new(value, mask)?)),
        (Op::SocketMark, false) => Some(Expr::ReceiverNotMarked(Mark::new(value, mask)?)),
        (Op::Ct(Ct::State), false) => match (mask, value) {
            (STATE_NEW, 0) => Some(Expr::NewConnection),
            (STATE_KNOWN, 0) => Some(Expr::KnownConnection),
            (STATE_INVALID, 0) => Some(Expr::InvalidConnection),
            _ => None,
        },
        _ => None,
    }
}

fn two_ops(ops: &[Op]) -> Lifted<'_> {
    let ([first, second], rest) = ops.split_first_chunk()?;
    let expr = match (first, second) {
        (Op::Meta(meta), Op::Cmp { equal, data }) => property(*meta, *equal, data)?,
        (load, Op::Cmp { equal, data }) => ported(load, *equal, port(data)?)?,
        (Op::Immediate(data), Op::Redirect) => Expr::Redirect(port(data)?),
        (Op::Immediate(data), Op::SetCt(Ct::Zone)) => {
            Expr::Zone(u16::from_ne_bytes(data.as_slice().try_into().ok()?))
        }
        (Op::Immediate(data), Op::SourceNat(family)) => Expr::SourceNat(ip(*family, data)?),
        _ => return None,
    };
    Some((expr, rest))
}

fn property(meta: Meta, equal: bool, data: &[u8]) -> Option<Expr> {
    match (meta, equal) {
        (Meta::InName, true) => interface_name(data).map(Expr::ArrivesBy),
        (Meta::OutName, true) => interface_name(data).map(Expr::LeavesBy),
        (Meta::OutName, false) => interface_name(data).map(Expr::NotLeavesBy),
        (Meta::Family, true) => {
            let mut families = Family::ALL.into_iter();
            let found = families.find(|family| data == [protocol_family(*family)]);
            found.map(Expr::Version)
        }
        (Meta::Protocol, true) => {
            let mut transports = [Transport::Tcp, Transport::Udp].into_iter();
            let found = transports.find(|transport| data == [protocol(*transport)]);
            found.map(Expr::Protocol)
        }
        (Meta::SocketUser, true) => number(data).map(Expr::FromUser),
        (Meta::SocketGroup, true) => number(data).map(Expr::FromGroup),
        (Meta::SocketGroup, false) => number(data).map(Expr::NotFromGroup),
        (Meta::SocketUser, false) => (number(data)? == INVALID_UID).then_some(Expr::FromAnySocket),
        (Meta::Mark | Meta::EtherType, _)
        | (Meta::InName | Meta::Family | Meta::Protocol, false) => None,
    }
}

fn ported(load: &Op, equal: bool, port: u16) -> Option<Expr> {
    let is_of = |field| *load == payload(Base::Transport, field);
    match (equal, is_of(SOURCE_PORT), is_of(DESTINATION_PORT)) {
        (true, true, _) => Some(Expr::SourcePort(port)),
        (true, _, true) => Some(Expr::Port(port)),
        (false, _, true) => Some(Expr::PortNot(port)),
        _ => None,
    }
}

fn one_op(ops: &[Op]) -> Lifted<'_> {
    let (first, rest) = ops.split_first()?;
    let known = [
        (Op::Counter, Expr::Counter),
        (Op::Accept, Expr::Accept),
        (Op::Drop, Expr::Drop),
        (Op::Reject(Transport::Tcp), Expr::Refuse(Transport::Tcp)),
        (Op::Reject(Transport::Udp), Expr::Refuse(Transport::Udp)),
    ];
    let (_, expr) = known.into_iter().find(|(op, _)| op == first)?;
    Some((expr, rest))
}

fn unknown(op: &Op) -> Expr {
    if let Op::Unknown(what) = op {
        return Expr::Unknown(what.clone());
    }
    Expr::Unknown(format!("{op:?}"))
}

fn number(data: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(data.try_into().ok()?))
}

fn port(data: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes(data.try_into().ok()?))
}

/// Returns a whole name if the data has padding; shorter data matches the beginning of a name (`oifname "lo*"`).
fn interface_name(data: &[u8]) -> Option<InterfaceName> {
    let Ok(padded) = <&[u8; 16]>::try_from(data) else {
        let prefix = std::str::from_utf8(data).ok()?;
        return format!("{prefix}*").parse().ok();
    };
    let name = padded.split(|byte| *byte == 0).next()?;
    let name = std::str::from_utf8(name).ok()?.parse();
    name.ok()
        .filter(|name: &InterfaceName| name.prefix().is_none())
}

#[cfg(test)]
mod tests {
    use super::{super::lower::lower, *};
    use crate::{rules::ambient, scenarios};

    #[test]
    fn every_rule_of_ours_survives_the_way_to_the_kernels_form_and_back() {
        let all = scenarios::redirections().map(|(_, redirection)| redirection.ruleset());
        for ruleset in all.chain([ambient::drain()]) {
            let chains = ruleset.tables.iter().flat_map(|table| &table.chains);
            for rule in chains.flat_map(|chain| &chain.rules) {
                assert_eq!(&lift(&lower(rule)), rule);
            }
        }
    }

    #[test]
    fn a_changed_mask_is_not_taken_for_ours() {
        let rule = Rule(vec![Expr::NewConnection]);
        let mut ops = lower(&rule);
        ops[1] = Op::Bitwise {
            mask: vec![2, 0, 0, 0],
            xor: vec![0; 4],
        };
        assert!(matches!(lift(&ops).0[0], Expr::Unknown(_)));
    }

    #[test]
    fn an_expression_of_others_is_named() {
        let rule = lift(&[Op::Counter, Op::Unknown("limit".into())]);
        assert_eq!(rule.to_string(), "counter <limit>");
    }

    #[test]
    fn the_beginning_of_an_interface_name_is_not_the_name() {
        let ops = [
            Op::Meta(Meta::OutName),
            Op::Cmp {
                equal: true,
                data: b"lo".to_vec(),
            },
        ];
        assert_eq!(lift(&ops).0[0], Expr::LeavesBy("lo*".parse().unwrap()));
    }
}
