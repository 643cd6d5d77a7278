//! Parses the list annotations of pods with a sidecar (`inpod_types::lists`). Errors name the annotation.

use std::{collections::BTreeSet, num::NonZeroU16};

use inpod_types::lists::{self, InvalidList};

use super::{Malformed, Network, Selection};

type Annotation<'a> = (&'static str, &'a str);

fn named<T>(annotation: &'static str, read: Result<T, InvalidList>) -> Result<T, Malformed> {
    read.map_err(|error| Malformed {
        annotation,
        why: error.to_string(),
    })
}

/// Parses `*` as everything, anything else as a list.
pub(super) fn all_or<T: Ord>(
    list: impl Fn(Annotation<'_>) -> Result<BTreeSet<T>, Malformed>,
    value: Annotation<'_>,
) -> Result<Selection<T>, Malformed> {
    if value.1 == "*" {
        return Ok(Selection::All);
    }
    list(value).map(Selection::These)
}

pub(super) fn ports((annotation, text): Annotation<'_>) -> Result<BTreeSet<NonZeroU16>, Malformed> {
    named(annotation, lists::ports(text))
}

/// Adds the proxy's own ports.
pub(super) fn excluded_inbound(
    (annotation, text): Annotation<'_>,
) -> Result<BTreeSet<NonZeroU16>, Malformed> {
    named(annotation, lists::excluded_inbound(text))
}

pub(super) fn networks((annotation, text): Annotation<'_>) -> Result<BTreeSet<Network>, Malformed> {
    let networks = named(annotation, lists::networks(text))?.into_iter();
    Ok(networks
        .filter_map(|(address, bits)| Network::containing(address, bits))
        .collect())
}

pub(super) fn interfaces(
    (annotation, text): Annotation<'_>,
) -> Result<BTreeSet<String>, Malformed> {
    named(annotation, lists::interfaces(text))
}

pub(super) fn joined<T: ToString>(entries: impl IntoIterator<Item = T>) -> String {
    let entries: Vec<_> = entries.into_iter().map(|entry| entry.to_string()).collect();
    entries.join(",")
}
