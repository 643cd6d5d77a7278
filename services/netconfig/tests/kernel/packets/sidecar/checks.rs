//! The promises of a sidecar's redirection, independent of its rules (services/docs/facts/istio-sidecar.md,
//! 3.4, 4 and 7.2).

mod outcome;

use std::net::IpAddr;

use netconfig::{
    Family,
    rules::{InboundCapture, Sidecar},
};

use super::{
    mesh::{APPLICATION, AT_LOOPBACK, AT_THE_POD, EVERYWHERE, returning},
    settings::UNHEARD,
};
use outcome::Outcome;

use crate::packets::{
    checks::{Check, FROM_ZTUNNEL, addresses, answer, question},
    probe::{Dial, Evidence, Owner, Step},
    stand_in::By,
    world::{INTERFACES, Place, either, guest, loopback, outside, pod},
};

/// Returns checks for a pod with addresses of these families.
pub(super) fn checks(settings: &Sidecar, families: &[Family]) -> Vec<Check> {
    all_of(Some(settings), families)
}

pub(super) fn direct(families: &[Family]) -> Vec<Check> {
    all_of(None, families)
}

fn all_of(settings: Option<&Sidecar>, families: &[Family]) -> Vec<Check> {
    let nothing = super::settings::rich();
    let mut checks = Checks {
        captures: settings.is_some(),
        settings: settings.unwrap_or(&nothing),
        family: Family::V4,
        found: Vec::new(),
    };
    for family in families {
        checks.family = *family;
        checks.out();
        checks.within();
        checks.names();
        checks.inbound();
        checks.machines();
        checks.in_a_clients_name();
    }
    checks.found
}

struct Checks<'a> {
    settings: &'a Sidecar,
    captures: bool,
    family: Family,
    found: Vec<Check>,
}

