//! Observations of Istio's own rules (services/docs/facts/istio-sidecar.md, 7.2) hold with ours.

use std::{io::ErrorKind, net::IpAddr};

use netconfig::Family;

use super::{
    mesh::{APPLICATION, AT_LOOPBACK, AT_THE_POD, EVERYWHERE, Mesh, PROXY, returning},
    process::Role,
    settings,
};
use crate::packets::{
    checks::{Check, answer, question},
    matrix::{run_all, run_all_once},
    probe::{Dial, Evidence, Owner, Step, Transport},
    stand_in::By,
    world::{Place, Pod, loopback, outside, pod},
};

/// The observations with their expected arrivals.
pub(super) fn observed(families: &[Family], by_tproxy: bool) -> Vec<Check> {
    let mut rows = Rows {
        family: Family::V4,
        found: Vec::new(),
    };
    for family in families {
        rows.family = *family;
        rows.of_both();
        rows.of_proxy();
        rows.of_proxys_own_address();
        rows.of_others(by_tproxy);
    }
    rows.found
}

struct Rows {
    family: Family,
    found: Vec<Check>,
}

impl Rows {
    fn add(&mut self, what: &str, dial: Dial, by: By, on: u16, peer: IpAddr) {
        let wanted = match dial.transport {
            Transport::Tcp => answer(by, on, peer, dial.to),
            Transport::Udp => question(by, on, peer),
        };
        self.push(what, dial, wanted);
    }

    fn push(&mut self, what: &str, dial: Dial, wanted: Evidence) {
        let steps = vec![Step { dial, wanted }];
        self.found.push(Check::new(what, self.family, steps));
    }

    fn of_both(&mut self) {
        let (pod, loopback) = (pod(self.family), loopback(self.family));
        let by = By::Application;
        for owner in [APPLICATION, PROXY] {
            let of = format!("TCP of user {}", owner.user);
            let to = dial(owner, loopback, AT_LOOPBACK);
            self.add(&format!("{of} to loopback"), to, by, AT_LOOPBACK, loopback);
            let hbone = dial(owner, pod, 15008);
            self.add(&format!("{of} to 15008"), hbone, by, 15008, pod);
        }
        let itself = dial(APPLICATION, pod, EVERYWHERE);
        let what = "TCP of the application to the pod's address";
        self.add(what, itself, by, EVERYWHERE, pod);
        let out = dial(APPLICATION, outside(self.family), EVERYWHERE);
        let by = By::Ztunnel(15001);
        self.add("TCP of the application", out, by, 15001, pod);
    }

    fn of_proxy(&mut self) {
        let pod = pod(self.family);
        let direct = dial(PROXY, outside(self.family), EVERYWHERE);
        self.add("TCP of the proxy", direct, By::Outside, EVERYWHERE, pod);
        let by = By::Ztunnel(15006);
        let itself = dial(PROXY, pod, EVERYWHERE);
        let what = "TCP of the proxy to the pod's address";
        self.add(what, itself, by, 15006, pod);
        // As Istio's validation does; nothing listens there.
        let loopback = loopback(self.family);
        let validation = dial(PROXY, returning(self.family), 15002).from(loopback);
        let what = "TCP of the proxy to its own address";
        self.add(what, validation, by, 15006, loopback);
    }

    fn of_proxys_own_address(&mut self) {
        let own = returning(self.family);
        let from = |to, port| dial(PROXY, to, port).from(own);
        let pod = pod(self.family);
        for port in [EVERYWHERE, AT_THE_POD] {
            let what = format!("TCP of the proxy from its own address to {port}");
            self.add(&what, from(pod, port), By::Application, port, own);
        }
        let what = "TCP of the proxy from its own address to loopback";
        let to = from(loopback(self.family), AT_LOOPBACK);
        self.add(what, to, By::Application, AT_LOOPBACK, own);
        self.push(
            "TCP of the proxy from its own address to who listens on loopback alone",
            from(pod, AT_LOOPBACK),
            Evidence::Refused(ErrorKind::ConnectionRefused),
        );
    }

    fn of_others(&mut self, by_tproxy: bool) {
        let (pod, outside) = (pod(self.family), outside(self.family));
        let inbound = Dial::tcp(Place::Outside, pod, EVERYWHERE);
        let on = if by_tproxy { EVERYWHERE } else { 15006 };
        self.add("TCP that arrives", inbound, By::Ztunnel(15006), on, outside);
        let probe = Dial::tcp(Place::Outside, pod, 15020);
        let what = "TCP that arrives for 15020";
        self.add(what, probe, By::Application, 15020, outside);
        let asks = |owner| Dial::udp(Place::Pod, outside, 53).of(owner);
        let (what, by) = ("a question of the application", By::Ztunnel(15053));
        self.add(what, asks(APPLICATION), by, 15053, pod);
        self.add("a question of the proxy", asks(PROXY), By::Outside, 53, pod);
    }
}

fn dial(owner: Owner, to: IpAddr, port: u16) -> Dial {
    Dial::tcp(Place::Pod, to, port).of(owner)
}

#[test]
fn what_was_observed_of_istios_rules_holds_row_by_row() {
    let mesh = Mesh::new(Pod::Dual, PROXY, Role::Answers);
    let checks = observed(mesh.world.families(), false);
    assert_ne!(run_all_once(&mesh.world, &checks), [""; 0], "without rules");
    mesh.apply(&settings::names());
    assert_eq!(run_all(&mesh.world, &checks), [""; 0]);
}
