use std::net::IpAddr;

use crate::Invalid;

/// Parses the addresses of a message's field. The error names the field, as the contracts require.
///
/// # Errors
///
/// If an address is invalid, or is an IPv4-mapped IPv6 address.
pub fn addresses_from(texts: &[String], field: &'static str) -> Result<Vec<IpAddr>, Invalid> {
    texts
        .iter()
        .map(|text| inpod_types::parse_address(text).map_err(|error| Invalid::new(field, &error)))
        .collect()
}

/// Formats addresses in the form that [`addresses_from`] parses.
pub fn addresses_to(addresses: &[IpAddr]) -> Vec<String> {
    addresses.iter().map(ToString::to_string).collect()
}
