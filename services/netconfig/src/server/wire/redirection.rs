//! Parses redirections. Every successfully parsed redirection can be applied.

mod sidecar;

use std::{fmt::Display, net::IpAddr, num::NonZeroU16, str::FromStr};

use inpod_proto::{
    Invalid,
    netconfig::v1::{self, redirection::Mode},
};
use tonic::Status;

use super::{missing, refuse};
use crate::{
    marks::INBOUND_HBONE_PORT,
    rules::{
        Ambient, Exclusions, InboundCapture, InterfaceName, Ipv6, Network, Redirection, Selection,
    },
};

/// The maximum number of exclusions, since every new connection passes a rule per exclusion.
const MAX_EXCLUSIONS: usize = 64;

const MAX_INTERFACES: usize = 16;

const INBOUND_CAPTURE: &str = "redirection.ambient.inbound_capture";
const IPV6: &str = "redirection.ambient.ipv6";
const INTERFACES: &str = "redirection.ambient.reroute_virtual_interfaces";
const OUTBOUND_PORTS: &str = "redirection.ambient.exclusions.outbound_ports";
const OUTBOUND_CIDRS: &str = "redirection.ambient.exclusions.outbound_cidrs";
const INBOUND_PORTS: &str = "redirection.ambient.exclusions.inbound_ports";
const PROBE_PORTS: &str = "redirection.ambient.probe_ports";
const INBOUND_CIDRS: &str = "redirection.ambient.exclusions.inbound_cidrs";

/// Parses a redirection, and adds the exemption of this node's probes.
pub(in crate::server) fn redirection_of(
    redirection: Option<v1::Redirection>,
    probe_sources: &[IpAddr],
) -> Result<Redirection, Status> {
    let redirection = redirection.ok_or_else(|| missing("redirection"))?;
    match redirection.mode {
        Some(Mode::Ambient(wanted)) => ambient(wanted, probe_sources)
            .map(Redirection::Ambient)
            .map_err(refuse),
        Some(Mode::Sidecar(wanted)) => sidecar::sidecar(wanted)
            .map(Redirection::Sidecar)
            .map_err(refuse),
        None => Err(missing("redirection.mode")),
    }
}

fn ambient(wanted: v1::AmbientRedirection, probe_sources: &[IpAddr]) -> Result<Ambient, Invalid> {
    if inbound_capture_of(INBOUND_CAPTURE, wanted.inbound_capture)? == InboundCapture::Tproxy {
        let why = "TPROXY is not available in ambient mode: leave the field unset";
        return Err(Invalid::new(INBOUND_CAPTURE, why));
    }
    Ok(Ambient {
        dns_capture: wanted.dns_capture,
        bypass_inbound_capture: wanted.bypass_inbound_capture,
        virtual_interfaces: interfaces(INTERFACES, &wanted.reroute_virtual_interfaces)?,
        ipv6: ipv6_of(IPV6, wanted.ipv6)?,
        exclusions: exclusions(&wanted.exclusions.unwrap_or_default())?,
        keep_existing_connections: wanted.keep_existing_connections,
        probe_sources: probe_sources.to_vec(),
        probe_ports: probe_ports(wanted.probe_ports)?,
    })
}

fn probe_ports(wanted: Option<v1::PortSelection>) -> Result<Option<Vec<NonZeroU16>>, Invalid> {
    let Some(v1::PortSelection { all, ports }) = wanted else {
        return Ok(None);
    };
    let ports = self::ports(PROBE_PORTS, &ports)?;
    match selection(PROBE_PORTS, all, ports)? {
        Selection::All => Ok(None),
        Selection::These(ports) => Ok(Some(ports)),
    }
}

fn inbound_capture_of(field: &'static str, number: i32) -> Result<InboundCapture, Invalid> {
    match v1::InboundCapture::try_from(number) {
        Ok(v1::InboundCapture::Unspecified | v1::InboundCapture::Redirect) => {
            Ok(InboundCapture::Redirect)
        }
        Ok(v1::InboundCapture::Tproxy) => Ok(InboundCapture::Tproxy),
        Err(_) => Err(unknown_value(field, number)),
    }
}

