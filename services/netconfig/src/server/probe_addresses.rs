use std::{collections::BTreeSet, net::IpAddr};

use inpod_proto::{Invalid, addresses_from, netconfig::v1::ProbeExemption};

use crate::{
    apply::{Applied, Observation},
    claims::Claim,
    error::{Context as _, Failed},
    probes::ProbeSet,
};

const MAX_PROBE_ADDRESSES: usize = 16;

/// Parses and deduplicates addresses, and refuses addresses that no pod can have, because an element affects all
/// traffic of the node to its address.
pub(super) fn parse(texts: &[String], field: &'static str) -> Result<BTreeSet<IpAddr>, Invalid> {
    let found = texts.len();
    if found > MAX_PROBE_ADDRESSES {
        let why = format!("{field} has {found} entries, at most {MAX_PROBE_ADDRESSES} are allowed");
        return Err(Invalid::new(field, why));
    }
    let addresses: BTreeSet<_> = addresses_from(texts, field)?.into_iter().collect();
    let mut all = addresses.iter();
    match all.find(|address| is_never_a_pod_address(**address)) {
        None => Ok(addresses),
        Some(bad) => {
            let why = format!("{field}: {bad} cannot be the address of a pod");
            Err(Invalid::new(field, why))
        }
    }
}

fn is_never_a_pod_address(address: IpAddr) -> bool {
    address.is_loopback()
        || address.is_unspecified()
        || address.is_multicast()
        || matches!(address, IpAddr::V4(v4) if v4.is_broadcast())
        || matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// Returns the probe addresses that a claim gives its sandbox, or `None` if they stay as they are. Only addresses that the
/// netns has become probe addresses, because nothing else verifies a pod's status.
pub(super) fn of_claim(exemption: ProbeExemption, verified: &[IpAddr]) -> Option<BTreeSet<IpAddr>> {
    match exemption {
        ProbeExemption::Unspecified | ProbeExemption::Prepare => None,
        ProbeExemption::On => Some(verified.iter().copied().collect()),
        ProbeExemption::Off => Some(BTreeSet::new()),
    }
}

/// Sets the verified addresses of a claim as probe addresses, for rules that are announced. A failure is left to the
/// application of the rules, which sets probe addresses again and reports why that fails.
pub(super) fn prepare(probe_set: &ProbeSet, claim: &Claim, verified: Vec<IpAddr>) {
    let can_be_set = verified.len() <= MAX_PROBE_ADDRESSES
        && !verified.iter().copied().any(is_never_a_pod_address);
    if !can_be_set {
        return;
    }
    let verified = verified.into_iter().collect();
    match probe_set.set_addresses(&claim.sandbox, &verified) {
        Ok(_) => claim.set_prepared_probes(verified),
        Err(error) => {
            tracing::debug!(sandbox = %claim.sandbox, %error, "Cannot prepare probe addresses");
        }
    }
}

/// Sets probe addresses, unless the claim has just set the same ones, then applies rules, and restores the previous
/// probe addresses if the rules fail.
pub(super) fn apply(
    probe_set: &ProbeSet,
    claim: &Claim,
    addresses: &BTreeSet<IpAddr>,
    rules: impl FnOnce() -> Result<(Applied, Observation), Failed>,
) -> Result<(Applied, Observation), Failed> {
    if claim.take_prepared_probes().as_ref() == Some(addresses) {
        return rules();
    }
    let change = probe_set.set_addresses(&claim.sandbox, addresses);
    let change = change.context("cannot apply the rules")?;
    match rules() {
        Ok((applied, seen)) => {
            let changed = applied.changed || change.changed;
            Ok((Applied { changed, ..applied }, seen))
        }
        Err(error) => Err(error.with_undo_failures(probe_set.undo(&claim.sandbox, &change))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELD: &str = "probe_addresses";

    fn parsed(texts: &[&str]) -> Result<BTreeSet<IpAddr>, Invalid> {
        let texts: Vec<_> = texts.iter().map(|&text| text.to_owned()).collect();
        parse(&texts, FIELD)
    }

    #[test]
    fn addresses_are_taken_once_each() {
        let found = parsed(&["10.0.0.1", "fd00::1", "10.0.0.1"]).unwrap();
        let wanted = ["10.0.0.1", "fd00::1"].map(|text| text.parse().unwrap());
        assert_eq!(found, wanted.into());
        assert!(parsed(&[]).unwrap().is_empty());
    }

    #[test]
    fn what_is_no_address_of_a_pod_is_refused_by_name() {
        for bad in [
            "",
            "x",
            "10.0.0.0/8",
            "127.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "0.0.0.0",
            "::",
            "::1",
            "224.0.0.1",
            "255.255.255.255",
            "fe80::1",
        ] {
            assert_eq!(parsed(&[bad]).unwrap_err().field(), FIELD, "{bad}");
        }
    }

    #[test]
    fn more_addresses_than_a_pod_can_have_are_refused() {
        assert!(parsed(&["10.0.0.1"; 16]).is_ok());
        let error = parsed(&["10.0.0.1"; 17]).unwrap_err();
        assert!(error.to_string().contains("17 entries"), "{error}");
    }
}
