//! Conversions of redirections. The checked types hold only values that netconfig can apply.

use std::{fmt::Display, num::NonZeroU16, str::FromStr};

use inpod_types::{
    InvalidIdentifier,
    lists::{MAX_ENTRIES, MAX_INTERFACES},
    redirection::{
        Ambient, Exclusions, InboundCapture, InterfaceName, Ipv6, Loopback, Owner, Selection,
        Sidecar,
    },
};

use crate::{Invalid, netconfig::v1};

impl TryFrom<v1::AmbientRedirection> for Ambient {
    type Error = Invalid;

    fn try_from(wanted: v1::AmbientRedirection) -> Result<Self, Invalid> {
        if inbound_capture(wanted.inbound_capture)? == InboundCapture::Tproxy {
            let why = "TPROXY is not available in ambient mode: leave the field unset";
            return Err(Invalid::new("inbound_capture", why));
        }
        let exclusions = Exclusions::try_from(wanted.exclusions.unwrap_or_default());
        Ok(Self {
            dns_capture: wanted.dns_capture,
            bypass_inbound_capture: wanted.bypass_inbound_capture,
            virtual_interfaces: interfaces(
                "reroute_virtual_interfaces",
                &wanted.reroute_virtual_interfaces,
            )?,
            ipv6: ipv6(wanted.ipv6)?,
            exclusions: exclusions.map_err(|invalid| invalid.within("exclusions"))?,
            keep_existing_connections: wanted.keep_existing_connections,
            probe_sources: Vec::new(),
            probe_ports: probe_ports(wanted.probe_ports)?,
        })
    }
}

impl TryFrom<v1::SidecarRedirection> for Sidecar {
    type Error = Invalid;

    fn try_from(wanted: v1::SidecarRedirection) -> Result<Self, Invalid> {
        let proxy_users = owners("proxy_uids", &wanted.proxy_uids)?;
        if proxy_users.is_empty() {
            return Err(Invalid::new("proxy_uids", "proxy_uids is required"));
        }
        let owner_groups = wanted.owner_groups.map(|some| some.groups);
        let owner_groups = owner_groups.map(|some| owners("owner_groups.groups", &some));
        let inbound = wanted.inbound_ports.unwrap_or_default();
        let outbound = wanted.outbound_networks.unwrap_or_default();
        let dns = wanted.dns.unwrap_or_default();
        Ok(Self {
            inbound_capture: inbound_capture(wanted.inbound_capture)?,
            ipv6: ipv6(wanted.ipv6)?,
            proxy_users,
            proxy_groups: owners("proxy_gids", &wanted.proxy_gids)?,
            inbound_ports: selection("inbound_ports.ports", inbound.all, &inbound.ports, ports)?,
            excluded_inbound_ports: ports(
                "excluded_inbound_ports",
                &wanted.excluded_inbound_ports,
            )?,
            outbound_networks: selection(
                "outbound_networks.networks",
                outbound.all,
                &outbound.networks,
                texts,
            )?,
            excluded_outbound_networks: texts(
                "excluded_outbound_networks",
                &wanted.excluded_outbound_networks,
            )?,
            outbound_ports: ports("outbound_ports", &wanted.outbound_ports)?,
            excluded_outbound_ports: ports(
                "excluded_outbound_ports",
                &wanted.excluded_outbound_ports,
            )?,
            excluded_interfaces: interfaces("excluded_interfaces", &wanted.excluded_interfaces)?,
            virtual_interfaces: interfaces(
                "reroute_virtual_interfaces",
                &wanted.reroute_virtual_interfaces,
            )?,
            owner_groups: owner_groups.transpose()?,
            excluded_owner_groups: owners("excluded_owner_groups", &wanted.excluded_owner_groups)?,
            dns: selection("dns.servers", dns.all, &dns.servers, texts)?,
            drop_invalid: wanted.drop_invalid,
            loopback: loopback(&wanted.loopback_network)?,
            keep_existing_connections: false,
        })
    }
}

impl TryFrom<v1::Exclusions> for Exclusions {
    type Error = Invalid;

    fn try_from(wanted: v1::Exclusions) -> Result<Self, Invalid> {
        let exclusions = Self {
            outbound_ports: ports("outbound_ports", &wanted.outbound_ports)?,
            outbound_cidrs: texts("outbound_cidrs", &wanted.outbound_cidrs)?,
            inbound_ports: ports("inbound_ports", &wanted.inbound_ports)?,
            inbound_cidrs: texts("inbound_cidrs", &wanted.inbound_cidrs)?,
        };
        let exclusions = exclusions.without_hbone();
        exclusions.map_err(|why| refused("inbound_ports", why))
    }
}

impl From<&Exclusions> for v1::Exclusions {
    fn from(exclusions: &Exclusions) -> Self {
        Self {
            outbound_ports: numbers(&exclusions.outbound_ports),
            outbound_cidrs: to_texts(&exclusions.outbound_cidrs),
            inbound_ports: numbers(&exclusions.inbound_ports),
            inbound_cidrs: to_texts(&exclusions.inbound_cidrs),
        }
    }
}

impl From<Ipv6> for v1::Ipv6Capture {
    fn from(ipv6: Ipv6) -> Self {
        match ipv6 {
            Ipv6::Auto => Self::Unspecified,
            Ipv6::On => Self::On,
            Ipv6::Off => Self::Off,
        }
    }
}

