//! Checks for the preflight whether the kernel accepts the probe set.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{ProbeSetError, ProbeSettings, open};
use crate::netlink::KernelError;

/// Addresses reserved for documentation (RFC 5737, RFC 3849).
const ADDRESSES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
];

/// Adds addresses in the same way as [`super::ProbeSet::set_addresses`]. The calling thread must be in a temporary
/// netns.
pub(crate) fn preflight(settings: &ProbeSettings) -> Result<(), ProbeSetError> {
    let opened = open(settings);
    let opened = opened.map_err(|error| KernelError::new("open a netlink socket", error))?;
    if let Some(mut state) = opened {
        state.set("self-test", &ADDRESSES.into())?;
    }
    Ok(())
}
