//! Evaluates rules for a packet of the kind that inpod's rules act on, otherwise unknown. An expression matches, does
//! not match, or may match.

use super::op::{MarkOf, Op, Slot, Source, Verdict, Writes};
use crate::marks::FROM_ZTUNNEL;

/// The same in both marks.
pub(super) const OUR_BITS: u32 = FROM_ZTUNNEL.mask();

/// NF_CT_STATE_BIT(IP_CT_NEW) (linux/netfilter/nf_conntrack_common.h), as in xt_conntrack.
const NEW: u32 = 8;

const FAMILIES: [u8; 2] = [2, 10]; // NFPROTO_IPV4, NFPROTO_IPV6

const ETHER_TYPES: [u16; 2] = [0x0800, 0x86dd]; // ETH_P_IP, ETH_P_IPV6

/// A packet whose destination is not a loopback address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) is_ipv6: bool,
    pub(super) protocol: u8,
    pub(super) port: Option<u16>,
    /// Begins a connection; unknown if `false`.
    pub(super) is_new: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    Decide(Verdict),
    /// Jumps to any chain of the table.
    DecideByMap,
    Translate,
    Untrack,
    /// Overwrites inpod's bits of a mark.
    Mark(MarkOf),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) effects: Vec<Effect>,
    /// Every such packet has these effects.
    pub(super) is_certain: bool,
}

