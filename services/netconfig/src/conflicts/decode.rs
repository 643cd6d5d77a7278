//! Decodes expressions (linux/netfilter/nf_tables.h). Unknown ones may match or not.

mod xt;

use netlink_bindings::{
    nftables::{ExprListAttrs, IterableExprListAttrs},
    utils::find_attr,
};

use super::ruleset::{Effect, MarkOf, OUR_BITS, Rule};

const VERDICT: u32 = 0; // NFT_REG_VERDICT

const MARK: u32 = 3; // NFT_META_MARK, NFT_CT_MARK

/// NF_CT_STATE_BIT(IP_CT_NEW) (linux/netfilter/nf_conntrack_common.h), as in xt_conntrack.
const NEW: u32 = 8;

const TCP: u8 = 6; // IPPROTO_TCP
const UDP: u8 = 17; // IPPROTO_UDP
const DNS_PORT: u16 = 53;

pub(super) fn decode(list: IterableExprListAttrs<'_>) -> Rule {
    let mut decoder = Decoder::default();
    for ExprListAttrs::Elem(expr) in list.filter_map(Result::ok) {
        decoder.expression(Attributes(expr.get_buf()));
    }
    decoder.rule
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

    /// Returns NFTA_DATA_VALUE of attributes like NFTA_CMP_DATA.
    fn value(self, kind: u16) -> Option<Vec<u8>> {
        Some(self.nested(kind)?.bytes(1)?.to_vec())
    }
}

/// The last value loaded. nft and iptables load each value directly before they use it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Value {
    #[default]
    Unknown,
    Protocol,
    Port,
    /// The state of packets that begin a connection, masked.
    State(u32),
    Destination {
        is_ipv6: bool,
    },
    /// The value `mark & mask ^ xor`.
    Mark {
        of: MarkOf,
        mask: u32,
        xor: u32,
    },
}

impl Value {
    fn mark(of: MarkOf) -> Self {
        Self::Mark {
            of,
            mask: u32::MAX,
            xor: 0,
        }
    }

    fn masked(self, mask: &[u8], xor: &[u8]) -> Self {
        match (self, native_number(mask), native_number(xor)) {
            (Self::State(state), Some(mask), Some(xor)) => Self::State(state & mask ^ xor),
            (
                Self::Mark {
                    of,
                    mask: before,
                    xor: added,
                },
                Some(mask),
                Some(xor),
            ) => Self::Mark {
                of,
                mask: before & mask,
                xor: added & mask ^ xor,
            },
            (Self::Destination { .. }, ..) if xor.iter().all(|byte| *byte == 0) => self,
            _ => Self::Unknown,
        }
    }

    /// Returns the bits that change where the value is written to a mark.
    fn changed(self, of: MarkOf) -> u32 {
        let Self::Mark {
            of: source,
            mask,
            xor,
        } = self
        else {
            return u32::MAX;
        };
        if source == of { !mask | xor } else { u32::MAX }
    }
}

/// Reads a number that the kernel keeps in native byte order.
fn native_number(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_ne_bytes)
}

#[derive(Default)]
struct Decoder {
    rule: Rule,
    value: Value,
}

impl Decoder {
    /// Reads NFTA_EXPR_NAME and NFTA_EXPR_DATA.
    fn expression(&mut self, expr: Attributes<'_>) {
        let name = expr.text(1).unwrap_or_default();
        let data = expr.nested(2).unwrap_or(Attributes(&[]));
        if self.known(&name, data).is_none() {
            self.value = Value::Unknown;
            self.rule.is_partial = true;
        }
    }

    /// Returns `None` for what is not analysed.
    fn known(&mut self, name: &str, data: Attributes<'_>) -> Option<()> {
        match name {
            "immediate" => self.immediate(data)?,
            "meta" => self.meta(data)?,
            "ct" => self.ct(data)?,
            "payload" => self.payload(data)?,
            "cmp" => self.compare(data)?,
            "bitwise" => self.bitwise(data)?,
            // Attribute 3 is NFTA_LOOKUP_DREG: a lookup into the verdict register is a verdict map.
            "lookup" if data.number(3) == Some(VERDICT) => {
                self.rule.effects.push(Effect::JumpToAny);
                self.rule.is_partial = true;
            }
            "redir" | "nat" | "masq" => self.rule.effects.push(Effect::Translate),
            "reject" => self.rule.effects.push(Effect::Drop),
            "notrack" => self.rule.effects.push(Effect::Untrack),
            "counter" | "log" | "last" => {}
            // May end the rule, and write no register.
            "limit" | "quota" | "connlimit" | "objref" | "range" => self.rule.is_partial = true,
            "match" => self.rule.is_partial |= xt::matching(data, &mut self.rule).is_none(),
            "target" => self.rule.is_partial |= xt::target(data, &mut self.rule).is_none(),
            _ => return None,
        }
        Some(())
    }

    /// Reads NFTA_IMMEDIATE_DREG and NFTA_IMMEDIATE_DATA.
    fn immediate(&mut self, data: Attributes<'_>) -> Option<()> {
        if data.number(1)? != VERDICT {
            self.value = Value::Unknown;
            return Some(());
        }
        // The attribute NFTA_DATA_VERDICT.
        self.rule.effects.push(verdict(data.nested(2)?.nested(2)?)?);
        Some(())
    }