fn ipv6_of(field: &'static str, number: i32) -> Result<Ipv6, Invalid> {
    match v1::Ipv6Capture::try_from(number) {
        Ok(v1::Ipv6Capture::Unspecified) => Ok(Ipv6::Auto),
        Ok(v1::Ipv6Capture::On) => Ok(Ipv6::On),
        Ok(v1::Ipv6Capture::Off) => Ok(Ipv6::Off),
        Err(_) => Err(unknown_value(field, number)),
    }
}

/// Returns the error for a value that only later releases support.
fn unknown_value(field: &'static str, number: i32) -> Invalid {
    Invalid::new(
        field,
        format!("{field} has the value {number}, which this release does not support"),
    )
}

fn interfaces(field: &'static str, names: &[String]) -> Result<Vec<InterfaceName>, Invalid> {
    parse_texts(field, MAX_INTERFACES, names)
}

fn exclusions(wanted: &v1::Exclusions) -> Result<Exclusions, Invalid> {
    let v1::Exclusions {
        outbound_ports,
        outbound_cidrs,
        inbound_ports,
        inbound_cidrs,
    } = wanted;
    let exclusions = Exclusions {
        outbound_ports: ports(OUTBOUND_PORTS, outbound_ports)?,
        outbound_networks: networks(OUTBOUND_CIDRS, outbound_cidrs)?,
        inbound_ports: ports(INBOUND_PORTS, inbound_ports)?,
        inbound_networks: networks(INBOUND_CIDRS, inbound_cidrs)?,
    };
    let is_hbone = |port: &NonZeroU16| port.get() == INBOUND_HBONE_PORT;
    if exclusions.inbound_ports.iter().any(is_hbone) {
        let why =
            format!("{INBOUND_PORTS}: port {INBOUND_HBONE_PORT} is ztunnel's and never redirected");
        return Err(Invalid::new(INBOUND_PORTS, why));
    }
    Ok(exclusions)
}

/// Refuses a selection of all in combination with entries.
fn selection<T>(field: &'static str, all: bool, entries: Vec<T>) -> Result<Selection<T>, Invalid> {
    match (all, entries.is_empty()) {
        (true, true) => Ok(Selection::All),
        (false, _) => Ok(Selection::These(entries)),
        (true, false) => Err(Invalid::new(
            field,
            format!("{field} has entries, but all are selected"),
        )),
    }
}

fn ports(field: &'static str, numbers: &[u32]) -> Result<Vec<NonZeroU16>, Invalid> {
    parse_all(field, MAX_EXCLUSIONS, numbers, |number| {
        let port = u16::try_from(*number).ok().and_then(NonZeroU16::new);
        port.ok_or_else(|| format!("{number} is not a port (1 to 65535)"))
    })
}

fn networks(field: &'static str, texts: &[String]) -> Result<Vec<Network>, Invalid> {
    parse_texts(field, MAX_EXCLUSIONS, texts)
}