pub(super) fn evaluate(rule: &[Op], packet: Packet) -> Outcome {
    let mut evaluator = Evaluator {
        packet,
        registers: Registers::default(),
        effects: Vec::new(),
    };
    let mut is_certain = true;
    for op in rule {
        match evaluator.step(op) {
            Some(true) => {}
            Some(false) => {
                return Outcome {
                    is_certain: false,
                    effects: evaluator.effects,
                };
            }
            None => is_certain = false,
        }
    }
    Outcome {
        effects: evaluator.effects,
        is_certain,
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Value {
    #[default]
    Unknown,
    Known(Vec<u8>),
    /// The value `mark & mask ^ xor`.
    Mark {
        of: MarkOf,
        mask: u32,
        xor: u32,
    },
    /// Any address but loopback ones.
    Destination {
        is_ipv6: bool,
    },
}

#[derive(Default)]
struct Registers([Value; 16]);

impl Registers {
    fn read(&self, slot: Slot) -> Value {
        self.0.get(slot).cloned().unwrap_or_default()
    }

    /// Stores a value with the first of its registers.
    fn write(&mut self, slot: Slot, words: usize, value: Value) {
        for word in self.0.iter_mut().skip(slot).take(words) {
            *word = Value::Unknown;
        }
        if let Some(word) = self.0.get_mut(slot) {
            *word = value;
        }
    }

    fn forget(&mut self, writes: Writes) {
        match writes {
            Writes::Nothing => {}
            Writes::One(slot) => self.write(slot, 4, Value::Unknown),
            Writes::Any => *self = Self::default(),
        }
    }
}

struct Evaluator {
    packet: Packet,
    registers: Registers,
    effects: Vec<Effect>,
}

impl Evaluator {
    /// Returns whether the rule continues; `None` if it may.
    fn step(&mut self, op: &Op) -> Option<bool> {
        match op {
            Op::Load { to, words, source } => {
                let value = load(*source, self.packet);
                self.registers.write(*to, *words, value);
            }
            Op::Set { to, data } => {
                let value = Value::Known(data.clone());
                self.registers.write(*to, data.len().div_ceil(4), value);
            }
            Op::Mask {
                from,
                to,
                mask,
                xor,
            } => {
                let value = masked(self.registers.read(*from), mask, xor);
                self.registers.write(*to, mask.len().div_ceil(4), value);
            }
            Op::Compare { slot, equal, data } => {
                return is_equal(&self.registers.read(*slot), data).map(|is| is == *equal);
            }
            Op::State { mask, inverted } => {
                return self.packet.is_new.then_some((mask & NEW != 0) != *inverted);
            }
            Op::Maybe(writes) => {
                self.registers.forget(*writes);
                return None;
            }
            Op::Pass => {}
            Op::WriteMark { of, from } => {
                let bits = changed(&self.registers.read(*from), *of);
                self.mark(*of, bits);
            }
            Op::ChangeMark { of, bits } => self.mark(*of, *bits),
            Op::Translate => self.effects.push(Effect::Translate),
            Op::Untrack => self.effects.push(Effect::Untrack),
            Op::Verdict(verdict) => self.effects.push(Effect::Decide(verdict.clone())),
            Op::VerdictMap => {
                self.effects.push(Effect::DecideByMap);
                return None;
            }
        }
        Some(true)
    }

    fn mark(&mut self, of: MarkOf, bits: u32) {
        if bits & OUR_BITS != 0 {
            self.effects.push(Effect::Mark(of));
        }
    }
}

fn load(source: Source, packet: Packet) -> Value {
    let [v4, v6] = FAMILIES;
    let [ip, ipv6] = ETHER_TYPES;
    match source {
        Source::Protocol => Value::Known(vec![packet.protocol]),
        Source::Family => Value::Known(vec![if packet.is_ipv6 { v6 } else { v4 }]),
        Source::EtherType => {
            let number = if packet.is_ipv6 { ipv6 } else { ip };
            Value::Known(number.to_be_bytes().into())
        }
        Source::HeaderProtocol { is_ipv6 } if is_ipv6 == packet.is_ipv6 => {
            Value::Known(vec![packet.protocol])
        }
        Source::Mark(of) => Value::Mark {
            of,
            mask: u32::MAX,
            xor: 0,
        },
        Source::State if packet.is_new => Value::Known(NEW.to_ne_bytes().into()),
        Source::Destination { is_ipv6 } if is_ipv6 == packet.is_ipv6 => {
            Value::Destination { is_ipv6 }
        }
        Source::Port => packet.port.map_or(Value::Unknown, |port| {
            Value::Known(port.to_be_bytes().into())
        }),
        Source::HeaderProtocol { .. }
        | Source::State
        | Source::Destination { .. }
        | Source::Other => Value::Unknown,
    }
}

fn masked(value: Value, mask: &[u8], xor: &[u8]) -> Value {
    match value {
        Value::Known(bytes) if bytes.len() == mask.len() && bytes.len() == xor.len() => {
            let bytes = bytes.iter().zip(mask).zip(xor);
            Value::Known(bytes.map(|((byte, mask), xor)| byte & mask ^ xor).collect())
        }
        Value::Mark {
            of,
            mask: before,
            xor: added,
        } => match (number(mask), number(xor)) {
            (Some(mask), Some(xor)) => Value::Mark {
                of,
                mask: before & mask,
                xor: added & mask ^ xor,
            },
            _ => Value::Unknown,
        },
        Value::Destination { .. } if xor.iter().all(|byte| *byte == 0) => value,
        Value::Known(_) | Value::Destination { .. } | Value::Unknown => Value::Unknown,
    }
}

fn number(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_ne_bytes)
}

fn is_equal(value: &Value, data: &[u8]) -> Option<bool> {
    match value {
        Value::Known(bytes) => Some(bytes.get(..data.len())? == data),
        Value::Destination { is_ipv6 } => is_loopback(*is_ipv6, data).then_some(false),
        Value::Mark { .. } | Value::Unknown => None,
    }
}

fn is_loopback(is_ipv6: bool, address: &[u8]) -> bool {
    if is_ipv6 {
        address == std::net::Ipv6Addr::LOCALHOST.octets()
    } else {
        address.first() == Some(&127)
    }
}

/// Returns the bits that change.
fn changed(value: &Value, of: MarkOf) -> u32 {
    match value {
        Value::Mark {
            of: source,
            mask,
            xor,
        } if *source == of => !mask | xor,
        Value::Mark { .. } | Value::Known(_) | Value::Destination { .. } | Value::Unknown => {
            u32::MAX
        }
    }
}
