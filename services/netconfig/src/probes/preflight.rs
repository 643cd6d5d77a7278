//! The node's half of an ADD, where it concerns nobody.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{ProbeSetError, ProbeSettings, SetBackendKind, open};
use crate::netlink::KernelError;

/// Of documentation alone (RFC 5737, RFC 3849).
const ADDRESSES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
];

/// Names addresses as [`super::ProbeSet::name`] does, in the calling thread's netns, which is to be made for it.
pub(crate) fn preflight(settings: ProbeSettings, by: SetBackendKind) -> Result<(), ProbeSetError> {
    let opened = open(settings, by);
    let opened = opened.map_err(|error| KernelError::new("open a netlink socket", error))?;
    if let Some(mut state) = opened {
        state.set("self-test", &ADDRESSES.into())?;
    }
    Ok(())
}
