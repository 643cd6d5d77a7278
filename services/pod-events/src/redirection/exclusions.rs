//! Parses a pod's exclusions from capture.

use inpod_types::{
    keys,
    lists::{self, MAX_ENTRIES},
    parse_digits,
    redirection::Exclusions,
};

use super::{joined, malformed};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {annotation}: {why}")]
pub struct Malformed {
    pub annotation: &'static str,
    pub why: String,
}

pub(super) fn from_annotations<'a>(
    text: impl Fn(&'static str) -> Option<&'a str>,
) -> Result<Exclusions, Malformed> {
    let port = ("port", "comma-separated numbers from 1 to 65535");
    let cidr = (
        "network",
        "comma-separated networks like 10.0.0.0/8 or fd00::/64 without host bits",
    );
    let ports = |annotation| list(annotation, &text, parse_digits, port);
    let cidrs = |annotation| list(annotation, &text, |entry| entry.parse().ok(), cidr);
    let exclusions = Exclusions {
        outbound_ports: ports(keys::EXCLUDE_OUTBOUND_PORTS)?,
        outbound_cidrs: cidrs(keys::EXCLUDE_OUTBOUND_CIDRS)?,
        inbound_ports: ports(keys::EXCLUDE_INBOUND_PORTS)?,
        inbound_cidrs: cidrs(keys::EXCLUDE_INBOUND_CIDRS)?,
    };
    let exclusions = exclusions.without_hbone();
    exclusions.map_err(malformed(keys::EXCLUDE_INBOUND_PORTS))
}

/// Lists the exclusions as `(annotation, text)`.
pub fn texts(all: &Exclusions) -> impl Iterator<Item = (&'static str, String)> {
    let lists = [
        (keys::EXCLUDE_OUTBOUND_PORTS, joined(&all.outbound_ports)),
        (keys::EXCLUDE_OUTBOUND_CIDRS, joined(&all.outbound_cidrs)),
        (keys::EXCLUDE_INBOUND_PORTS, joined(&all.inbound_ports)),
        (keys::EXCLUDE_INBOUND_CIDRS, joined(&all.inbound_cidrs)),
    ];
    lists.into_iter().filter(|(_, text)| !text.is_empty())
}

/// Parses a list. Empty entries are left out, unlike in Istio's annotations.
fn list<'a, T: Ord>(
    annotation: &'static str,
    text: impl Fn(&'static str) -> Option<&'a str>,
    parse: impl Fn(&str) -> Option<T>,
    kind: (&'static str, &'static str),
) -> Result<Vec<T>, Malformed> {
    let entries = text(annotation).unwrap_or_default().split(',');
    let entries = entries.map(str::trim).filter(|entry| !entry.is_empty());
    lists::list(entries, parse, MAX_ENTRIES, kind).map_err(malformed(annotation))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(annotation: &'static str, text: &str) -> Result<Exclusions, Malformed> {
        from_annotations(|name| (name == annotation).then_some(text))
    }

    #[test]
    fn lists_are_separated_by_commas_and_sorted() {
        let ports = of(keys::EXCLUDE_OUTBOUND_PORTS, " 5432,3306 ,,5432,").unwrap();
        let cidrs = "10.0.0.0/8, fd00:0::/64,0.0.0.0/0,192.0.2.1/32,::1/128";
        let cidrs = of(keys::EXCLUDE_INBOUND_CIDRS, cidrs).unwrap();
        let sorted = "0.0.0.0/0,10.0.0.0/8,192.0.2.1/32,::1/128,fd00::/64";
        let texts: Vec<_> = [ports, cidrs].iter().flat_map(texts).collect();
        assert_eq!(
            texts,
            [
                (keys::EXCLUDE_OUTBOUND_PORTS, "3306,5432".to_owned()),
                (keys::EXCLUDE_INBOUND_CIDRS, sorted.to_owned())
            ]
        );
    }

    #[test]
    fn malformed_entries_are_refused_by_annotation() {
        let ports = [keys::EXCLUDE_OUTBOUND_PORTS, keys::EXCLUDE_INBOUND_PORTS];
        let cidrs = [keys::EXCLUDE_OUTBOUND_CIDRS, keys::EXCLUDE_INBOUND_CIDRS];
        let bad_ports = &["0", "65536", "+80", "80 81", "8\n0"][..];
        for (annotations, bad) in [(ports, bad_ports), (cidrs, &["10.0.0.1/8", "shop/8"])] {
            for (annotation, bad) in itertools::iproduct!(annotations, bad) {
                let error = of(annotation, bad).unwrap_err();
                assert_eq!(error.annotation, annotation, "{bad}");
                assert!(error.to_string().contains(&format!("{bad:?}")), "{error}");
            }
        }
        let error = of(keys::EXCLUDE_INBOUND_PORTS, "15008").unwrap_err();
        assert_eq!(error.annotation, keys::EXCLUDE_INBOUND_PORTS);
        of(keys::EXCLUDE_OUTBOUND_PORTS, "15008").unwrap();
    }
}
