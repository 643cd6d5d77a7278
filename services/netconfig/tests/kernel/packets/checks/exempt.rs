//! Exempt traffic, and traffic that just misses it.

use std::net::IpAddr;

use netconfig::{Family, rules::Exclusions};

use super::Checks;
use crate::packets::{
    probe::Dial,
    world::{Place, outside, pod},
};

/// The scenarios' outside ports, each excluded or not.
const OUTBOUND_PORTS: [(u16, bool); 6] = [
    (5431, false),
    (5432, true),
    (5433, false),
    (6378, false),
    (6379, true),
    (6380, false),
];
const INBOUND_PORTS: [(u16, bool); 3] = [(9089, false), (9090, true), (9091, false)];
const DESTINATIONS_V4: [(&str, bool); 7] = [
    ("10.95.255.255", false),
    ("10.96.0.0", true),
    ("10.111.255.255", true),
    ("10.112.0.0", false),
    ("192.168.7.8", false),
    ("192.168.7.9", true),
    ("192.168.7.10", false),
];
const DESTINATIONS_V6: [(&str, bool); 4] = [
    ("fd95:ffff:ffff:ffff:ffff:ffff:ffff:ffff", false),
    ("fd96::", true),
    ("fd96::f:ffff", true),
    ("fd96::10:0", false),
];
const CLIENTS_V4: [(&str, bool); 4] = [
    ("10.243.255.255", false),
    ("10.244.0.0", true),
    ("10.244.255.255", true),
    ("10.245.0.0", false),
];
const CLIENTS_V6: [(&str, bool); 3] = [("fd44::", false), ("fd44::1", true), ("fd44::2", false)];
const PROBED_PORTS: [u16; 2] = [8080, 9091];
const PROBES_V4: [(&str, bool); 3] = [
    ("169.254.7.126", false),
    ("169.254.7.127", true),
    ("169.254.7.128", false),
];
const PROBES_V6: [(&str, bool); 3] = [
    ("fd16:9254:7127:1337:ffff:ffff:ffff:fffe", false),
    ("fd16:9254:7127:1337:ffff:ffff:ffff:ffff", true),
    ("fd16:9254:7127:1338::", false),
];

impl Checks<'_> {
    pub(super) fn probes(&mut self) {
        let are_spared = !self.settings.probe_sources.is_empty();
        for (address, is_source) in by_family(self.family, &PROBES_V4, &PROBES_V6) {
            for port in PROBED_PORTS {
                let ports = self.settings.probe_ports.as_ref();
                let is_probed = ports.is_none_or(|ports| ports.iter().any(|it| it.get() == port));
                let direct = are_spared && is_source && is_probed;
                let probe = Dial::tcp(Place::Outside, pod(self.family), port).from(address);
                let wanted = self.received(&probe, direct);
                self.add(
                    &format!("inbound TCP from {address} to port {port}, as of a probe,"),
                    probe,
                    wanted,
                );
            }
            let dial = Dial::tcp(Place::Pod, address, 8080);
            let wanted = self.sent(&dial, false);
            self.add(
                &format!("outbound TCP to {address}, where probes come from,"),
                dial,
                wanted,
            );
        }
    }

    pub(super) fn exclusions(&mut self) {
        let are_set = self.settings.exclusions != Exclusions::default();
        for (port, is_excluded) in OUTBOUND_PORTS {
            let dial = Dial::tcp(Place::Pod, outside(self.family), port);
            let wanted = self.sent(&dial, are_set && is_excluded);
            self.add(&format!("outbound TCP to port {port}"), dial, wanted);
        }
        for (address, is_excluded) in by_family(self.family, &DESTINATIONS_V4, &DESTINATIONS_V6) {
            let dial = Dial::tcp(Place::Pod, address, 8080);
            let wanted = self.sent(&dial, are_set && is_excluded);
            self.add(&format!("outbound TCP to {address}"), dial, wanted);
        }
        for (port, is_excluded) in INBOUND_PORTS {
            let dial = Dial::tcp(Place::Outside, pod(self.family), port);
            let wanted = self.received(&dial, are_set && is_excluded);
            self.add(&format!("inbound TCP to port {port}"), dial, wanted);
        }
        for (address, is_excluded) in by_family(self.family, &CLIENTS_V4, &CLIENTS_V6) {
            let dial = Dial::tcp(Place::Outside, pod(self.family), 8080).from(address);
            let wanted = self.received(&dial, are_set && is_excluded);
            self.add(&format!("inbound TCP from {address}"), dial, wanted);
        }
    }
}

pub(crate) fn addresses(family: Family) -> impl Iterator<Item = IpAddr> {
    let probes = by_family(family, &PROBES_V4, &PROBES_V6);
    let destinations = by_family(family, &DESTINATIONS_V4, &DESTINATIONS_V6);
    let clients = by_family(family, &CLIENTS_V4, &CLIENTS_V6);
    probes
        .chain(destinations)
        .chain(clients)
        .map(|(address, _)| address)
}

fn by_family(
    family: Family,
    v4: &[(&str, bool)],
    v6: &[(&str, bool)],
) -> impl Iterator<Item = (IpAddr, bool)> {
    let table = match family {
        Family::V4 => v4,
        Family::V6 => v6,
    };
    let parse = |(address, is_it): &(&str, bool)| (address.parse().unwrap(), *is_it);
    table.iter().map(parse).collect::<Vec<_>>().into_iter()
}
