//! From what the kernel holds to what a rule means: the way back of [`super::lower`].

use std::net::IpAddr;

use super::{
    lower::{DESTINATION_PORT, DESTINATION_V4, DESTINATION_V6, IPV4, IPV6, STATE_NEW, TCP},
    op::{Base, Ct, Meta, Op},
};
use crate::{
    marks::Mark,
    rules::{Expr, Rule},
};

/// What the kernel's expressions mean. Those that mean nothing of ours become [`Expr::Unknown`].
pub(crate) fn lift(mut ops: &[Op]) -> Rule {
    let mut exprs = Vec::new();
    while let Some((first, rest)) = ops.split_first() {
        let lifted = four(ops)
            .or_else(|| three(ops))
            .or_else(|| two(ops))
            .or_else(|| one(ops));
        let (expr, after) = lifted.unwrap_or_else(|| (unknown(first), rest));
        exprs.push(expr);
        ops = after;
    }
    Rule(exprs)
}

/// An expression, and what is left after it.
type Lifted<'a> = Option<(Expr, &'a [Op])>;

fn four(ops: &[Op]) -> Lifted<'_> {
    let ([load, family, payload, compare], rest) = ops.split_first_chunk()?;
    let (
        Op::Meta(Meta::Family),
        Op::Cmp {
            equal: true,
            data: family,
        },
    ) = (load, family)
    else {
        return None;
    };
    let Op::Payload {
        base: Base::Network,
        offset,
        len,
    } = payload
    else {
        return None;
    };
    let Op::Cmp { equal: false, data } = compare else {
        return None;
    };
    let address = match (family.as_slice(), (*offset, *len)) {
        ([IPV4], DESTINATION_V4) => IpAddr::from(<[u8; 4]>::try_from(data.as_slice()).ok()?),
        ([IPV6], DESTINATION_V6) => IpAddr::from(<[u8; 16]>::try_from(data.as_slice()).ok()?),
        _ => return None,
    };
    Some((Expr::DestinationNot(address), rest))
}

fn three(ops: &[Op]) -> Lifted<'_> {
    let ([first, Op::Bitwise { mask, xor }, last], rest) = ops.split_first_chunk()? else {
        return None;
    };
    let (mask, xor) = (number(mask)?, number(xor)?);
    let expr = match (first, last) {
        (Op::Meta(Meta::Mark), Op::SetMeta(Meta::Mark)) => Expr::Mark(Mark::new(xor, !mask)?),
        (Op::Ct(Ct::Mark), Op::SetCt(Ct::Mark)) => Expr::MarkConnection(Mark::new(xor, !mask)?),
        (load, Op::Cmp { equal, data }) if xor == 0 => compared(load, mask, *equal, number(data)?)?,
        _ => return None,
    };
    Some((expr, rest))
}

fn compared(load: &Op, mask: u32, equal: bool, value: u32) -> Option<Expr> {
    match (load, equal) {
        (Op::Meta(Meta::Mark), true) => Some(Expr::Marked(Mark::new(value, mask)?)),
        (Op::Meta(Meta::Mark), false) => Some(Expr::NotMarked(Mark::new(value, mask)?)),
        (Op::Ct(Ct::Mark), true) => Some(Expr::ConnectionMarked(Mark::new(value, mask)?)),
        (Op::Ct(Ct::State), false) if (mask, value) == (STATE_NEW, 0) => Some(Expr::NewConnection),
        _ => None,
    }
}

fn two(ops: &[Op]) -> Lifted<'_> {
    let ([first, second], rest) = ops.split_first_chunk()?;
    let expr = match (first, second) {
        (Op::Meta(Meta::OutName), Op::Cmp { equal: true, data }) => {
            Expr::LeavesBy(interface_name(data)?)
        }
        (Op::Meta(Meta::Protocol), Op::Cmp { equal: true, data }) if data == &[TCP] => Expr::Tcp,
        (
            Op::Payload {
                base: Base::Transport,
                offset,
                len,
            },
            Op::Cmp { equal: false, data },
        ) if (*offset, *len) == DESTINATION_PORT => Expr::PortNot(port(data)?),
        (Op::Immediate(data), Op::Redirect) => Expr::Redirect(port(data)?),
        _ => return None,
    };
    Some((expr, rest))
}

fn one(ops: &[Op]) -> Lifted<'_> {
    let (first, rest) = ops.split_first()?;
    let expr = match first {
        Op::Counter => Expr::Counter,
        Op::Accept => Expr::Accept,
        Op::Meta(_)
        | Op::SetMeta(_)
        | Op::Ct(_)
        | Op::SetCt(_)
        | Op::Payload { .. }
        | Op::Cmp { .. }
        | Op::Bitwise { .. }
        | Op::Immediate(_)
        | Op::Redirect
        | Op::Unknown(_) => return None,
    };
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

/// A whole name; shorter data would be the beginning of one (`oifname "lo*"`).
fn interface_name(data: &[u8]) -> Option<String> {
    let data: &[u8; 16] = data.try_into().ok()?;
    let name = data.split(|byte| *byte == 0).next()?;
    Some(String::from_utf8_lossy(name).into_owned())
}

#[cfg(test)]
mod tests {
    use super::{super::lower::lower, *};
    use crate::rules::ambient;

    #[test]
    fn every_rule_of_ours_survives_the_way_to_the_kernels_form_and_back() {
        for ruleset in [ambient::ruleset(), ambient::drain()] {
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
        assert!(matches!(lift(&ops).0[0], Expr::Unknown(_)));
    }
}
