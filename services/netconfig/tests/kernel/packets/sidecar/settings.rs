//! Settings for tests with packets: one per option, with existing addresses and ports.

use netconfig::rules::{InboundCapture, Ipv6, Owner, Selection, Sidecar};

use crate::scenarios;

pub(super) fn all() -> Vec<(&'static str, Sidecar)> {
    [
        ("basic", basic()),
        ("tproxy", by_tproxy(basic())),
        ("rich", rich()),
        ("rich-tproxy", by_tproxy(rich())),
        ("ports", ports()),
        ("ports-tproxy", few_by_tproxy()),
        (
            "groups",
            Sidecar {
                owner_groups: Some(owners(&[1337, 2002, 2003])),
                ..names()
            },
        ),
        (
            "loopback",
            Sidecar {
                outbound_networks: some(&["127.0.0.0/8", "10.9.0.0/16", "fd09::/16", "::/8"]),
                ..basic()
            },
        ),
        (
            "wide-loopback",
            Sidecar {
                outbound_networks: some(&["127.0.0.0/8", "10.9.0.0/16", "fd09::/16", "::/8"]),
                loopback: WIDE_LOOPBACK.parse().unwrap(),
                ..basic()
            },
        ),
        (
            "servers",
            Sidecar {
                dns: some(&["10.9.0.2", "fd09::2"]),
                ..basic()
            },
        ),
    ]
    .into_iter()
    .chain(more())
    .collect()
}

fn more() -> Vec<(&'static str, Sidecar)> {
    vec![
        (
            "names-excluded",
            Sidecar {
                excluded_outbound_ports: vec![53.try_into().unwrap()],
                ..names()
            },
        ),
        (
            "nothing-out",
            Sidecar {
                outbound_networks: Selection::default(),
                ..basic()
            },
        ),
        (
            "nothing-in",
            Sidecar {
                inbound_ports: Selection::default(),
                ..basic()
            },
        ),
        (
            "machines",
            Sidecar {
                virtual_interfaces: parsed(&["vm0", "k6t-net1"]),
                ..basic()
            },
        ),
        ("ipv4", without_ipv6(names())),
        ("ipv4-tproxy", without_ipv6(by_tproxy(rich()))),
    ]
}

pub(super) fn basic() -> Sidecar {
    scenarios::sidecar::usual()
}

pub(super) fn names() -> Sidecar {
    Sidecar {
        dns: Selection::All,
        ..basic()
    }
}

pub(super) fn rich() -> Sidecar {
    Sidecar {
        proxy_users: owners(&[1337, 1338]),
        outbound_networks: some(&["10.0.0.0/8", "fd00::/8"]),
        excluded_outbound_networks: parsed(&["10.96.0.0/12", "fd96::/108"]),
        outbound_ports: list(&[6379]),
        excluded_outbound_ports: list(&[5432]),
        excluded_inbound_ports: list(&[9090, 15020]),
        excluded_interfaces: parsed(&["vm1"]),
        virtual_interfaces: parsed(&["vm0"]),
        excluded_owner_groups: owners(&[2001]),
        drop_invalid: true,
        ..names()
    }
}

fn ports() -> Sidecar {
    Sidecar {
        inbound_ports: Selection::These(list(&[8080, 9090, 15008])),
        outbound_networks: Selection::default(),
        outbound_ports: list(&[6379, 8080]),
        excluded_outbound_ports: list(&[9090]),
        ..basic()
    }
}

/// Between a single address and all of loopback.
pub(super) const WIDE_LOOPBACK: &str = "127.0.0.0/16";

/// Ports without a listener in the pod.
pub(super) const UNHEARD: [u16; 2] = [9098, 9099];

fn few_by_tproxy() -> Sidecar {
    let [first, second] = UNHEARD;
    Sidecar {
        inbound_ports: Selection::These(list(&[first, second, 15008])),
        ..by_tproxy(ports())
    }
}

pub(super) fn by_tproxy(settings: Sidecar) -> Sidecar {
    Sidecar {
        inbound_capture: InboundCapture::Tproxy,
        ..settings
    }
}

fn without_ipv6(settings: Sidecar) -> Sidecar {
    Sidecar {
        ipv6: Ipv6::Off,
        ..settings
    }
}

fn owners(numbers: &[u32]) -> Vec<Owner> {
    numbers
        .iter()
        .map(|number| Owner::new(*number).unwrap())
        .collect()
}

fn list<T: TryFrom<u16>>(numbers: &[u16]) -> Vec<T> {
    numbers
        .iter()
        .filter_map(|number| (*number).try_into().ok())
        .collect()
}

fn parsed<T: std::str::FromStr>(texts: &[&str]) -> Vec<T> {
    texts.iter().filter_map(|text| text.parse().ok()).collect()
}

fn some<T: std::str::FromStr>(texts: &[&str]) -> Selection<T> {
    Selection::These(parsed(texts))
}
