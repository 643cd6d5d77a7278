//! The sysctls that migrate connections between listeners, and that reserve ztunnel's ports.

use netconfig::{
    apply::Phase,
    rules::{Ambient, Redirection, Sidecar},
};

use crate::apply::is_reported_and_repaired;
use crate::support::{Fresh, ambient, plain, sandbox};

fn migrates(fresh: &Fresh) -> String {
    fresh.command("sysctl", &["-n", "net.ipv4.tcp_migrate_req"])
}

#[test]
fn waiting_connections_migrate_while_a_pod_is_enrolled_and_the_sysctl_is_restored() {
    let fresh = Fresh::new();
    assert_eq!(migrates(&fresh), "0\n");
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    assert_eq!(migrates(&fresh), "1\n");
    // The sysctl's record outlives its tag.
    for phase in [Phase::Drain, Phase::Final] {
        assert_eq!(migrates(&fresh), "1\n");
        plain().remove(&fresh.netns, &sandbox("c1"), phase).unwrap();
    }
    assert_eq!(migrates(&fresh), "0\n");
}

#[test]
fn a_sysctl_that_was_on_stays_on_and_one_that_is_switched_back_is_told_and_mended() {
    let fresh = Fresh::new();
    fresh.command("sysctl", &["-q", "net.ipv4.tcp_migrate_req=1"]);
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    plain()
        .remove(&fresh.netns, &sandbox("c1"), Phase::Final)
        .unwrap();
    assert_eq!(migrates(&fresh), "1\n");
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    fresh.command("sysctl", &["-q", "net.ipv4.tcp_migrate_req=0"]);
    is_reported_and_repaired(&fresh, "net.ipv4.tcp_migrate_req is 0");
}

fn reserved(fresh: &Fresh) -> String {
    fresh.command("sysctl", &["-n", "net.ipv4.ip_local_reserved_ports"])
}

#[test]
fn ztunnels_ports_are_reserved_while_a_pod_is_enrolled() {
    for (own, all) in [
        ("", "15001,15006,15008,15053"),
        ("80,8000-8010", "80,8000-8010,15001,15006,15008,15053"),
        ("15002-15007,15053", "15001-15008,15053"),
        ("15000-15100", "15000-15100"),
    ] {
        let fresh = Fresh::new();
        let value = format!("net.ipv4.ip_local_reserved_ports={own}");
        fresh.command("sysctl", &["-q", "-w", &value]);
        // Applied again, the rules still record what was added.
        for redirection in [ambient(), dns(), ambient()] {
            plain()
                .apply(&fresh.netns, &redirection, &sandbox("c1"))
                .unwrap();
            assert_eq!(reserved(&fresh), format!("{all}\n"), "{own}");
        }
        for phase in [Phase::Drain, Phase::Final] {
            assert_eq!(reserved(&fresh), format!("{all}\n"), "{own}");
            plain().remove(&fresh.netns, &sandbox("c1"), phase).unwrap();
        }
        assert_eq!(reserved(&fresh), format!("{own}\n"));
    }
}

fn dns() -> Redirection {
    Redirection::Ambient(Ambient {
        dns_capture: true,
        ..Ambient::default()
    })
}

#[test]
fn a_sidecars_pod_keeps_its_reserved_ports() {
    let fresh = Fresh::new();
    let sidecar = Redirection::Sidecar(Sidecar::default());
    plain()
        .apply(&fresh.netns, &sidecar, &sandbox("c1"))
        .unwrap();
    assert_eq!(reserved(&fresh), "\n");
}
