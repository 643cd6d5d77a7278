//! Maps rules to the kernel's numbers and names.

use std::ffi::CStr;

use netlink_bindings::nftables::Nfgenmsg;

use crate::rules::{Hook, Kind, Policy, TableFamily};

/// NFPROTO_UNSPEC, which stands for all families in dump requests.
const UNSPECIFIED: u8 = 0;
const INET: u8 = 1; // NFPROTO_INET
const IPV4: u8 = 2; // NFPROTO_IPV4
const IPV6: u8 = 10; // NFPROTO_IPV6
const BRIDGE: u8 = 7; // NFPROTO_BRIDGE

/// NFTNL_UDATA_TABLE_COMMENT. User data is a list of (kind, length, value), in which nft stores comments.
const UDATA_COMMENT: u8 = 0;

pub(super) fn header(family: TableFamily) -> Nfgenmsg {
    of_family(match family {
        TableFamily::Inet => INET,
        TableFamily::Ip => IPV4,
        TableFamily::Ip6 => IPV6,
        TableFamily::Bridge => BRIDGE,
    })
}

pub(super) fn every_family() -> Nfgenmsg {
    of_family(UNSPECIFIED)
}

fn of_family(nfgen_family: u8) -> Nfgenmsg {
    Nfgenmsg {
        nfgen_family,
        ..Nfgenmsg::new()
    }
}

/// Returns the family of a table for IP packets, and `None` for bridge, arp and netdev.
pub(super) fn family_of(header: &Nfgenmsg) -> Option<TableFamily> {
    let families = [TableFamily::Inet, TableFamily::Ip, TableFamily::Ip6];
    let mut families = families.into_iter();
    families.find(|family| self::header(*family).nfgen_family == header.nfgen_family)
}

/// Numbers of enum nf_inet_hooks (linux/netfilter.h).
pub(super) fn hook_number(hook: Hook) -> u32 {
    match hook {
        Hook::Prerouting => 0,
        Hook::Input => 1,
        Hook::Forward => 2,
        Hook::Output => 3,
        Hook::Postrouting => 4,
    }
}

pub(super) fn hook_of(number: u32) -> Option<Hook> {
    use Hook::{Forward, Input, Output, Postrouting, Prerouting};
    let hooks = [Prerouting, Input, Forward, Output, Postrouting];
    hooks.into_iter().find(|hook| hook_number(*hook) == number)
}

pub(super) fn kind_name(kind: Kind) -> &'static CStr {
    match kind {
        Kind::Filter => c"filter",
        Kind::Nat => c"nat",
        Kind::Route => c"route",
    }
}

pub(super) fn kind_of(name: &CStr) -> Option<Kind> {
    let kinds = [Kind::Filter, Kind::Nat, Kind::Route];
    kinds.into_iter().find(|kind| kind_name(*kind) == name)
}

/// Returns NF_DROP or NF_ACCEPT.
pub(super) fn policy_number(policy: Policy) -> u32 {
    match policy {
        Policy::Drop => 0,
        Policy::Accept => 1,
    }
}

pub(super) fn encode_comment(comment: &str) -> Vec<u8> {
    let mut value = comment.as_bytes().to_vec();
    value.push(0);
    let length = u8::try_from(value.len()).unwrap_or(u8::MAX);
    value.truncate(length.into());
    [vec![UDATA_COMMENT, length], value].concat()
}

pub(super) fn decode_comment(mut userdata: &[u8]) -> Option<String> {
    while let Some(([kind, length], rest)) = userdata.split_first_chunk() {
        let (value, after) = rest.split_at_checked((*length).into())?;
        if *kind == UDATA_COMMENT {
            let text = String::from_utf8_lossy(value);
            return Some(text.trim_end_matches('\0').to_owned());
        }
        userdata = after;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_survives_the_way_through_user_data() {
        assert_eq!(
            decode_comment(&encode_comment("inpod")).as_deref(),
            Some("inpod")
        );
    }

    #[test]
    fn user_data_of_others_is_skipped() {
        let bytes = [vec![7, 2, 1, 1], encode_comment("inpod")].concat();
        assert_eq!(decode_comment(&bytes).as_deref(), Some("inpod"));
        assert_eq!(decode_comment(&[7, 9, 1]), None);
    }

    #[test]
    fn names_and_numbers_of_base_chains_lead_back() {
        assert_eq!(hook_of(hook_number(Hook::Output)), Some(Hook::Output));
        assert_eq!(kind_of(c"route"), Some(Kind::Route));
        assert_eq!(hook_of(9), None);
    }
}