impl Checks<'_> {
    fn out(&mut self) {
        let to = outside(self.family);
        for owner in self.owners() {
            self.sent(owner, Dial::tcp(Place::Pod, to, EVERYWHERE));
        }
        for port in [5431, 5432, 5433, 6378, 6379, 6380] {
            self.sent(APPLICATION, Dial::tcp(Place::Pod, to, port));
        }
        for address in addresses(self.family).chain(more_addresses(self.family)) {
            self.sent(APPLICATION, Dial::tcp(Place::Pod, address, EVERYWHERE));
        }
        let forced = Dial::tcp(Place::Pod, elsewhere(self.family), 6379);
        self.sent(APPLICATION, forced);
        for name in INTERFACES {
            let to = guest(self.family, name);
            self.sent(APPLICATION, Dial::tcp(Place::Pod, to, EVERYWHERE));
        }
    }

    fn within(&mut self) {
        let own = pod(self.family);
        let mut loopbacks = vec![loopback(self.family)];
        if self.family == Family::V4 {
            let more = ["127.0.0.2", "127.0.0.6", "127.1.2.3"];
            loopbacks.extend(more.map(|text| text.parse::<IpAddr>().unwrap()));
        }
        for owner in self.owners() {
            let heard = [EVERYWHERE, AT_THE_POD, AT_LOOPBACK, 53, 9090, 15008, 15020];
            for port in heard.into_iter().chain(UNHEARD) {
                self.sent(owner, Dial::tcp(Place::Pod, own, port));
            }
            for to in &loopbacks {
                self.sent(owner, Dial::tcp(Place::Pod, *to, EVERYWHERE));
            }
            // `::6` exists only with the rules.
            if self.family == Family::V6 && !self.is_captured() {
                continue;
            }
            let back = returning(self.family);
            let heard = [EVERYWHERE, AT_THE_POD, AT_LOOPBACK];
            for port in heard.into_iter().chain(UNHEARD) {
                self.sent(owner, Dial::tcp(Place::Pod, own, port).from(back));
            }
        }
    }

    fn names(&mut self) {
        let server = outside(self.family);
        let (udp, tcp) = (
            Dial::udp(Place::Pod, server, 53),
            Dial::tcp(Place::Pod, server, 53),
        );
        for owner in self.owners() {
            self.sent(owner, udp.clone());
            self.sent(owner, tcp.clone());
            // Asked from one port, one after another.
            let asks = |owner: Owner| {
                let dial = udp.clone().of(owner);
                let wanted = self.wanted(owner, &dial);
                Step { dial, wanted }
            };
            if owner != APPLICATION && self.captures {
                let in_turn = [APPLICATION, owner, APPLICATION, owner].map(asks);
                let subject = format!("questions of {} and {}", of(APPLICATION), of(owner));
                self.found
                    .push(Check::new(&subject, self.family, in_turn.into()));
            }
        }
        let own = Dial::udp(Place::Pod, loopback(self.family), 53);
        self.sent(APPLICATION, own);
        for name in INTERFACES {
            let theirs = Dial::udp(Place::Pod, guest(self.family, name), 53);
            self.sent(APPLICATION, theirs);
        }
    }

    fn inbound(&mut self) {
        let mut ports = vec![EVERYWHERE, AT_THE_POD, 53, 9089, 9090, 9091];
        ports.extend([15008, 15020, 15021, 15090]);
        if self.is_captured() {
            ports.extend(
                UNHEARD
                    .into_iter()
                    .filter(|port| self.is_inbound_port(*port)),
            );
        }
        for port in ports {
            let dial = Dial::tcp(Place::Outside, pod(self.family), port);
            self.arrives("eth0", outside(self.family), dial);
        }
        // The mark has bits that are not inpod's.
        let foreign = Dial::tcp(Place::Outside, pod(self.family), EVERYWHERE);
        self.arrives("eth0", outside(self.family), foreign.marked(0xa000_0000));
    }

    /// Checks interfaces of virtual machines, others, and excluded ones.
    fn machines(&mut self) {
        for name in INTERFACES {
            let from = guest(self.family, name);
            for to in [
                outside(self.family),
                elsewhere(self.family),
                pod(self.family),
            ] {
                let dial = Dial::tcp(Place::Guest, to, EVERYWHERE).by(name);
                self.arrives(name, from, dial);
            }
            let udp = Dial::udp(Place::Guest, outside(self.family), 53).by(name);
            let wanted = question(By::Outside, 53, from);
            self.add(&format!("UDP that arrives by {name}"), udp, wanted);
        }
    }

    /// The proxy's connection has the client's source address: without replies through the proxy there is none.
    fn in_a_clients_name(&mut self) {
        if !self.is_tproxied() {
            return;
        }
        for group in [1337, 1000] {
            let owner = Owner { user: 1337, group };
            for owner in [
                owner,
                Owner {
                    user: 0,
                    group: 1337,
                },
            ] {
                for client in [
                    outside(self.family),
                    either(self.family, "192.0.2.7", "2001:db8::7"),
                ] {
                    let dial = Dial::tcp(Place::Pod, pod(self.family), EVERYWHERE)
                        .from(client)
                        .marked(FROM_ZTUNNEL)
                        .of(owner);
                    let wanted = answer(By::Application, EVERYWHERE, client, dial.to);
                    let subject = format!("TCP of {} in the name of {client}", of(owner));
                    self.add(&subject, dial, wanted);
                }
            }
        }
    }

    /// Returns the application, all owners that identify the proxy, and groups with and without capture.
    fn owners(&self) -> Vec<Owner> {
        let mut owners = vec![APPLICATION];
        let users = [1337, 1338].map(|user| Owner { user, group: 1000 });
        let groups = [1337, 2001, 2002, 2003].map(|group| Owner { user: 1000, group });
        owners.extend(users);
        owners.extend(groups);
        // The proxy's user with a captured group.
        owners.push(Owner {
            user: 1337,
            group: 2002,
        });
        owners
    }

    fn sent(&mut self, owner: Owner, dial: Dial) {
        let wanted = self.wanted(owner, &dial);
        let transport = dial.transport;
        let from = dial
            .from
            .map_or_else(String::new, |from| format!(" from {from}"));
        let subject = format!("{transport:?} of {}{from} to {}", of(owner), dial.to);
        self.add(&subject, dial.of(owner), wanted);
    }

    fn arrives(&mut self, by: &'static str, from: IpAddr, dial: Dial) {
        let named = |names: &[netconfig::rules::InterfaceName]| {
            names.iter().any(|name| name.as_str() == by)
        };
        let settings = self.settings;
        let is_own = dial.to.ip() == pod(self.family);
        let is_machines = named(&settings.virtual_interfaces);
        let outcome = if !self.is_captured() {
            Outcome::Direct
        } else if is_machines && self.is_of_networks(dial.to.ip()) {
            Outcome::Outbound
        } else if is_machines || named(&settings.excluded_interfaces) {
            Outcome::Direct
        } else if self.is_inbound_port(dial.to.port()) {
            Outcome::Inbound
        } else {
            Outcome::Direct
        };
        let port = dial.to.port();
        if outcome == Outcome::Direct && !is_own && self.is_tproxied() {
            // As with Istio, TPROXY diverts replies to this pod: nothing is forwarded.
            return;
        }
        let wanted = match outcome {
            Outcome::Direct if is_own => answer(By::Application, port, from, dial.to),
            Outcome::Direct => answer(By::Outside, port, from, dial.to),
            Outcome::Outbound => answer(By::Ztunnel(15001), 15001, from, dial.to),
            Outcome::Inbound | Outcome::Names => {
                let by_tproxy = settings.inbound_capture == InboundCapture::Tproxy;
                let on = if by_tproxy { port } else { 15006 };
                answer(By::Ztunnel(15006), on, from, dial.to)
            }
        };
        let marked = if dial.mark == 0 {
            ""
        } else {
            ", marked by others,"
        };
        let subject = format!("TCP that arrives by {by} for {}{marked}", dial.to);
        self.add(&subject, dial, wanted);
    }

    fn add(&mut self, subject: &str, dial: Dial, wanted: Evidence) {
        let steps = vec![Step { dial, wanted }];
        self.found.push(Check::new(subject, self.family, steps));
    }
}

/// Captured only if all networks are.
fn elsewhere(family: Family) -> IpAddr {
    either(family, "203.0.113.9", "2001:db8::9")
}

/// Returns addresses in addition to ambient mode's; the second is in the network of `::1`.
pub(crate) fn more_addresses(family: Family) -> Vec<IpAddr> {
    let beside_loopback = (family == Family::V6).then(|| "64:ff9b::9".parse().unwrap());
    [elsewhere(family)]
        .into_iter()
        .chain(beside_loopback)
        .collect()
}

fn of(owner: Owner) -> String {
    format!("user {} and group {}", owner.user, owner.group)
}
