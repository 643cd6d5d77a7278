//! The types shared by all crates of inpod: identifiers, enrollments, reasons and keys.
//!
//! Values are validated, so that for example the namespace of a [`PodRef`] is always legal. The crate has no I/O.
//! Files use the types' serde formats; `inpod-proto` contains the conversions for the wire.
#![warn(missing_docs)]

mod backoff;
pub mod cgroup;
mod enrollment;
mod failure;
mod identifier;
pub mod keys;
pub mod lists;
mod netns;
mod pod;
mod reason;
pub mod redirection;
mod sandbox;

/// The version of this build, with the commit in builds by `deploy/images/compile`, as in `0.2.0+0123456789ab`.
pub const VERSION: &str = match option_env!("INPOD_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

pub use backoff::Backoff;
pub use enrollment::Enrollment;
pub use failure::{Failure, with_causes};
pub use identifier::{InvalidIdentifier, is_cni_name, is_dns_subdomain};
pub use netns::{NetnsId, NetnsRef};
pub use pod::{
    NamespaceName, NodeName, PodName, PodRef, PodUid, ServiceAccountName, ServiceName, Workload,
    WorkloadInfo,
};
pub use reason::Reason;
pub use sandbox::{ContainerId, IfName, NetworkName, SandboxRef};

use std::{net::IpAddr, str::FromStr};

use serde::{Deserialize, Serialize};

/// Orders the changes of a sandbox. `pod-events` assigns revisions and checkpoints the last one, and of two calls the
/// call with the higher revision wins.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Revision(pub u64);

/// Parses a pod's address. IPv4-mapped IPv6 addresses (`::ffff:a.b.c.d`) are rejected, because sets, rules and
/// comparisons downstream would treat such an address as a different one.
///
/// # Errors
///
/// Fails if the text is no address, or an IPv4-mapped address.
pub fn parse_address(text: &str) -> Result<IpAddr, InvalidIdentifier> {
    let address = text
        .parse()
        .map_err(|_| InvalidIdentifier::new("IP address", text, "not an IPv4 or IPv6 address"))?;
    match address {
        IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => Err(InvalidIdentifier::new(
            "IP address",
            text,
            "an IPv4 address written as IPv6; write it as IPv4",
        )),
        IpAddr::V4(_) | IpAddr::V6(_) => Ok(address),
    }
}

/// Parses digits without a sign.
pub fn parse_digits<T: FromStr>(digits: &str) -> Option<T> {
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_both_families_parse() {
        assert!(parse_address("10.0.0.1").is_ok());
        assert!(parse_address("fd77::2").is_ok());
    }

    #[test]
    fn a_v4_mapped_address_is_refused_and_named() {
        let error = parse_address("::ffff:10.0.0.1").unwrap_err();
        assert!(error.to_string().contains("::ffff:10.0.0.1"), "{error}");
    }

    #[test]
    fn an_address_with_a_prefix_length_is_refused() {
        assert!(parse_address("10.0.0.1/24").is_err());
    }
}