    /// Reads NFTA_META_DREG, NFTA_META_KEY (enum nft_meta_keys), NFTA_META_SREG.
    fn meta(&mut self, data: Attributes<'_>) -> Option<()> {
        let key = data.number(2)?;
        if data.number(3).is_some() {
            if key == MARK {
                self.write(MarkOf::Packet);
            }
            return Some(());
        }
        self.value = match key {
            MARK => Value::mark(MarkOf::Packet),
            16 => Value::Protocol,
            _ => Value::Unknown,
        };
        Some(())
    }

    /// Reads NFTA_CT_DREG, NFTA_CT_KEY (enum nft_ct_keys), NFTA_CT_SREG.
    fn ct(&mut self, data: Attributes<'_>) -> Option<()> {
        let key = data.number(2)?;
        if data.number(4).is_some() {
            if key == MARK {
                self.write(MarkOf::Connection);
            }
            return Some(());
        }
        self.value = match key {
            0 => Value::State(NEW),
            MARK => Value::mark(MarkOf::Connection),
            _ => Value::Unknown,
        };
        Some(())
    }

    fn write(&mut self, of: MarkOf) {
        change_mark(&mut self.rule, of, self.value.changed(of));
    }

    /// Reads NFTA_PAYLOAD_DREG, _BASE, _OFFSET, _LEN. Without a register it writes into the packet.
    fn payload(&mut self, data: Attributes<'_>) -> Option<()> {
        if data.number(1).is_none() {
            return Some(());
        }
        // NFT_PAYLOAD_NETWORK_HEADER is 1, NFT_PAYLOAD_TRANSPORT_HEADER is 2.
        self.value = match (data.number(2)?, data.number(3)?, data.number(4)?) {
            (1, 9 | 6, 1) => Value::Protocol,
            (1, 16, 1..=4) => Value::Destination { is_ipv6: false },
            (1, 24, 1..=16) => Value::Destination { is_ipv6: true },
            (2, 2, 2) => Value::Port,
            _ => Value::Unknown,
        };
        Some(())
    }

    /// Reads NFTA_BITWISE_MASK, _XOR, _OP. NFT_BITWISE_MASK_XOR is 0, and absent on kernels without other
    /// operations.
    fn bitwise(&mut self, data: Attributes<'_>) -> Option<()> {
        self.value = match data.number(6) {
            None | Some(0) => self.value.masked(&data.value(4)?, &data.value(5)?),
            Some(_) => Value::Unknown,
        };
        Some(())
    }

    /// Reads NFTA_CMP_OP (enum nft_cmp_ops) and _DATA. Conditions on the IP version or an interface are not analysed:
    /// inpod's rules act on all.
    fn compare(&mut self, data: Attributes<'_>) -> Option<()> {
        let excludes = |is_equal: bool| match data.number(2) {
            Some(0) => Some(!is_equal),
            Some(1) => Some(is_equal),
            _ => None,
        };
        let other = data.value(3)?;
        let rule = &mut self.rule;
        match self.value {
            Value::Protocol => {
                rule.excludes_tcp |= excludes(other == [TCP])?;
                rule.excludes_dns |= excludes(other == [UDP])?;
            }
            Value::Port => {
                rule.excludes_dns |= excludes(other == DNS_PORT.to_be_bytes())?;
                rule.is_partial = true;
            }
            Value::State(state) => {
                rule.excludes_new |= excludes(Some(state) == native_number(&other))?;
                rule.has_state = true;
            }
            Value::Destination { is_ipv6 } if is_loopback(is_ipv6, &other) => {
                let is_excluded = excludes(false)?;
                rule.excludes_tcp |= is_excluded;
                rule.excludes_dns |= is_excluded;
            }
            Value::Destination { .. } | Value::Mark { .. } | Value::Unknown => {
                rule.is_partial = true;
            }
        }
        Some(())
    }
}

fn change_mark(rule: &mut Rule, of: MarkOf, bits: u32) {
    if bits & OUR_BITS != 0 {
        rule.effects.push(Effect::Mark(of));
    }
}

fn is_loopback(is_ipv6: bool, address: &[u8]) -> bool {
    if is_ipv6 {
        address == std::net::Ipv6Addr::LOCALHOST.octets()
    } else {
        address.first() == Some(&127)
    }
}

/// Reads NFTA_VERDICT_CODE, NFTA_VERDICT_CHAIN. Codes are NF_* and, if negative, of enum nft_verdicts.
fn verdict(data: Attributes<'_>) -> Option<Effect> {
    let chain = || data.text(2);
    Some(match data.number(1)?.cast_signed() {
        0 => Effect::Drop,
        1 => Effect::Accept,
        -3 => Effect::Jump(chain()?),
        -4 => Effect::Goto(chain()?),
        -5 => Effect::Return,
        // Continue and queue: queued packets return to the rules.
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_that_is_written_back_is_judged_by_all_that_was_done_to_it() {
        let is_harmless = |operations: &[(u32, u32)]| {
            let own = Value::mark(MarkOf::Packet);
            let value = operations.iter().fold(own, |value, (mask, xor)| {
                value.masked(&mask.to_ne_bytes(), &xor.to_ne_bytes())
            });
            value.changed(MarkOf::Packet) & OUR_BITS == 0
        };
        assert!(is_harmless(&[]));
        assert!(is_harmless(&[(0xfff, 0x1000)]));
        assert!(is_harmless(&[(0xffff, 0), (0xfff, 0xf000)]));
        assert!(!is_harmless(&[(0xffe, 0)]));
        assert!(!is_harmless(&[(u32::MAX, 1)]));
        assert!(!is_harmless(&[(0xff0, 0), (0xfff, 0)]));
    }
}
