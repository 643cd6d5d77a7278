//! Interprets a rule written by iptables-nft, as far as recognising leftovers requires. Matches and targets of
//! iptables are a name, a revision and a kernel structure in native byte order; some versions write expressions of
//! nf_tables instead (linux/netfilter/nf_tables.h).

use netlink_bindings::{
    nftables::{ExprListAttrs, IterableRuleAttrs},
    utils::find_attr,
};

use super::super::constants::decode_comment;
use crate::rules::Tag;

/// One mark with two uses: on packets that TPROXY delivers to a sidecar's proxy, and on packets from the proxy to its
/// application.
const TPROXY_MARK: u32 = 0x539;
const PROXY_MARK: u32 = 0x53a;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct Meaning {
    /// Names of the chains to which the rule jumps or goes.
    pub(in super::super) targets: Vec<String>,
    comment: Option<String>,
    /// True if the rule matches `TPROXY_MARK` or sets `PROXY_MARK`, as rules of the sidecar installer for TPROXY
    /// do.
    pub(in super::super) concerns_tproxy_mark: bool,
    conditions_on_interface: usize,
    returns: bool,
    /// The number of expressions that are neither counters nor represented by the other fields.
    others: usize,
}

/// The content of a register while a rule is evaluated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Value {
    #[default]
    Other,
    Mark,
    Interface,
    Number(u32),
}

impl Meaning {
    pub(in super::super) fn of(rule: &IterableRuleAttrs<'_>) -> Self {
        let mut meaning = Self {
            comment: rule.get_userdata().ok().and_then(decode_comment),
            ..Self::default()
        };
        let mut value = Value::default();
        let list = rule.get_expressions().into_iter().flatten();
        for ExprListAttrs::Elem(expression) in list.filter_map(Result::ok) {
            let expression = Attributes(expression.get_buf());
            let name = expression.text(1).unwrap_or_default();
            let data = Attributes(expression.bytes(2).unwrap_or_default());
            if meaning.add(&name, data, &mut value).is_none() {
                meaning.others += 1;
                value = Value::Other;
            }
        }
        meaning
    }

    #[cfg(test)]
    pub(super) fn jump(target: &str) -> Self {
        Self {
            targets: vec![target.to_owned()],
            ..Self::default()
        }
    }

    /// Returns whether the rule bears the tag of an inpod that enabled `net.ipv4.tcp_migrate_req`.
    pub(super) fn migrates(&self) -> bool {
        let tag = self.comment.as_deref().map(str::parse::<Tag>);
        tag.is_some_and(|tag| tag.is_ok_and(|tag| tag.migrates))
    }

    /// Returns whether the rule does nothing but return packets from or to one interface.
    pub(super) fn is_interface_exclusion(&self) -> bool {
        self.returns && self.conditions_on_interface == 1 && self.others == 0
    }

    /// Interprets one expression, and returns `None` for an expression that has no known meaning.
    fn add(&mut self, name: &str, data: Attributes<'_>, value: &mut Value) -> Option<()> {
        match name {
            "counter" => {}
            "immediate" => self.add_immediate(data, value)?,
            // NFTA_META_DREG, _KEY, _SREG; NFT_META_MARK is 3, 4 to 7 are interfaces.
            "meta" => match (data.number(2)?, data.number(3)) {
                (3, Some(_)) if *value == Value::Number(PROXY_MARK) => {
                    self.concerns_tproxy_mark = true;
                }
                (3, None) => *value = Value::Mark,
                (4..=7, None) => *value = Value::Interface,
                _ => return None,
            },
            // NFTA_CT_DREG, _KEY; NFT_CT_MARK is 3.
            "ct" if data.number(1).is_some() && data.number(2)? == 3 => *value = Value::Mark,
            // NFTA_CMP_OP, whose NFT_CMP_EQ is 0, and NFTA_CMP_DATA.
            "cmp" if data.number(2)? == 0 => match value {
                Value::Mark if data.native_value(3)? == TPROXY_MARK => {
                    self.concerns_tproxy_mark = true;
                }
                Value::Interface => self.conditions_on_interface += 1,
                Value::Mark | Value::Number(_) | Value::Other => return None,
            },
            // NFTA_MATCH_NAME and _INFO; NFTA_TARGET_NAME and _INFO.
            "match" => self.add_match(&data.text(1)?, data.bytes(3)?)?,
            "target" if data.text(1)? == "MARK" && native(data.bytes(3)?, 0)? == PROXY_MARK => {
                self.concerns_tproxy_mark = true;
            }
            _ => return None,
        }
        Some(())
    }

    /// Interprets NFTA_IMMEDIATE_DREG and _DATA, which is a number or a verdict.
    fn add_immediate(&mut self, data: Attributes<'_>, value: &mut Value) -> Option<()> {
        const TO_VERDICT: u32 = 0; // NFT_REG_VERDICT
        const JUMP: i32 = -3; // NFT_JUMP
        const GO_TO: i32 = -4; // NFT_GOTO
        const RETURN: i32 = -5; // NFT_RETURN
        if data.number(1)? != TO_VERDICT {
            *value = Value::Number(data.native_value(2)?);
            return Some(());
        }
        let verdict = Attributes(Attributes(data.bytes(2)?).bytes(2)?);
        match verdict.number(1)?.cast_signed() {
            JUMP | GO_TO => self.targets.push(verdict.text(2)?),
            RETURN => self.returns = true,
            _ => return None,
        }
        Some(())
    }

    /// Interprets struct xt_mark_mtinfo1 and xt_connmark_mtinfo1 (mark, mask, invert), and struct xt_comment_info,
    /// a text.
    fn add_match(&mut self, name: &str, info: &[u8]) -> Option<()> {
        match name {
            "mark" | "connmark" if native(info, 0)? == TPROXY_MARK && *info.get(8)? == 0 => {
                self.concerns_tproxy_mark = true;
            }
            "comment" => {
                let text = info.split(|byte| *byte == 0).next()?;
                self.comment = Some(String::from_utf8_lossy(text).into_owned());
            }
            _ => return None,
        }
        Some(())
    }
}

/// A list of attributes, whose numbers are big-endian, as everywhere in nf_tables.
#[derive(Clone, Copy)]
struct Attributes<'a>(&'a [u8]);

impl<'a> Attributes<'a> {
    fn bytes(self, kind: u16) -> Option<&'a [u8]> {
        find_attr(self.0, kind)
    }

    fn number(self, kind: u16) -> Option<u32> {
        self.bytes(kind)?.try_into().ok().map(u32::from_be_bytes)
    }

    fn text(self, kind: u16) -> Option<String> {
        let bytes = self.bytes(kind)?;
        let bytes = bytes.strip_suffix(&[0]).unwrap_or(bytes);
        Some(String::from_utf8_lossy(bytes).into_owned())
    }

    /// Returns NFTA_DATA_VALUE, which the kernel keeps in native byte order.
    fn native_value(self, kind: u16) -> Option<u32> {
        native(Self(self.bytes(kind)?).bytes(1)?, 0)
    }
}

fn native(structure: &[u8], offset: usize) -> Option<u32> {
    let bytes = structure.get(offset..)?.first_chunk()?;
    Some(u32::from_ne_bytes(*bytes))
}