impl From<InboundCapture> for v1::InboundCapture {
    fn from(inbound: InboundCapture) -> Self {
        match inbound {
            InboundCapture::Redirect => Self::Redirect,
            InboundCapture::Tproxy => Self::Tproxy,
        }
    }
}

fn inbound_capture(number: i32) -> Result<InboundCapture, Invalid> {
    match v1::InboundCapture::try_from(number) {
        Ok(v1::InboundCapture::Unspecified | v1::InboundCapture::Redirect) => {
            Ok(InboundCapture::Redirect)
        }
        Ok(v1::InboundCapture::Tproxy) => Ok(InboundCapture::Tproxy),
        Err(_) => Err(unknown_value("inbound_capture", number)),
    }
}

fn ipv6(number: i32) -> Result<Ipv6, Invalid> {
    match v1::Ipv6Capture::try_from(number) {
        Ok(v1::Ipv6Capture::Unspecified) => Ok(Ipv6::Auto),
        Ok(v1::Ipv6Capture::On) => Ok(Ipv6::On),
        Ok(v1::Ipv6Capture::Off) => Ok(Ipv6::Off),
        Err(_) => Err(unknown_value("ipv6", number)),
    }
}

/// Returns the error for a value that only later releases support.
fn unknown_value(field: &'static str, number: i32) -> Invalid {
    let why = format!("{field} has the value {number}, which this release does not support");
    Invalid::new(field, why)
}

fn refused(field: &'static str, why: impl Display) -> Invalid {
    Invalid::new(field, format!("{field}: {why}"))
}

fn probe_ports(wanted: Option<v1::PortSelection>) -> Result<Option<Vec<NonZeroU16>>, Invalid> {
    let Some(v1::PortSelection { all, ports: listed }) = wanted else {
        return Ok(None);
    };
    match selection("probe_ports", all, &listed, ports)? {
        Selection::All => Ok(None),
        Selection::These(ports) => Ok(Some(ports)),
    }
}

/// Refuses a selection of all in combination with entries.
fn selection<S, T>(
    field: &'static str,
    all: bool,
    entries: &[S],
    parse: fn(&'static str, &[S]) -> Result<Vec<T>, Invalid>,
) -> Result<Selection<T>, Invalid> {
    match (all, entries.is_empty()) {
        (true, true) => Ok(Selection::All),
        (false, _) => Ok(Selection::These(parse(field, entries)?)),
        (true, false) => {
            let why = format!("{field} has entries, but all are selected");
            Err(Invalid::new(field, why))
        }
    }
}

fn ports(field: &'static str, numbers: &[u32]) -> Result<Vec<NonZeroU16>, Invalid> {
    parse_all(field, MAX_ENTRIES, numbers, |number| {
        let port = u16::try_from(*number).ok().and_then(NonZeroU16::new);
        port.ok_or_else(|| format!("{number} is not a port (1 to 65535)"))
    })
}

fn owners(field: &'static str, numbers: &[u32]) -> Result<Vec<Owner>, Invalid> {
    parse_all(field, MAX_ENTRIES, numbers, |number| {
        Owner::new(*number).ok_or_else(|| format!("{number} is not a user or group id"))
    })
}

fn interfaces(field: &'static str, names: &[String]) -> Result<Vec<InterfaceName>, Invalid> {
    let parse = |name: &String| {
        name.parse()
            .map_err(|error: InvalidIdentifier| error.to_string())
    };
    parse_all(field, MAX_INTERFACES, names, parse)
}

fn texts<T: FromStr<Err: Display> + PartialEq + Display>(
    field: &'static str,
    texts: &[String],
) -> Result<Vec<T>, Invalid> {
    parse_all(field, MAX_ENTRIES, texts, |text| parse_text(text))
}

fn loopback(text: &str) -> Result<Loopback, Invalid> {
    if text.is_empty() {
        return Ok(Loopback::default());
    }
    parse_text(text).map_err(|why| refused("loopback_network", why))
}

/// Shortens the text in an error, because errors travel in headers, whose size is limited.
fn parse_text<T: FromStr<Err: Display>>(text: &str) -> Result<T, String> {
    let shortened = || text.chars().take(64).collect::<String>();
    text.parse()
        .map_err(|why| format!("{:?} {why}", shortened()))
}

/// Parses entries, and refuses duplicates. Refuses too many entries before the entries are parsed.
fn parse_all<S, T: PartialEq + Display>(
    field: &'static str,
    max: usize,
    entries: &[S],
    parse: impl Fn(&S) -> Result<T, String>,
) -> Result<Vec<T>, Invalid> {
    let found = entries.len();
    if found > max {
        let why = format!("{field} has {found} entries, at most {max} are allowed");
        return Err(Invalid::new(field, why));
    }
    let parsed: Result<Vec<_>, _> = entries.iter().map(parse).collect();
    let parsed = parsed.map_err(|why| refused(field, why))?;
    let is_repeated = |(at, entry): &(usize, &T)| parsed.iter().take(*at).any(|it| it == *entry);
    match parsed.iter().enumerate().find(is_repeated) {
        Some((_, entry)) => Err(refused(field, format!("{entry} is listed twice"))),
        None => Ok(parsed),
    }
}

fn numbers(ports: &[NonZeroU16]) -> Vec<u32> {
    ports.iter().map(|port| port.get().into()).collect()
}

fn to_texts<T: ToString>(entries: &[T]) -> Vec<String> {
    entries.iter().map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests;
