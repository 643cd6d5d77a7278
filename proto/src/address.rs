use std::net::IpAddr;

use crate::Invalid;

/// Parses addresses; the error names the field.
///
/// # Errors
///
/// If one is invalid, or an IPv4-mapped IPv6 address.
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
