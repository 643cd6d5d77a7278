//! The promises of each redirection, stated independently of its rules: a sentence, packets to send,
//! and the expected evidence.

mod exempt;

pub(crate) use exempt::addresses;

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use netconfig::{
    Family,
    rules::{Ambient, Ipv6},
};

use crate::packets::{
    probe::{Dial, Evidence, Step, Transport},
    stand_in::{Answer, By},
    world::{INTERFACES, Place, either, guest, outside, pod},
};

/// On ztunnel's own packets, and those routed back to it.
pub(crate) const FROM_ZTUNNEL: u32 = 0x539;
const TO_ZTUNNEL: u32 = 0x111;

/// Bits that are not inpod's.
const FOREIGN_BITS: u32 = 0xa000_0000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Check {
    subject: String,
    family: Family,
    /// Sent in order from one port.
    pub(crate) steps: Vec<Step>,
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            subject,
            family,
            steps,
        } = self;
        let fates: Vec<_> = steps.iter().map(|step| outcome(&step.wanted)).collect();
        write!(f, "{family}: {subject} {}", fates.join(", then "))
    }
}

fn outcome(wanted: &Evidence) -> String {
    match wanted.by() {
        Some(By::Ztunnel(port)) => format!("is taken on {port}"),
        Some(By::Application) => "reaches the application".to_owned(),
        Some(By::Outside) => "goes out".to_owned(),
        None => "reaches nobody".to_owned(),
    }
}

impl Check {
    pub(crate) fn new(subject: &str, family: Family, steps: Vec<Step>) -> Self {
        Self {
            subject: subject.to_owned(),
            family,
            steps,
        }
    }

    pub(crate) fn connection(&self) -> Option<&Step> {
        match self.steps.as_slice() {
            [step] if step.dial.transport == Transport::Tcp && step.wanted.by().is_some() => {
                Some(step)
            }
            _ => None,
        }
    }
}

/// Returns checks for a pod with addresses of these families.
pub(crate) fn checks(settings: &Ambient, families: &[Family]) -> Vec<Check> {
    all_of(Some(settings), families)
}

/// Returns checks for a pod without rules, or with rules that only keep captured connections alive.
pub(crate) fn direct(families: &[Family]) -> Vec<Check> {
    all_of(None, families)
}

fn all_of(settings: Option<&Ambient>, families: &[Family]) -> Vec<Check> {
    let captures = settings.is_some();
    let nothing = Ambient::default();
    let settings = settings.unwrap_or(&nothing);
    let mut checks = Checks {
        settings,
        captures,
        family: Family::V4,
        found: Vec::new(),
    };
    for family in families {
        checks.family = *family;
        checks.outbound();
        checks.inbound();
        checks.itself();
        checks.names();
        checks.ztunnel();
        checks.probes();
        checks.guests();
        checks.exclusions();
    }
    checks.found
}

struct Checks<'a> {
    settings: &'a Ambient,
    captures: bool,
    family: Family,
    found: Vec<Check>,
}

