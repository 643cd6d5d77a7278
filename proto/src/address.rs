use std::net::IpAddr;

use crate::Invalid;

/// Parses a list of addresses. The error names the field.
///
/// # Errors
///
/// If one is not an address, or is an IPv4-mapped IPv6 address.
pub fn addresses_from(texts: &[String], field: &'static str) -> Result<Vec<IpAddr>, Invalid> {
    texts
        .iter()
        .map(|text| inpod_types::parse_address(text).map_err(|error| Invalid::new(field, &error)))
        .collect()
}

/// Formats addresses for a message.
pub fn addresses_to(addresses: &[IpAddr]) -> Vec<String> {
    addresses.iter().map(ToString::to_string).collect()
}
