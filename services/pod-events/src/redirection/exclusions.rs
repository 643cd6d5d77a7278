//! A pod's exclusions from capture, parsed by the rules of `netconfig.v1.Exclusions`, so that netconfig accepts the
//! exclusions.

use std::{collections::BTreeSet, fmt, net::IpAddr, num::NonZeroU16, str::FromStr};

use inpod_proto::netconfig::v1 as wire;
use inpod_types::{keys, lists, parse_address};
use serde::{Deserialize, Serialize};

/// The limit of `netconfig.v1.Exclusions`.
const MAX_ENTRIES: usize = 64;

/// ztunnel's port is never captured and may not be listed (`netconfig.v1.Exclusions`).
const HBONE_PORT: u16 = 15008;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Exclusions {
    pub outbound_ports: BTreeSet<NonZeroU16>,
    pub outbound_cidrs: BTreeSet<Network>,
    pub inbound_ports: BTreeSet<NonZeroU16>,
    pub inbound_cidrs: BTreeSet<Network>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {annotation}: {why}")]
pub struct Malformed {
    pub annotation: &'static str,
    pub why: String,
}

impl Exclusions {
    pub fn from_annotations<'a>(
        text: impl Fn(&'static str) -> Option<&'a str>,
    ) -> Result<Self, Malformed> {
        let exclusions = Self {
            outbound_ports: list(keys::EXCLUDE_OUTBOUND_PORTS, &text, port)?,
            outbound_cidrs: list(keys::EXCLUDE_OUTBOUND_CIDRS, &text, str::parse)?,
            inbound_ports: list(keys::EXCLUDE_INBOUND_PORTS, &text, port)?,
            inbound_cidrs: list(keys::EXCLUDE_INBOUND_CIDRS, &text, str::parse)?,
        };
        if exclusions
            .inbound_ports
            .iter()
            .any(|it| it.get() == HBONE_PORT)
        {
            return Err(Malformed {
                annotation: keys::EXCLUDE_INBOUND_PORTS,
                why: format!("port {HBONE_PORT} is ztunnel's and never captured"),
            });
        }
        Ok(exclusions)
    }

    pub fn texts(&self) -> impl Iterator<Item = (&'static str, String)> {
        let lists = [
            (keys::EXCLUDE_OUTBOUND_PORTS, joined(&self.outbound_ports)),
            (keys::EXCLUDE_OUTBOUND_CIDRS, joined(&self.outbound_cidrs)),
            (keys::EXCLUDE_INBOUND_PORTS, joined(&self.inbound_ports)),
            (keys::EXCLUDE_INBOUND_CIDRS, joined(&self.inbound_cidrs)),
        ];
        lists.into_iter().filter(|(_, text)| !text.is_empty())
    }
}

impl From<&Exclusions> for wire::Exclusions {
    fn from(exclusions: &Exclusions) -> Self {
        let ports = |ports: &BTreeSet<NonZeroU16>| ports.iter().map(|it| it.get().into()).collect();
        let cidrs = |cidrs: &BTreeSet<Network>| cidrs.iter().map(ToString::to_string).collect();
        Self {
            outbound_ports: ports(&exclusions.outbound_ports),
            outbound_cidrs: cidrs(&exclusions.outbound_cidrs),
            inbound_ports: ports(&exclusions.inbound_ports),
            inbound_cidrs: cidrs(&exclusions.inbound_cidrs),
        }
    }
}

/// An address without host bits, and a prefix length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Network {
    address: IpAddr,
    bits: u8,
}

impl Network {
    /// Returns `None` if the prefix is longer than the address.
    pub(super) fn containing(address: IpAddr, bits: u8) -> Option<Self> {
        let address = lists::masked(address, bits)?;
        Some(Self { address, bits })
    }

    pub(super) fn single(address: IpAddr) -> Self {
        let bits = if address.is_ipv4() { 32 } else { 128 };
        Self { address, bits }
    }

    pub(super) fn contains(self, address: IpAddr) -> bool {
        address.is_ipv4() == self.address.is_ipv4()
            && Self::containing(address, self.bits) == Some(self)
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = || "is not a network like 10.0.0.0/8 or fd00::/64".to_owned();
        let (address, bits) = text.split_once('/').ok_or_else(form)?;
        let address = parse_address(address).map_err(|_| form())?;
        let bits = number(bits).ok_or_else(form)?;
        let bits = u8::try_from(bits).map_err(|_| form())?;
        let has_host_bits = match address {
            IpAddr::V4(v4) if bits <= 32 => {
                v4.to_bits().checked_shl(bits.into()).unwrap_or_default() != 0
            }
            IpAddr::V6(v6) if bits <= 128 => {
                v6.to_bits().checked_shl(bits.into()).unwrap_or_default() != 0
            }
            IpAddr::V4(_) | IpAddr::V6(_) => return Err(form()),
        };
        if has_host_bits {
            return Err(format!("has bits set after the first {bits}"));
        }
        Ok(Self { address, bits })
    }
}