impl Checks<'_> {
    fn outbound(&mut self) {
        let dial = Dial::tcp(Place::Pod, outside(self.family), 8080);
        let captured = self.sent(&dial, false);
        let direct = self.sent(&dial, true);
        for (subject, mark, wanted) in [
            ("outbound TCP", 0, &captured),
            (
                "outbound TCP with foreign bits in its mark",
                FOREIGN_BITS,
                &captured,
            ),
            (
                "outbound TCP with a mark one bit beside ztunnel's",
                FROM_ZTUNNEL ^ 1,
                &captured,
            ),
            ("outbound TCP of ztunnel", FROM_ZTUNNEL, &direct),
            (
                "outbound TCP of ztunnel with foreign bits in its mark",
                FOREIGN_BITS | FROM_ZTUNNEL,
                &direct,
            ),
        ] {
            self.add(subject, dial.clone().marked(mark), wanted.clone());
        }
        // Binding to an interface prevents that its mark alone routes it to this pod again.
        let back = dial.by("eth0");
        self.add(
            "TCP that leads back to ztunnel",
            back.clone().marked(TO_ZTUNNEL),
            direct.clone(),
        );
        let foreign = back.marked(FOREIGN_BITS | TO_ZTUNNEL);
        self.add(
            "TCP that leads back to ztunnel, with foreign bits in its mark,",
            foreign,
            direct,
        );
    }

    fn inbound(&mut self) {
        let dial = |port| Dial::tcp(Place::Outside, pod(self.family), port);
        let (plain, hbone) = (dial(8080), dial(15008));
        let wanted = self.received(&plain, false);
        self.add("inbound TCP", plain, wanted);
        let wanted = answer(By::Ztunnel(15008), 15008, outside(self.family), hbone.to);
        self.add("inbound TCP to 15008", hbone, wanted);
    }

    /// A pod's own traffic is never captured.
    fn itself(&mut self) {
        let own = pod(self.family);
        let loopbacks = match self.family {
            Family::V4 => ["127.0.0.1", "127.0.0.2"].as_slice(),
            Family::V6 => ["::1"].as_slice(),
        };
        let (dial, hbone) = (
            Dial::tcp(Place::Pod, own, 8080),
            Dial::tcp(Place::Pod, own, 15008),
        );
        let wanted = answer(By::Application, 8080, own, dial.to);
        self.add("TCP of the pod to its own address", dial, wanted);
        let wanted = answer(By::Ztunnel(15008), 15008, own, hbone.to);
        self.add("TCP of the pod to 15008 of its own address", hbone, wanted);
        for address in loopbacks {
            let address: IpAddr = address.parse().unwrap();
            let dial = Dial::tcp(Place::Pod, address, 8080);
            // Connections to 127.0.0.0/8 come from the loopback interface's first address.
            let wanted = answer(
                By::Application,
                8080,
                either(self.family, "127.0.0.1", "::1"),
                dial.to,
            );
            self.add(&format!("TCP of the pod to {address}"), dial, wanted);
        }
        let loopback = either(self.family, "127.0.0.1", "::1");
        let dial = Dial::udp(Place::Pod, loopback, 53);
        self.add(
            "a question over UDP to the pod's own resolver",
            dial,
            question(By::Application, 53, loopback),
        );
    }

    fn names(&mut self) {
        let (own, server) = (pod(self.family), outside(self.family));
        let (udp, tcp) = (
            Dial::udp(Place::Pod, server, 53),
            Dial::tcp(Place::Pod, server, 53),
        );
        let direct = question(By::Outside, 53, own);
        let taken = question(By::Ztunnel(15053), 15053, own);
        let captures_names = self.is_captured() && self.settings.dns_capture;
        let over_udp = if captures_names { &taken } else { &direct };
        self.add("a question over UDP", udp.clone(), over_udp.clone());
        let ztunnels = udp.clone().marked(FROM_ZTUNNEL);
        self.add(
            "a question of ztunnel over UDP",
            ztunnels.clone(),
            direct.clone(),
        );
        let over_tcp = if captures_names {
            answer(By::Ztunnel(15053), 15053, own, tcp.to)
        } else {
            self.sent(&tcp, false)
        };
        let direct_over_tcp = self.sent(&tcp, true);
        self.add("a question over TCP", tcp.clone(), over_tcp);
        self.add(
            "a question of ztunnel over TCP",
            tcp.marked(FROM_ZTUNNEL),
            direct_over_tcp,
        );
        if captures_names {
            let ztunnels = Step {
                dial: ztunnels,
                wanted: direct,
            };
            let applications = Step {
                dial: udp,
                wanted: taken,
            };
            let again = [applications.clone(), ztunnels.clone(), applications.clone()];
            self.push("a question of the application, then of ztunnel from the same port, then of the application", again.into());
            let again = [ztunnels.clone(), applications, ztunnels];
            self.push("a question of ztunnel, then of the application from the same port, then of ztunnel", again.into());
        }
    }

    /// ztunnel's connection to the application has the client's source address: without replies through
    /// ztunnel there is none.
    fn ztunnel(&mut self) {
        if !self.is_captured() {
            return;
        }
        for client in [
            outside(self.family),
            either(self.family, "192.0.2.7", "2001:db8::7"),
        ] {
            let dial = Dial::tcp(Place::Pod, pod(self.family), 8080)
                .from(client)
                .marked(FROM_ZTUNNEL);
            let wanted = answer(By::Application, 8080, client, dial.to);
            self.add(
                &format!("TCP of ztunnel in the name of {client}"),
                dial,
                wanted,
            );
        }
    }

    fn guests(&mut self) {
        let named: Vec<_> = self
            .settings
            .virtual_interfaces
            .iter()
            .map(|name| name.as_str())
            .collect();
        for name in INTERFACES {
            let from = guest(self.family, name);
            let tcp = Dial::tcp(Place::Guest, outside(self.family), 8080).by(name);
            let direct = answer(By::Outside, 8080, from, tcp.to);
            let wanted = if !self.is_captured() {
                direct
            } else if named.contains(&name) {
                answer(By::Ztunnel(15001), 15001, from, tcp.to)
            } else if self.settings.bypass_inbound_capture {
                direct
            } else {
                self.at_15006(&tcp, from)
            };
            self.add(&format!("TCP that arrives by {name}"), tcp, wanted);
            let udp = Dial::udp(Place::Guest, outside(self.family), 53).by(name);
            self.add(
                &format!("UDP that arrives by {name}"),
                udp,
                question(By::Outside, 53, from),
            );
        }
    }

    fn is_captured(&self) -> bool {
        self.captures && (self.family == Family::V4 || self.settings.ipv6 != Ipv6::Off)
    }

    fn sent(&self, dial: &Dial, direct: bool) -> Evidence {
        let own = pod(self.family);
        if direct || !self.is_captured() {
            answer(By::Outside, dial.to.port(), own, dial.to)
        } else {
            answer(By::Ztunnel(15001), 15001, own, dial.to)
        }
    }

    fn received(&self, dial: &Dial, direct: bool) -> Evidence {
        let client = dial.from.unwrap_or_else(|| outside(self.family));
        if direct || self.settings.bypass_inbound_capture || !self.is_captured() {
            answer(By::Application, dial.to.port(), client, dial.to)
        } else {
            self.at_15006(dial, client)
        }
    }

    fn at_15006(&self, dial: &Dial, client: IpAddr) -> Evidence {
        answer(By::Ztunnel(15006), 15006, client, dial.to)
    }

    fn add(&mut self, subject: &str, dial: Dial, wanted: Evidence) {
        self.push(subject, vec![Step { dial, wanted }]);
    }

    fn push(&mut self, subject: &str, steps: Vec<Step>) {
        self.found.push(Check::new(subject, self.family, steps));
    }
}

pub(crate) fn answer(by: By, on: u16, peer: IpAddr, destination: SocketAddr) -> Evidence {
    Evidence::Answer(Answer {
        by,
        on,
        peer,
        destination: Some(destination),
    })
}

pub(crate) fn question(by: By, on: u16, peer: IpAddr) -> Evidence {
    Evidence::Answer(Answer {
        by,
        on,
        peer,
        destination: None,
    })
}
