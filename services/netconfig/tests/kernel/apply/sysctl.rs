//! The sysctl that migrates connections between listeners.

use netconfig::apply::Phase;

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
