//! Parses the lists in annotations for sidecars as Istio's plugin does (services/docs/facts/istio-sidecar.md, 3.4), but
//! rejects entries for which no rule can be written. Injector and node share this code, so that the node can apply
//! every list that the injector admits.

use std::{collections::BTreeSet, num::NonZeroU16};

use crate::{
    parse_digits,
    redirection::{InterfaceName, Network},
};

/// The ports of the proxy's telemetry, health and metrics (services/docs/facts/istio-sidecar.md, 3.4).
pub const NEVER_CAPTURED: [u16; 3] = [15020, 15021, 15090];

/// The maximum number of entries in lists of `netconfig.v1.SidecarRedirection` and `netconfig.v1.Exclusions`.
pub const MAX_ENTRIES: usize = 64;

/// The maximum number of entries in lists of interfaces.
pub const MAX_INTERFACES: usize = 16;

/// Reasons why a list is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidList {
    /// An entry of the list does not have the expected form.
    #[error("{entry:?} is not a valid {what}; give {advice}")]
    Entry {
        /// The first characters of the entry.
        entry: String,
        /// The expected kind of entry, for the message.
        what: &'static str,
        /// A hint on how to write such entries.
        advice: &'static str,
    },
    /// The list has more entries than there can be rules.
    #[error("more than {0} entries; give fewer")]
    TooMany(usize),
}

fn sorted<T>(all: BTreeSet<T>, max: usize) -> Result<Vec<T>, InvalidList> {
    if all.len() <= max {
        return Ok(all.into_iter().collect());
    }
    Err(InvalidList::TooMany(max))
}

/// Parses the entries of a list, sorts the entries and removes duplicates.
///
/// # Errors
///
/// Fails if an entry cannot be parsed, or if there are more than `max` different entries.
pub fn list<'a, T: Ord>(
    entries: impl Iterator<Item = &'a str>,
    parse: impl Fn(&str) -> Option<T>,
    max: usize,
    (what, advice): (&'static str, &'static str),
) -> Result<Vec<T>, InvalidList> {
    let invalid = |entry: &str| InvalidList::Entry {
        // The excerpt is short, because an entry may be as long as a pod, and errors travel in headers.
        entry: entry.chars().take(64).collect(),
        what,
        advice,
    };
    let parsed = entries.map(|entry| parse(entry).ok_or_else(|| invalid(entry)));
    sorted(parsed.collect::<Result<_, _>>()?, max)
}

fn entries(text: &str) -> impl Iterator<Item = &str> {
    let all = (!text.is_empty()).then(|| text.split(','));
    all.into_iter().flatten()
}

/// Parses ports, with or without spaces; an empty text has none. Port 0, accepted by Istio, is left out.
///
/// # Errors
///
/// Fails if an entry is no number up to 65535 (a sign or `*` included), or if there are more than 64 entries.
pub fn ports(text: &str) -> Result<Vec<NonZeroU16>, InvalidList> {
    let entries = entries(text.trim()).filter(|entry| parse_digits(entry.trim()) != Some(0_u16));
    let kind = ("port", "comma-separated numbers up to 65535");
    list(
        entries,
        |entry| parse_digits(entry.trim()),
        MAX_ENTRIES,
        kind,
    )
}

/// Parses ports and adds the ports in [`NEVER_CAPTURED`].
///
/// # Errors
///
/// Fails like [`ports`]; the added ports count towards the limit.
pub fn excluded_inbound(text: &str) -> Result<Vec<NonZeroU16>, InvalidList> {
    let implied = NEVER_CAPTURED.into_iter().filter_map(NonZeroU16::new);
    let all = ports(text)?.into_iter().chain(implied);
    sorted(all.collect(), MAX_ENTRIES)
}

/// Parses networks (address and prefix length) without spaces; an empty text has none. Bits beyond the prefix are
/// ignored.
///
/// # Errors
///
/// Fails if an entry is no network, or if there are more than 64 entries.
pub fn networks(text: &str) -> Result<Vec<Network>, InvalidList> {
    let advice = "comma-separated networks like 10.0.0.0/8 or fd00::/64 without spaces";
    // Istio (Go's netip.ParsePrefix) accepts no leading zero in the length.
    let is_plain = |entry: &str| entry.ends_with("/0") || !entry.contains("/0");
    let parse = |entry: &str| Network::truncated(entry).ok().filter(|_| is_plain(entry));
    list(entries(text), parse, MAX_ENTRIES, ("network", advice))
}

/// Parses interface names, with or without spaces; an empty text has none.
///
/// # Errors
///
/// Fails if Istio would reject an entry, or if there are more than 16 entries.
pub fn interfaces(text: &str) -> Result<Vec<InterfaceName>, InvalidList> {
    let advice = "comma-separated names of at most 15 letters, digits and _.- that start with a letter and may end with *";
    let is_letter = |byte: &u8| byte.is_ascii_alphabetic();
    let name = |entry: &str| {
        let name = entry.trim();
        name.parse()
            .ok()
            .filter(|_| name.as_bytes().first().is_some_and(is_letter))
    };
    let kind = ("interface", advice);
    list(entries(text.trim()), name, MAX_INTERFACES, kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_numbers_with_spaces_and_nothing_else() {
        let found: Vec<_> = ports(" 80, 0,65535").unwrap().into_iter().collect();
        assert_eq!(
            found.iter().map(|it| it.get()).collect::<Vec<_>>(),
            [80, 65535]
        );
        assert!(ports("").unwrap().is_empty());
        for wrong in ["*", "80,", "+80", "65536", "80 90", "-1", "80\n81"] {
            assert!(ports(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn networks_are_of_both_families_and_have_no_spaces() {
        assert_eq!(networks("10.0.0.0/8,fd00::/64").unwrap().len(), 2);
        assert!(networks("").unwrap().is_empty());
        for wrong in ["*", "10.0.0.0/08", " ::/0"] {
            assert!(networks(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn interfaces_start_with_a_letter_as_in_istio() {
        assert_eq!(interfaces("eth0, k6t-net.1, br-*").unwrap().len(), 3);
        for wrong in ["0eth", "_eth", "eth0,", "*"] {
            assert!(interfaces(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn lists_are_as_long_as_rules_can_be_made_of() {
        let list = |count: u32, start: &str| {
            let entries: Vec<_> = (1..=count).map(|n| format!("{start}{n}")).collect();
            entries.join(",")
        };
        assert!(ports(&list(64, "")).is_ok() && ports(&list(65, "")).is_err());
        assert!(excluded_inbound(&list(61, "")).is_ok());
        let message = excluded_inbound(&list(62, "")).unwrap_err().to_string();
        assert_eq!(message, "more than 64 entries; give fewer");
        assert!(networks(&list(32, "10.0.0.0/")).is_ok());
        let far: Vec<_> = (0..65).map(|n| format!("10.{n}.0.0/16")).collect();
        assert!(networks(&far.join(",")).is_err());
        assert!(interfaces(&list(16, "if")).is_ok() && interfaces(&list(17, "if")).is_err());
    }

    #[test]
    fn what_is_wrong_is_told_and_no_longer_than_it_is_worth() {
        let long = "x".repeat(1000);
        let message = ports(&long).unwrap_err().to_string();
        assert!(
            message.len() < 200 && message.contains("is not a valid port"),
            "{message}"
        );
    }
}
