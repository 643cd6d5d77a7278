//! Named sidecar redirections: each of Istio's own capture scenarios, under Istio's name
//! (services/docs/facts/istio-sidecar.md, 10.2), and some for dual-stack and rules that those do not cover.

use std::str::FromStr;

use netconfig::rules::{InboundCapture, Ipv6, Owner, Selection, Sidecar};

/// Probes and metrics of Istio's agent and proxy; Istio always excludes them.
const STATUS_PORTS: [u16; 3] = [15020, 15021, 15090];

pub(crate) fn all() -> impl Iterator<Item = (&'static str, Sidecar)> {
    let by_istio_cni = by_istio_cni().into_iter();
    by_istio_cni
        .chain(inbound())
        .chain(outbound())
        .chain(owners())
        .chain(ipv6())
        .chain(richest())
}

pub(crate) fn usual() -> Sidecar {
    Sidecar {
        proxy_users: owners_of(&[1337]),
        proxy_groups: owners_of(&[1337]),
        inbound_ports: Selection::All,
        excluded_inbound_ports: list(&STATUS_PORTS),
        outbound_networks: Selection::All,
        ..Sidecar::default()
    }
}

/// From Istio's `cni/pkg/plugin/testdata` directory.
fn by_istio_cni() -> [(&'static str, Sidecar); 8] {
    let with_users = |users: &[u32]| Sidecar {
        proxy_users: owners_of(users),
        proxy_groups: owners_of(users),
        ..usual()
    };
    [
        ("basic", usual()),
        ("custom-uid", with_users(&[1111])),
        ("custom-uid-tproxy", by_tproxy(with_users(&[1111]))),
        ("dns", all_names(usual())),
        (
            "include-exclude-ip",
            Sidecar {
                outbound_networks: some(&["127.0.0.0/8"]),
                excluded_outbound_networks: parsed(&["10.0.0.0/8"]),
                ..usual()
            },
        ),
        (
            "include-exclude-ports",
            Sidecar {
                inbound_ports: Selection::These(list(&[1111, 2222])),
                excluded_inbound_ports: list(&[3333, 15020, 15021, 15090]),
                outbound_ports: list(&[4444]),
                excluded_outbound_ports: list(&[5555]),
                outbound_networks: Selection::default(),
                ..usual()
            },
        ),
        ("invalid-drop", invalid_drop(usual())),
        ("tproxy", by_tproxy(usual())),
    ]
}

/// From `tools/istio-iptables/pkg/capture/testdata`, as the following.
fn inbound() -> [(&'static str, Sidecar); 9] {
    let ports = |ports: &[u16]| Sidecar {
        inbound_ports: Selection::These(list(ports)),
        excluded_inbound_ports: Vec::new(),
        ..bare()
    };
    let wildcard = Sidecar {
        inbound_ports: Selection::All,
        ..bare()
    };
    let four_tens = ports(&[4000, 5000]);
    [
        ("empty", bare()),
        ("drop-invalid", invalid_drop(bare())),
        ("basic-exclude-nic", excluded_nic(wildcard.clone())),
        ("inbound-ports-include", ports(&[32000, 31000])),
        ("inbound-ports-tproxy", by_tproxy(ports(&[32000, 31000]))),
        ("inbound-ports-empty-tproxy", by_tproxy(bare())),
        ("inbound-ports-wildcard", wildcard.clone()),
        ("inbound-ports-wildcard-tproxy", by_tproxy(wildcard)),
        (
            "tproxy-everything",
            Sidecar {
                outbound_networks: some(&["10.0.0.0/8", "fd00::/8"]),
                ..two_servers(by_tproxy(four_tens))
            },
        ),
    ]
}

fn outbound() -> [(&'static str, Sidecar); 8] {
    let networks = |networks: &[&str]| Sidecar {
        outbound_networks: some(networks),
        ..bare()
    };
    [
        ("ip-range", networks(&["1.1.0.0/16"])),
        (
            "ipnets",
            Sidecar {
                excluded_outbound_networks: parsed(&["9.9.1.0/24"]),
                ..networks(&["10.0.0.0/8", "9.9.0.0/16"])
            },
        ),
        (
            "ipnets-with-kube-virt-interfaces",
            virtual_interfaces(networks(&["10.0.0.0/8"])),
        ),
        (
            "kube-virt-interfaces",
            virtual_interfaces(Sidecar {
                outbound_networks: Selection::All,
                ..bare()
            }),
        ),
        (
            "host-ipv4-loopback-cidr",
            Sidecar {
                loopback: "127.0.0.0/8".parse().unwrap_or_default(),
                ..usual()
            },
        ),
        (
            "loopback-outbound-iprange",
            networks(&["127.1.2.3/32", "::1/128"]),
        ),
        (
            "outbound-ports-include",
            Sidecar {
                outbound_ports: list(&[32000, 31000]),
                ..bare()
            },
        ),
        (
            "outbound-excluded-nic",
            excluded_nic(networks(&["10.0.0.0/8"])),
        ),
    ]
}

fn owners() -> [(&'static str, Sidecar); 4] {
    let outbound = || Sidecar {
        outbound_networks: Selection::All,
        ..bare()
    };
    let many = Sidecar {
        proxy_users: owners_of(&[3, 4]),
        proxy_groups: owners_of(&[1, 2]),
        ..outbound()
    };
    [
        ("uid-gid", many.clone()),
        ("dns-uid-gid", two_servers(many)),
        (
            "outbound-owner-groups",
            Sidecar {
                owner_groups: Some(owners_of(&[888, 202])),
                ..outbound()
            },
        ),
        (
            "outbound-owner-groups-exclude",
            Sidecar {
                excluded_owner_groups: owners_of(&[888, 202]),
                ..outbound()
            },
        ),
    ]
}

/// Pods with IPv6, and two without.
fn ipv6() -> [(&'static str, Sidecar); 10] {
    let outbound = |networks: &[&str]| Sidecar {
        outbound_networks: some(networks),
        ..bare()
    };
    let groups = Sidecar {
        owner_groups: Some(owners_of(&[888, 202])),
        ..all_names(usual())
    };
    [
        ("ipv4-alone", without_ipv6(all_names(usual()))),
        (
            "ipv4-alone-tproxy",
            without_ipv6(invalid_drop(by_tproxy(usual()))),
        ),
        ("ipv6-dns-outbound-owner-groups", groups),
        (
            "ipv6-dns-outbound-owner-groups-exclude",
            Sidecar {
                excluded_owner_groups: owners_of(&[888, 202]),
                ..all_names(usual())
            },
        ),
        (
            "ipv6-dns-servers",
            Sidecar {
                dns: Selection::These(parsed(&["fd09::2"])),
                ..usual()
            },
        ),
        (
            "ipv6-empty-inbound-ports",
            Sidecar {
                inbound_ports: Selection::default(),
                ..usual()
            },
        ),
        (
            "ipv6-inbound-ports",
            Sidecar {
                inbound_ports: Selection::These(list(&[4000, 5000])),
                ..bare()
            },
        ),
        ("ipv6-ipnets", outbound(&["2001:db8::/32"])),
        (
            "ipv6-outbound-ports",
            Sidecar {
                outbound_ports: list(&[32000, 31000]),
                ..outbound(&["2001:db8::/32"])
            },
        ),
        (
            "ipv6-virt-interfaces",
            virtual_interfaces(outbound(&["2001:db8::/32"])),
        ),
    ]
}

fn richest() -> [(&'static str, Sidecar); 3] {
    let rich = || Sidecar {
        outbound_networks: some(&["10.0.0.0/8", "fd00::/8"]),
        excluded_outbound_networks: parsed(&["10.96.0.0/12", "fd96::/108"]),
        outbound_ports: list(&[6379]),
        excluded_outbound_ports: list(&[5432]),
        excluded_inbound_ports: list(&[9090, 15020, 15021, 15090]),
        excluded_owner_groups: owners_of(&[888]),
        proxy_users: owners_of(&[1337, 1338]),
        ..virtual_interfaces(excluded_nic(all_names(usual())))
    };
    [
        ("everything", invalid_drop(rich())),
        ("everything-tproxy", invalid_drop(by_tproxy(rich()))),
        (
            "keep-existing",
            Sidecar {
                keep_existing_connections: true,
                ..by_tproxy(rich())
            },
        ),
    ]
}

/// The defaults of the program `istio-iptables`.
fn bare() -> Sidecar {
    Sidecar {
        inbound_ports: Selection::default(),
        excluded_inbound_ports: Vec::new(),
        outbound_networks: Selection::default(),
        ..usual()
    }
}

fn by_tproxy(settings: Sidecar) -> Sidecar {
    Sidecar {
        inbound_capture: InboundCapture::Tproxy,
        ..settings
    }
}

fn all_names(settings: Sidecar) -> Sidecar {
    Sidecar {
        dns: Selection::All,
        ..settings
    }
}

fn two_servers(settings: Sidecar) -> Sidecar {
    Sidecar {
        dns: Selection::These(parsed(&["127.0.0.53", "10.9.0.2"])),
        ..settings
    }
}

fn invalid_drop(settings: Sidecar) -> Sidecar {
    Sidecar {
        drop_invalid: true,
        ..settings
    }
}

fn excluded_nic(settings: Sidecar) -> Sidecar {
    Sidecar {
        excluded_interfaces: parsed(&["not-istio-nic"]),
        ..settings
    }
}

fn virtual_interfaces(settings: Sidecar) -> Sidecar {
    Sidecar {
        virtual_interfaces: parsed(&["vm0", "k6t-net1"]),
        ..settings
    }
}

fn without_ipv6(settings: Sidecar) -> Sidecar {
    Sidecar {
        ipv6: Ipv6::Off,
        ..settings
    }
}

fn list<T: TryFrom<u16>>(numbers: &[u16]) -> Vec<T> {
    let numbers = numbers.iter().copied();
    numbers
        .filter_map(|number| number.try_into().ok())
        .collect()
}

fn owners_of(numbers: &[u32]) -> Vec<Owner> {
    numbers.iter().copied().filter_map(Owner::new).collect()
}

fn parsed<T: FromStr>(texts: &[&str]) -> Vec<T> {
    texts.iter().filter_map(|text| text.parse().ok()).collect()
}

fn some<T: FromStr>(texts: &[&str]) -> Selection<T> {
    Selection::These(parsed(texts))
}
