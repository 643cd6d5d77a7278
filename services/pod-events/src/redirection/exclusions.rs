//! A pod's exclusions from capture, parsed by the rules of `netconfig.v1.Exclusions`, so that netconfig accepts the
//! exclusions.

use std::{collections::BTreeSet, num::NonZeroU16};

use inpod_proto::netconfig::v1 as wire;
use inpod_types::{
    keys,
    lists::{self, MAX_ENTRIES},
};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{joined, malformed, numbers, texts};

/// ztunnel's port is never captured and may not be listed (`netconfig.v1.Exclusions`).
const HBONE_PORT: u16 = 15008;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Exclusions {
    pub outbound_ports: BTreeSet<NonZeroU16>,
    pub outbound_cidrs: BTreeSet<IpNet>,
    pub inbound_ports: BTreeSet<NonZeroU16>,
    pub inbound_cidrs: BTreeSet<IpNet>,
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
        let port = ("port", "comma-separated numbers from 1 to 65535");
        let cidr = (
            "network",
            "comma-separated networks like 10.0.0.0/8 or fd00::/64 without host bits",
        );
        let ports = |annotation| list(annotation, &text, lists::number, port);
        let cidrs = |annotation| list(annotation, &text, network, cidr);
        let exclusions = Self {
            outbound_ports: ports(keys::EXCLUDE_OUTBOUND_PORTS)?,
            outbound_cidrs: cidrs(keys::EXCLUDE_OUTBOUND_CIDRS)?,
            inbound_ports: ports(keys::EXCLUDE_INBOUND_PORTS)?,
            inbound_cidrs: cidrs(keys::EXCLUDE_INBOUND_CIDRS)?,
        };
        let mut inbound = exclusions.inbound_ports.iter();
        if inbound.any(|port| port.get() == HBONE_PORT) {
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
        Self {
            outbound_ports: numbers(&exclusions.outbound_ports),
            outbound_cidrs: texts(&exclusions.outbound_cidrs),
            inbound_ports: numbers(&exclusions.inbound_ports),
            inbound_cidrs: texts(&exclusions.inbound_cidrs),
        }
    }
}

/// Parses a network without host bits, as netconfig does.
fn network(text: &str) -> Option<IpNet> {
    let (address, bits) = lists::network(text)?;
    let network = IpNet::new(address, bits).ok()?;
    (network == network.trunc()).then_some(network)
}

/// Parses a list. Empty entries are left out, unlike in Istio's annotations.
fn list<'a, T: Ord>(
    annotation: &'static str,
    text: impl Fn(&'static str) -> Option<&'a str>,
    parse: impl Fn(&str) -> Option<T>,
    kind: (&'static str, &'static str),
) -> Result<BTreeSet<T>, Malformed> {
    let entries = text(annotation).unwrap_or_default().split(',');
    let entries = entries.map(str::trim).filter(|entry| !entry.is_empty());
    lists::list(entries, parse, MAX_ENTRIES, kind).map_err(malformed(annotation))
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
    fn exclusions_are_at_most_64_and_errors_quote_an_excerpt() {
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
}
