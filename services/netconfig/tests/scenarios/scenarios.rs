//! Named redirections, at least one per setting, for golden, packet and unit tests.

pub(crate) mod sidecar;

use std::num::NonZeroU16;

use netconfig::rules::{Ambient, Exclusions, Ipv6, Redirection};

/// Both modes. Sidecar names begin with `sidecar-`.
pub(crate) fn redirections() -> impl Iterator<Item = (String, Redirection)> {
    let ambient = all().map(|(name, settings)| (name.to_owned(), Redirection::Ambient(settings)));
    let sidecar = sidecar::all().map(|(name, settings)| {
        let name = format!("sidecar-{name}");
        (name, Redirection::Sidecar(settings))
    });
    ambient.chain(sidecar)
}

pub(crate) fn all() -> impl Iterator<Item = (&'static str, Ambient)> {
    [
        ("plain", Ambient::default()),
        ("ipv4", ipv4()),
        ("dns", dns()),
        (
            "dns-ipv4",
            Ambient {
                ipv6: Ipv6::Off,
                ..dns()
            },
        ),
        ("ingress", ingress()),
        ("virtual-interfaces", virtual_interfaces()),
        (
            "ingress-virtual-interfaces",
            Ambient {
                bypass_inbound_capture: true,
                ..virtual_interfaces()
            },
        ),
        ("probes", probes()),
        ("exclusions", exclusions()),
        (
            "keep-existing",
            Ambient {
                keep_existing_connections: true,
                ..Ambient::default()
            },
        ),
        ("everything", everything()),
    ]
    .into_iter()
}

fn ipv4() -> Ambient {
    Ambient {
        ipv6: Ipv6::Off,
        ..Ambient::default()
    }
}

fn dns() -> Ambient {
    Ambient {
        dns_capture: true,
        ..Ambient::default()
    }
}

fn ingress() -> Ambient {
    Ambient {
        bypass_inbound_capture: true,
        ..Ambient::default()
    }
}

fn virtual_interfaces() -> Ambient {
    let names = ["vm0", "k6t-net1"].into_iter();
    Ambient {
        virtual_interfaces: names.filter_map(|name| name.parse().ok()).collect(),
        ..Ambient::default()
    }
}

fn probes() -> Ambient {
    let sources = ["169.254.7.127", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"].into_iter();
    Ambient {
        probe_sources: sources.filter_map(|source| source.parse().ok()).collect(),
        ..Ambient::default()
    }
}

fn exclusions() -> Ambient {
    let ports = |ports: &[u16]| {
        ports
            .iter()
            .filter_map(|port| (*port).try_into().ok())
            .collect()
    };
    let networks = |texts: &[&str]| texts.iter().filter_map(|text| text.parse().ok()).collect();
    Ambient {
        exclusions: Exclusions {
            outbound_ports: ports(&[5432, 6379]),
            outbound_cidrs: networks(&["10.96.0.0/12", "192.168.7.9/32", "fd96::/108"]),
            inbound_ports: ports(&[9090]),
            inbound_cidrs: networks(&["10.244.0.0/16", "fd44::1/128"]),
        },
        ..Ambient::default()
    }
}

fn everything() -> Ambient {
    Ambient {
        dns_capture: true,
        virtual_interfaces: virtual_interfaces().virtual_interfaces,
        exclusions: exclusions().exclusions,
        keep_existing_connections: true,
        probe_sources: probes().probe_sources,
        probe_ports: NonZeroU16::new(8080).map(|port| vec![port]),
        ..Ambient::default()
    }
}
