use std::net::{IpAddr, Ipv6Addr};

use inpod_linux::Netns;

use crate::{inspect::InspectError, routes::Routes};

/// Returns the unicast addresses of a netns, except loopback and link-local addresses.
pub fn addresses(netns: &Netns) -> Result<Vec<IpAddr>, InspectError> {
    let mut addresses = all_addresses(netns)?;
    addresses.retain(is_global);
    Ok(addresses)
}

/// Returns all addresses of a netns, sorted and without duplicates.
pub(crate) fn all_addresses(netns: &Netns) -> Result<Vec<IpAddr>, InspectError> {
    let routes = netns.within(Routes::open)?;
    let mut routes = routes.map_err(InspectError::reading("the addresses"))?;
    Ok(routes.addresses()?)
}

pub(crate) fn is_global(address: &IpAddr) -> bool {
    let usable = !address.is_loopback() && !address.is_unspecified() && !address.is_multicast();
    usable
        && match address {
            IpAddr::V4(v4) => !v4.is_link_local() && !v4.is_broadcast(),
            IpAddr::V6(v6) => !Ipv6Addr::is_unicast_link_local(v6),
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses_can_be_a_pods_and_local_ones_cannot() {
        for (text, wanted) in [
            ("10.0.0.1", true),
            ("fd00::1", true),
            ("127.0.0.1", false),
            ("169.254.1.1", false),
            ("::1", false),
            ("fe80::1", false),
            ("ff02::1", false),
            ("0.0.0.0", false),
        ] {
            assert_eq!(is_global(&text.parse().unwrap()), wanted, "{text}");
        }
    }
}