fn parse_texts<T: FromStr<Err: Display> + PartialEq + Display>(
    field: &'static str,
    max: usize,
    texts: &[String],
) -> Result<Vec<T>, Invalid> {
    parse_all(field, max, texts, |text| parse_text(text))
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
    let refused = |why| Invalid::new(field, format!("{field}: {why}"));
    let parsed: Result<Vec<_>, _> = entries.iter().map(parse).collect();
    let parsed = parsed.map_err(refused)?;
    let is_repeated = |(at, entry): &(usize, &T)| parsed.iter().take(*at).any(|it| it == *entry);
    match parsed.iter().enumerate().find(is_repeated) {
        Some((_, entry)) => Err(refused(format!("{entry} is listed twice"))),
        None => Ok(parsed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut v1::AmbientRedirection)) -> Invalid {
        let mut wanted = v1::AmbientRedirection {
            exclusions: Some(v1::Exclusions::default()),
            ..v1::AmbientRedirection::default()
        };
        change(&mut wanted);
        ambient(wanted, &[]).unwrap_err()
    }

    fn excluded(change: impl FnOnce(&mut v1::Exclusions)) -> Invalid {
        refused(|wanted| change(wanted.exclusions.as_mut().unwrap()))
    }

    #[test]
    fn what_is_not_said_is_off() {
        let parsed = ambient(v1::AmbientRedirection::default(), &[]).unwrap();
        assert_eq!(parsed, Ambient::default());
    }

    #[test]
    fn probes_are_exempt_at_every_port_unless_ports_are_listed() {
        let parse = |all, ports: &[u32]| {
            let probe_ports = v1::PortSelection {
                all,
                ports: ports.into(),
            };
            let wanted = v1::AmbientRedirection {
                probe_ports: Some(probe_ports),
                ..v1::AmbientRedirection::default()
            };
            ambient(wanted, &[]).map(|parsed| parsed.probe_ports)
        };
        assert_eq!(parse(true, &[]).unwrap(), None);
        assert_eq!(parse(false, &[]).unwrap(), Some(Vec::new()));
        let port = NonZeroU16::new(8080).unwrap();
        assert_eq!(parse(false, &[8080]).unwrap(), Some(vec![port]));
        for (all, ports) in [(true, &[8080][..]), (false, &[0]), (false, &[80, 80])] {
            assert_eq!(parse(all, ports).unwrap_err().field(), PROBE_PORTS);
        }
    }

    #[test]
    fn ports_0_and_65536_are_refused_by_name() {
        for bad in [0, 65536, u32::MAX] {
            let error = excluded(|exclusions| exclusions.outbound_ports = vec![80, bad]);
            assert_eq!(error.field(), OUTBOUND_PORTS);
            assert!(error.to_string().contains(&bad.to_string()), "{error}");
        }
    }

    #[test]
    fn ztunnels_own_port_cannot_be_excluded() {
        let error = excluded(|exclusions| exclusions.inbound_ports = vec![15008]);
        assert_eq!(error.field(), INBOUND_PORTS);
    }

    #[test]
    fn networks_with_host_bits_and_what_is_none_are_refused_by_name() {
        for bad in [
            "10.0.0.1/8",
            "10.0.0.0",
            "",
            "fd00::1/64",
            "10.0.0.0/33",
            "10.0.0.0/8\nx",
        ] {
            let error = excluded(|exclusions| exclusions.inbound_cidrs = vec![bad.to_owned()]);
            assert_eq!(error.field(), INBOUND_CIDRS, "{bad}");
        }
    }

    #[test]
    fn interface_names_with_spaces_or_newlines_are_refused_by_name() {
        for bad in [
            "a b",
            "a\nb",
            "eth0; reboot",
            "",
            "sixteen-bytes-ab",
            "a\0b",
        ] {
            let error = refused(|wanted| wanted.reroute_virtual_interfaces = vec![bad.to_owned()]);
            assert_eq!(error.field(), INTERFACES, "{bad:?}");
        }
    }

    #[test]
    fn ten_thousand_exclusions_are_refused() {
        let error = excluded(|exclusions| exclusions.outbound_ports = (1..=10_000).collect());
        assert!(error.to_string().contains("10000 entries"), "{error}");
        let error = excluded(|exclusions| exclusions.outbound_cidrs = vec!["x".into(); 10_000]);
        assert!(error.to_string().contains("10000 entries"), "{error}");
        let error = refused(|wanted| wanted.reroute_virtual_interfaces = vec!["x".into(); 17]);
        assert!(error.to_string().contains("17 entries"), "{error}");
    }

    #[test]
    fn what_stands_there_twice_is_refused() {
        let error = excluded(|exclusions| exclusions.outbound_ports = vec![80, 443, 80]);
        assert!(error.to_string().contains("80 is listed twice"), "{error}");
    }

    #[test]
    fn a_value_of_a_later_release_is_not_guessed_at() {
        for number in [v1::InboundCapture::Tproxy.into(), 7] {
            let error = refused(|wanted| wanted.inbound_capture = number);
            assert_eq!(error.field(), INBOUND_CAPTURE, "{number}");
        }
        let error = refused(|wanted| wanted.ipv6 = 7);
        assert_eq!(error.field(), IPV6);
    }
}
