//! Decodes iptables' matches and targets in nf_tables rules (iptables-nft): name, revision and a kernel structure
//! in native byte order.

use super::{
    super::ruleset::{Effect, MarkOf, Rule},
    Attributes, NEW, change_mark,
};

struct Info<'a>(&'a [u8]);

impl Info<'_> {
    fn u32(&self, offset: usize) -> Option<u32> {
        let bytes = self.0.get(offset..)?.first_chunk()?;
        Some(u32::from_ne_bytes(*bytes))
    }

    fn u16(&self, offset: usize) -> Option<u16> {
        let bytes = self.0.get(offset..)?.first_chunk()?;
        Some(u16::from_ne_bytes(*bytes))
    }

    fn u8(&self, offset: usize) -> Option<u8> {
        self.0.get(offset).copied()
    }
}

/// Reads NFTA_MATCH_NAME and NFTA_TARGET_NAME, _REV, _INFO.
fn parts<'a>(data: Attributes<'a>) -> Option<(String, u32, Info<'a>)> {
    Some((data.text(1)?, data.number(2)?, Info(data.bytes(3)?)))
}

/// Returns `None` for conditions that are not analysed.
pub(super) fn matching(data: Attributes<'_>, rule: &mut Rule) -> Option<()> {
    let (name, revision, info) = parts(data)?;
    let (mask, is_inverted) = match (name.as_str(), revision) {
        ("comment", _) => return Some(()),
        ("conntrack", 2 | 3) => conntrack(&info)?,
        ("state", 0) => (info.u32(0)?, false),
        _ => return None,
    };
    rule.excludes_new |= (mask & NEW != 0) == is_inverted;
    rule.has_state = true;
    Some(())
}

/// Reads the states of struct xt_conntrack_mtinfo3 (linux/netfilter/xt_conntrack.h) and whether they are inverted,
/// if it has no other condition.
fn conntrack(info: &Info<'_>) -> Option<(u32, bool)> {
    const STATE: u16 = 1; // XT_CONNTRACK_STATE
    let (asked, inverted, mask) = (info.u16(146)?, info.u16(148)?, info.u16(150)?);
    (asked == STATE).then_some((mask.into(), inverted & STATE != 0))
}

/// Returns `None` for targets that are not analysed.
pub(super) fn target(data: Attributes<'_>, rule: &mut Rule) -> Option<()> {
    let (name, revision, info) = parts(data)?;
    let (of, bits) = match (name.as_str(), revision) {
        ("MARK", 2) => mark(&info)?,
        ("CONNMARK", 1) => connmark(&info, 12, (0, 0))?,
        ("CONNMARK", 2) => connmark(&info, 14, (info.u8(12)?, info.u8(13)?))?,
        ("HMARK", _) => (MarkOf::Packet, u32::MAX),
        _ => {
            rule.effects.extend(effect(&name, &info)?);
            return Some(());
        }
    };
    change_mark(rule, of, bits);
    Some(())
}

fn effect(name: &str, info: &Info<'_>) -> Option<Option<Effect>> {
    Some(match name {
        "REDIRECT" | "DNAT" | "NETMAP" => Some(Effect::Translate),
        "REJECT" => Some(Effect::Drop),
        "NOTRACK" => Some(Effect::Untrack),
        // XT_CT_NOTRACK of struct xt_ct_target_info.
        "CT" => (info.u16(0)? & 1 != 0).then_some(Effect::Untrack),
        "LOG" | "NFLOG" => None,
        _ => return None,
    })
}

/// Reads struct xt_mark_tginfo2: `mark & ~mask ^ value`.
fn mark(info: &Info<'_>) -> Option<(MarkOf, u32)> {
    let (value, mask) = (info.u32(0)?, info.u32(4)?);
    Some((MarkOf::Packet, value | mask))
}

/// Reads struct xt_connmark_tginfo1 and 2: value, masks of the connection's and the packet's mark, mode (enum in
/// linux/netfilter/xt_connmark.h). Revision 2 shifts (direction, bits) the copied value.
fn connmark(info: &Info<'_>, mode: usize, shift: (u8, u8)) -> Option<(MarkOf, u32)> {
    let (value, of_connection, of_packet) = (info.u32(0)?, info.u32(4)?, info.u32(8)?);
    let shifted = |bits: u32| match shift {
        (0, by) => bits.checked_shl(by.into()).unwrap_or(0),
        (_, by) => bits.checked_shr(by.into()).unwrap_or(0),
    };
    Some(match info.u8(mode)? {
        0 => (MarkOf::Connection, shifted(value) | of_connection),
        1 => (MarkOf::Connection, shifted(of_packet) | of_connection),
        2 => (MarkOf::Packet, shifted(of_connection) | of_packet),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn structure(structure: &[u32], rest: &[u8]) -> Vec<u8> {
        let mut bytes: Vec<u8> = structure
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .collect();
        bytes.extend(rest);
        bytes
    }

    #[test]
    fn the_bits_that_a_mark_changes_are_those_of_mask_and_value() {
        let of = |value, mask| mark(&Info(&structure(&[value, mask], &[]))).unwrap();
        assert_eq!(of(0x5, u32::MAX), (MarkOf::Packet, u32::MAX));
        assert_eq!(of(0x1000, 0xf000), (MarkOf::Packet, 0xf000));
        assert_eq!(of(0x1, 0), (MarkOf::Packet, 0x1));
    }

    #[test]
    fn saving_changes_the_connections_mark_and_restoring_the_packets() {
        let of = |mode, connection, packet| {
            let info = structure(&[0, connection, packet], &[mode]);
            connmark(&Info(&info), 12, (0, 0)).unwrap()
        };
        assert_eq!(of(1, 0xf000, 0xf000), (MarkOf::Connection, 0xf000));
        assert_eq!(of(1, 0xf000, 0x1), (MarkOf::Connection, 0xf001));
        assert_eq!(of(2, 0xf000, 0xf000), (MarkOf::Packet, 0xf000));
        assert_eq!(of(2, u32::MAX, 0xf000), (MarkOf::Packet, u32::MAX));
    }

    #[test]
    fn what_is_shifted_may_land_in_our_bits() {
        let info = structure(&[0, 0xf000, 0], &[1, 12, 2]);
        let found = connmark(&Info(&info), 14, (1, 12));
        assert_eq!(found, Some((MarkOf::Packet, 0xf)));
    }

    #[test]
    fn a_structure_that_is_cut_off_is_not_understood() {
        assert_eq!(mark(&Info(&[1, 2, 3])), None);
        assert_eq!(
            connmark(&Info(&structure(&[0, 0, 0], &[])), 12, (0, 0)),
            None
        );
        assert_eq!(conntrack(&Info(&[0; 150])), None);
    }
}