impl TryFrom<String> for Network {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Network> for String {
    fn from(network: Network) -> Self {
        network.to_string()
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

/// Parses digits without a sign.
fn number(text: &str) -> Option<u16> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

fn port(text: &str) -> Result<NonZeroU16, String> {
    let port = number(text).and_then(NonZeroU16::new);
    port.ok_or_else(|| "is not a port from 1 to 65535".to_owned())
}

fn list<'a, T: Ord>(
    annotation: &'static str,
    text: impl Fn(&'static str) -> Option<&'a str>,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<BTreeSet<T>, Malformed> {
    let malformed = |why| Malformed { annotation, why };
    let entries = text(annotation).unwrap_or_default().split(',');
    let entries = entries.map(str::trim).filter(|entry| !entry.is_empty());
    let mut parsed = BTreeSet::new();
    for entry in entries {
        // Errors travel in headers of limited size.
        let excerpt: String = entry.chars().take(64).collect();
        parsed.insert(parse(entry).map_err(|why| malformed(format!("{excerpt:?} {why}")))?);
        if parsed.len() > MAX_ENTRIES {
            return Err(malformed(format!("more than {MAX_ENTRIES} entries")));
        }
    }
    Ok(parsed)
}

fn joined<T: ToString>(entries: &BTreeSet<T>) -> String {
    let entries: Vec<_> = entries.iter().map(T::to_string).collect();
    entries.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(annotation: &'static str, text: &str) -> Result<Exclusions, Malformed> {
        Exclusions::from_annotations(|name| (name == annotation).then_some(text))
    }

    #[test]
    fn lists_have_commas_between_them_and_an_order_of_their_own() {
        let ports = of(keys::EXCLUDE_OUTBOUND_PORTS, " 5432,3306 ,,5432,").unwrap();
        let texts: Vec<_> = ports.texts().collect();
        assert_eq!(
            texts,
            [(keys::EXCLUDE_OUTBOUND_PORTS, "3306,5432".to_owned())]
        );
        assert_eq!(wire::Exclusions::from(&ports).outbound_ports, [3306, 5432]);
        let cidrs = of(
            keys::EXCLUDE_INBOUND_CIDRS,
            "10.0.0.0/8, fd00:0::/64,0.0.0.0/0,192.0.2.1/32,::1/128",
        );
        assert_eq!(
            wire::Exclusions::from(&cidrs.unwrap()).inbound_cidrs,
            [
                "0.0.0.0/0",
                "10.0.0.0/8",
                "192.0.2.1/32",
                "::1/128",
                "fd00::/64"
            ]
        );
    }

    #[test]
    fn what_is_no_port_is_refused_by_the_annotations_name() {
        for bad in ["0", "65536", "+80", "-1", "http", "80 81", "80;81", "8\n0"] {
            for annotation in [keys::EXCLUDE_OUTBOUND_PORTS, keys::EXCLUDE_INBOUND_PORTS] {
                let error = of(annotation, &format!("443,{bad}")).unwrap_err();
                assert_eq!(error.annotation, annotation, "{bad}");
                assert!(error.to_string().contains(&format!("{bad:?}")), "{error}");
            }
        }
        let error = of(keys::EXCLUDE_INBOUND_PORTS, "15008").unwrap_err();
        assert_eq!(error.annotation, keys::EXCLUDE_INBOUND_PORTS);
        of(keys::EXCLUDE_OUTBOUND_PORTS, "15008").unwrap();
    }

    #[test]
    fn what_is_no_network_is_refused_by_the_annotations_name() {
        for bad in [
            "10.0.0.0",
            "10.0.0.1/8",
            "10.0.0.0/33",
            "10.0.0.0/+8",
            "10.0.0.0/",
            "fd00::1/64",
            "::/129",
            "::ffff:10.0.0.0/104",
            "shop/8",
        ] {
            for annotation in [keys::EXCLUDE_OUTBOUND_CIDRS, keys::EXCLUDE_INBOUND_CIDRS] {
                let error = of(annotation, bad).unwrap_err();
                assert_eq!(error.annotation, annotation, "{bad}");
            }
        }
    }

    #[test]
    fn a_list_has_at_most_64_entries_and_an_endless_one_is_not_repeated_whole() {
        let ports = |last: u16| {
            (1..=last)
                .map(|port| format!("{port},"))
                .collect::<String>()
        };
        of(keys::EXCLUDE_OUTBOUND_PORTS, &ports(64)).unwrap();
        of(keys::EXCLUDE_OUTBOUND_PORTS, &ports(65)).unwrap_err();
        let error = of(keys::EXCLUDE_OUTBOUND_PORTS, &"x".repeat(100_000)).unwrap_err();
        assert!(error.why.len() < 200, "{error}");
    }

    #[test]
    fn what_is_written_down_is_read_back() {
        let exclusions = Exclusions {
            outbound_ports: [NonZeroU16::new(5432).unwrap()].into(),
            inbound_cidrs: ["fd00::/64".parse().unwrap()].into(),
            ..Exclusions::default()
        };
        let text = serde_json::to_string(&exclusions).unwrap();
        assert_eq!(
            serde_json::from_str::<Exclusions>(&text).unwrap(),
            exclusions
        );
    }
}
