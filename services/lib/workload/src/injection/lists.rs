//! The lists in annotations of pods with a sidecar, taken as Istio's plugin takes them (istio-sidecar-install.md, 3.4),
//! so that what the injector lets through is what the node can carry out.

use std::{collections::BTreeSet, net::IpAddr};

use crate::parse_address;

/// Bytes of an interface's name without the NUL (IFNAMSIZ, linux/if.h).
const LONGEST_NAME: usize = 15;

/// An entry of a list that is not what the list is of.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{entry:?} is no {what}; give {advice}")]
pub struct InvalidList {
    entry: String,
    what: &'static str,
    advice: &'static str,
}

fn invalid(entry: &str, what: &'static str, advice: &'static str) -> InvalidList {
    InvalidList {
        // As much as is worth telling: the whole of it may be as long as a pod.
        entry: entry.chars().take(64).collect(),
        what,
        advice,
    }
}

fn entries(text: &str) -> impl Iterator<Item = &str> {
    let all = (!text.is_empty()).then(|| text.split(','));
    all.into_iter().flatten()
}

/// Ports, with spaces around them as anybody likes; an empty text has none. Port 0 is taken, as Istio takes it.
///
/// # Errors
///
/// When an entry is no number up to 65535, a sign or `*` included.
pub fn ports(text: &str) -> Result<BTreeSet<u16>, InvalidList> {
    let port = |entry: &str| {
        let digits = entry.trim();
        let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
        let port = is_number.then(|| digits.parse().ok()).flatten();
        let advice = "numbers up to 65535 with commas between them";
        port.ok_or_else(|| invalid(entry, "port", advice))
    };
    entries(text.trim()).map(port).collect()
}

/// Networks as address and prefix length, without any space; an empty text has none.
///
/// # Errors
///
/// When an entry is no network.
pub fn networks(text: &str) -> Result<BTreeSet<(IpAddr, u8)>, InvalidList> {
    let advice = "networks like 10.0.0.0/8 or fd00::/64 with commas and no spaces between them";
    let network = |entry| network(entry).ok_or_else(|| invalid(entry, "network", advice));
    entries(text).map(network).collect()
}

/// As Go's netip.ParsePrefix takes it: the length without a sign or a leading zero.
fn network(text: &str) -> Option<(IpAddr, u8)> {
    let (address, bits) = text.split_once('/')?;
    let address = parse_address(address).ok()?;
    let is_plain = bits == "0" || !bits.starts_with(['0', '+']);
    let most = if address.is_ipv4() { 32 } else { 128 };
    let bits = bits.parse().ok().filter(|bits| is_plain && *bits <= most)?;
    Some((address, bits))
}

/// Names of interfaces, with spaces around them as anybody likes; an empty text has none.
///
/// # Errors
///
/// When an entry is no name that Istio takes.
pub fn interfaces(text: &str) -> Result<BTreeSet<String>, InvalidList> {
    let advice = "names of at most 15 letters, digits and _.- that begin with a letter, with commas between them";
    let name = |entry: &str| {
        let name = entry.trim();
        is_interface(name)
            .then(|| name.to_owned())
            .ok_or_else(|| invalid(entry, "interface", advice))
    };
    entries(text.trim()).map(name).collect()
}

fn is_interface(name: &str) -> bool {
    let mut bytes = name.bytes();
    let begins = bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic());
    let goes_on = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    begins && name.len() <= LONGEST_NAME && bytes.all(goes_on)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_numbers_with_spaces_and_nothing_else() {
        assert_eq!(
            ports(" 80, 0,65535").unwrap(),
            BTreeSet::from([0, 80, 65535])
        );
        assert!(ports("").unwrap().is_empty());
        for wrong in ["*", "80,", "+80", "65536", "80 90", "-1", "80\n81"] {
            assert!(ports(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn networks_are_of_both_families_and_have_a_length_of_theirs() {
        assert_eq!(networks("10.0.0.0/8,fd00::/64").unwrap().len(), 2);
        assert!(networks("").unwrap().is_empty());
        for wrong in [
            "*",
            "10.0.0.0",
            "10.0.0.0/33",
            "10.0.0.0/08",
            "::/129",
            " ::/0",
            "::ffff:1.2.3.4/8",
        ] {
            assert!(networks(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn interfaces_have_names_that_no_shell_takes_for_words() {
        assert_eq!(interfaces("eth0, k6t-net.1").unwrap().len(), 2);
        for wrong in ["0eth", "a b", "eth0;rm", "abcdefghijklmnop", "eth0,"] {
            assert!(interfaces(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_wrong_is_told_and_no_longer_than_it_is_worth() {
        let long = "x".repeat(1000);
        let told = ports(&long).unwrap_err().to_string();
        assert!(told.len() < 200 && told.contains("is no port"), "{told}");
    }
}
