use std::net::IpAddr;

use crate::Invalid;

/// Checks a list of addresses, naming the one that is wrong.
///
/// # Errors
///
/// When one is no address, or an IPv4 address written as IPv6.
pub fn addresses_from(texts: &[String], field: &'static str) -> Result<Vec<IpAddr>, Invalid> {
    texts
        .iter()
        .map(|text| inpod_types::parse_address(text).map_err(|error| Invalid::new(field, &error)))
        .collect()
}

/// Writes addresses as the contracts carry them.
pub fn addresses_to(addresses: &[IpAddr]) -> Vec<String> {
    addresses.iter().map(ToString::to_string).collect()
}
