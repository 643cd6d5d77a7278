//! The lists in annotations of pods with a sidecar, taken as Istio's plugin takes them (istio-sidecar-install.md, 3.4),
//! but for what it takes and no rule can be made of.

use std::{collections::BTreeSet, net::IpAddr, num::NonZeroU16};

use workload::parse_address;

use super::{Malformed, Network, Selection};

/// How many entries a list may have (`netconfig.v1.SidecarRedirection`).
const MOST: usize = 64;

/// How many interfaces a list may have (`netconfig.v1.AmbientRedirection`).
const MOST_INTERFACES: usize = 16;

/// Bytes of an interface's name without the NUL (IFNAMSIZ, linux/if.h).
const LONGEST_NAME: usize = 15;

/// An annotation and what it says.
type Said<'a> = (&'static str, &'a str);

/// As much of a text as is worth telling: an error travels in headers, which have a bound.
pub(super) fn told(text: &str) -> String {
    let start: String = text.chars().take(64).collect();
    format!("{start:?}")
}

fn malformed(annotation: &'static str, why: String) -> Malformed {
    Malformed { annotation, why }
}

/// A list that netconfig takes.
pub(super) fn bounded<T>(
    annotation: &'static str,
    all: BTreeSet<T>,
) -> Result<BTreeSet<T>, Malformed> {
    if all.len() <= MOST {
        return Ok(all);
    }
    let why = format!("more than {MOST} entries; give fewer");
    Err(malformed(annotation, why))
}

/// Everything where an annotation says `*`, else the list that it is.
pub(super) fn all_or<T: Ord>(
    list: impl Fn(Said<'_>) -> Result<BTreeSet<T>, Malformed>,
    said: Said<'_>,
) -> Result<Selection<T>, Malformed> {
    if said.1 == "*" {
        return Ok(Selection::All);
    }
    list(said).map(Selection::These)
}

/// Ports, with spaces as anybody likes. Port 0, which Istio takes, is nobody's and left out.
pub(super) fn ports((annotation, text): Said<'_>) -> Result<BTreeSet<NonZeroU16>, Malformed> {
    let mut ports = BTreeSet::new();
    for entry in entries(text.trim()) {
        let port = port(entry.trim()).ok_or_else(|| {
            let told = told(entry);
            let advice = "give numbers up to 65535 with commas between them";
            malformed(annotation, format!("{told} is no port; {advice}"))
        })?;
        ports.extend(NonZeroU16::new(port));
    }
    bounded(annotation, ports)
}

fn entries(text: &str) -> impl Iterator<Item = &str> {
    let all = (!text.is_empty()).then(|| text.split(','));
    all.into_iter().flatten()
}

/// Digits alone: no sign.
fn port(text: &str) -> Option<u16> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

/// Networks, without any space. Bits beyond the prefix mean nothing.
pub(super) fn networks((annotation, text): Said<'_>) -> Result<BTreeSet<Network>, Malformed> {
    let network = |entry| {
        network(entry).ok_or_else(|| {
            let told = told(entry);
            let advice =
                "give networks like 10.0.0.0/8 or fd00::/64 with commas and no spaces between them";
            malformed(annotation, format!("{told} is no network; {advice}"))
        })
    };
    let networks = entries(text).map(network).collect::<Result<_, _>>()?;
    bounded(annotation, networks)
}

/// As Go's netip.ParsePrefix takes it: the length without a sign or a leading zero.
fn network(text: &str) -> Option<Network> {
    let (address, bits) = text.split_once('/')?;
    let address: IpAddr = parse_address(address).ok()?;
    let is_plain = bits == "0" || !bits.starts_with(['0', '+']);
    Network::around(address, bits.parse().ok().filter(|_| is_plain)?)
}

/// Names of interfaces, with spaces around them as anybody likes.
pub(super) fn interfaces((annotation, text): Said<'_>) -> Result<BTreeSet<String>, Malformed> {
    let mut names = BTreeSet::new();
    for entry in entries(text.trim()) {
        let name = entry.trim();
        if !is_interface(name) {
            let told = told(entry);
            let advice = "give names of at most 15 letters, digits and _.- that begin with a letter, with commas between them";
            return Err(malformed(
                annotation,
                format!("{told} is no interface; {advice}"),
            ));
        }
        names.insert(name.to_owned());
    }
    if names.len() > MOST_INTERFACES {
        let why = format!("more than {MOST_INTERFACES} interfaces; give fewer");
        return Err(malformed(annotation, why));
    }
    Ok(names)
}

fn is_interface(name: &str) -> bool {
    let mut bytes = name.bytes();
    let begins = bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic());
    let goes_on = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    begins && name.len() <= LONGEST_NAME && bytes.all(goes_on)
}

/// Entries with commas between them.
pub(super) fn joined<T: ToString>(entries: impl IntoIterator<Item = T>) -> String {
    let entries: Vec<_> = entries.into_iter().map(|entry| entry.to_string()).collect();
    entries.join(",")
}
