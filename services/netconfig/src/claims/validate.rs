use std::{
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::anyhow;
use inpod_linux::{Netns, OpenError};
use inpod_types::{NetnsId, NetnsRef, Reason};

use crate::{
    error::Failed,
    inspect::{self, InspectError, is_global},
    netns_session::Visit,
    routes::Routes,
    sysctl::Sysctls,
};

/// The node's netns, if visible (which needs SYS_PTRACE and the host's pid namespace), and netconfig's own.
const HOST_NETNS_PATHS: [&str; 2] = ["/proc/1/ns/net", "/proc/self/ns/net"];

#[derive(Debug)]
pub(crate) struct ValidatedNetns {
    pub(crate) netns: Netns,
    pub(crate) addresses: Vec<IpAddr>,
}

/// Opens the requested netns; refuses a netns with another identity, and the node's.
pub(crate) fn open(wanted: &NetnsRef, roots: &[PathBuf]) -> Result<Netns, Failed> {
    Ok(open_with(wanted, roots, || ())?.0)
}

/// Opens a netns like [`open`], and runs `visit` inside.
fn open_with<T>(
    wanted: &NetnsRef,
    roots: &[PathBuf],
    visit: impl FnOnce() -> T,
) -> Result<(Netns, T), Failed> {
    let opened = Netns::open_with(&wanted.path, roots, visit);
    let (netns, visited) = opened.map_err(|error| open_error(error, wanted))?;
    let found = netns.id();
    if HOST_NETNS_PATHS
        .iter()
        .any(|path| netns.is_at(Path::new(path)).unwrap_or(false))
    {
        let cause = anyhow!("{found} is the node's own netns");
        return Err(Failed::new(Reason::NetnsIsHost, cause).at_field("netns"));
    }
    if !wanted.agrees_with(&found) {
        return Err(mismatch(found));
    }
    Ok((netns, visited))
}

/// Classifies a failure to open. A missing path means that the sandbox is gone, unless processes use the netns:
/// then the caller's path resolves differently for netconfig. Without mount propagation, netconfig sees an empty
/// file in place of a bind-mounted netns.
fn open_error(error: OpenError, wanted: &NetnsRef) -> Failed {
    let is_absent = matches!(error, OpenError::Missing(_) | OpenError::NotANamespace(_));
    let failed = if is_absent && inspect::has_processes_in(wanted) {
        Failed::new(Reason::NetnsUnreachable, error)
            .context("the netns is in use, but cannot be opened at its path")
    } else {
        Failed::new(reason_of_open(&error), error).context("cannot open the netns")
    };
    failed.at_field("netns.path")
}

fn reason_of_open(error: &OpenError) -> Reason {
    match error {
        OpenError::NotPlain(_) | OpenError::OutsideRoots { .. } | OpenError::Symlink(_) => {
            Reason::NetnsPathRefused
        }
        OpenError::Missing(_) => Reason::NetnsMissing,
        OpenError::NotANamespace(_) | OpenError::NotNet(_) => Reason::NetnsNotANetns,
        OpenError::Io { .. } | OpenError::Enter { .. } | OpenError::Cookie(_) => {
            Reason::KernelRefused
        }
    }
}

/// Returns the error of a netns at the path that is not the requested netns.
pub(crate) fn mismatch(found: NetnsId) -> Failed {
    let cause = anyhow!("found {found}, which is not the requested netns");
    Failed::new(Reason::NetnsMismatch, cause).at_field("netns")
}

/// Opens a netns that must have one of the expected addresses on an interface other than `lo`.
pub(crate) fn validate_discovered(
    wanted: &NetnsRef,
    expected: Vec<IpAddr>,
    roots: &[PathBuf],
) -> Result<ValidatedNetns, Failed> {
    let netns = open(wanted, roots)?;
    let routes = netns.within(Routes::open).map_err(InspectError::from)?;
    let mut routes = routes.map_err(InspectError::reading("the addresses"))?;
    let found = routes
        .addresses_beyond_loopback()
        .map_err(InspectError::from)?;
    let addresses = validate_addresses(found, expected)?;
    Ok(ValidatedNetns { netns, addresses })
}

/// Opens a netns that must have one of the expected addresses. If the caller expects none, the netns must have at
/// least one address that a pod can have, and all such addresses are returned.
///
/// Visits the netns once, and keeps the sockets and files opened by the visit. Sets `lo` up if `lo` is still down,
/// because ztunnel, which gets the pod before the rules are applied, listens for DNS on 127.0.0.1
/// (services/docs/decisions/094-loopback.md).
pub(crate) fn validate_visited(
    wanted: &NetnsRef,
    expected: Vec<IpAddr>,
    roots: &[PathBuf],
    sysctls: &Sysctls,
) -> Result<(ValidatedNetns, Visit), Failed> {
    let (netns, visit) = open_with(wanted, roots, || Visit::here(sysctls))?;
    let mut visit = visit.map_err(InspectError::reading("the state of the netns"))?;
    let found = visit.routes.addresses().map_err(InspectError::from)?;
    let has_loopback = found.iter().any(IpAddr::is_loopback);
    let addresses = validate_addresses(found, expected)?;
    if !has_loopback {
        visit.routes.set_loopback_up().map_err(InspectError::from)?;
    }
    Ok((ValidatedNetns { netns, addresses }, visit))
}

/// Returns the addresses of the pod: the expected addresses that the netns holds, or all if none is expected. The
/// node's probe set gets the result, so an address of another host in an earlier plugin's result must not pass.
fn validate_addresses(
    mut found: Vec<IpAddr>,
    expected: Vec<IpAddr>,
) -> Result<Vec<IpAddr>, Failed> {
    let validated = if expected.is_empty() {
        found.retain(is_global);
        found.clone()
    } else {
        let (held, foreign): (Vec<_>, Vec<_>) =
            expected.into_iter().partition(|it| found.contains(it));
        if !held.is_empty() && !foreign.is_empty() {
            let (held, foreign) = (list(&held), list(&foreign));
            tracing::warn!(%held, %foreign, "The netns does not hold every address that was reported for it; the others are left out");
        }
        held
    };
    if validated.is_empty() {
        let found = list(&found);
        let cause = anyhow!("the netns holds {found}, none of the expected addresses");
        return Err(Failed::new(Reason::AddressMismatch, cause).at_field("addresses"));
    }
    Ok(validated)
}

fn list(addresses: &[IpAddr]) -> String {
    if addresses.is_empty() {
        return "no address".to_owned();
    }
    let texts: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_the_netns_does_not_hold_are_left_out() {
        let addresses = |texts: &[&str]| -> Vec<IpAddr> {
            texts.iter().map(|text| text.parse().unwrap()).collect()
        };
        let found = || addresses(&["127.0.0.1", "10.0.0.2", "fd00::2"]);
        for (expected, validated) in [
            (&["10.0.0.2"][..], &["10.0.0.2"][..]),
            (&["10.96.0.1", "10.0.0.2", "192.0.2.10"], &["10.0.0.2"]),
            (&[], &["10.0.0.2", "fd00::2"]),
        ] {
            let result = validate_addresses(found(), addresses(expected)).unwrap();
            assert_eq!(result, addresses(validated), "{expected:?}");
        }
        let refused = validate_addresses(found(), addresses(&["10.96.0.1"]));
        assert_eq!(refused.unwrap_err().reason, Reason::AddressMismatch);
    }
}
