//! The preflight check's part for the node's probe set.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{ProbeSetError, ProbeSettings, open};
use crate::netlink::KernelError;

/// For documentation (RFC 5737, RFC 3849).
const ADDRESSES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
];

/// Works like [`super::ProbeSet::set_addresses`]. The calling thread's netns must be a temporary one.
pub(crate) fn preflight(settings: &ProbeSettings) -> Result<(), ProbeSetError> {
    let opened = open(settings);
    let opened = opened.map_err(|error| KernelError::new("open a netlink socket", error))?;
    if let Some(mut state) = opened {
        state.set("self-test", &ADDRESSES.into())?;
    }
    Ok(())
}
