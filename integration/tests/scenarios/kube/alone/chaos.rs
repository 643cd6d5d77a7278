//! Pods come, go and change while everything they depend on dies, hangs and restarts, and while rules are torn out.
//! Every pod has a process and traffic, and each connection is judged: none of an enrolled pod bypasses ztunnel for
//! longer than a repair may take, and none that a promise covers is lost. In the end each pod is in the desired state
//! and nothing of ended ones is left.
//!
//! `./integration/test --full` runs it for ten minutes. `CHAOS_SECONDS` sets another time, `CHAOS_SEED` repeats an earlier
//! run's choices. Figures over time and a picture are written to `CARGO_TARGET_TMPDIR`.

mod acts;
mod figures;
mod oracle;
mod rest;
mod run;
mod subject;
mod traffic;
mod ztunnels;

use std::{
    path::Path,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use oracle::REPAIR;
use run::Chaos;

/// The longest wait between two attempts is 30 s and a half, and a wrong DEL is rejected after a minute.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(120);

/// Times matter: nothing else runs beside a run.
static ALONE: Mutex<()> = Mutex::new(());

#[expect(
    clippy::disallowed_methods,
    reason = "asks how long and with which seed"
)]
fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

// scenario: 2
#[test]
fn whatever_dies_hangs_and_changes_no_traffic_bypasses_the_mesh_and_no_promised_connection_is_lost()
{
    if !integration::is_full_run() {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let seed = setting("CHAOS_SEED").unwrap_or_else(|| fastrand::u64(..));
    let seconds = setting("CHAOS_SECONDS").unwrap_or(600);
    println!("chaos for {seconds} s with CHAOS_SEED={seed}");
    let mut chaos = Chaos::new(seed).unwrap();
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end && !chaos.is_over() {
        chaos.step().unwrap();
    }
    println!("{:?}", chaos.done);
    let settled = if chaos.is_over() {
        Ok(())
    } else {
        chaos.settle()
    };
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    chaos.figures.write(directory).unwrap();
    chaos.print_totals();
    println!(
        "chaos.csv, chaos.events and chaos.svg are in {}",
        directory.display()
    );
    if !chaos.violations.is_empty() || settled.is_err() {
        chaos.keep_logs(directory).unwrap();
    }
    assert!(
        chaos.violations.is_empty(),
        "{}",
        chaos.violations.join("\n")
    );
    settled.unwrap();
    for what in [
        "pod created",
        "pod deleted",
        "sandbox replaced",
        "label changed",
        "rules torn out",
        "service killed",
        "service hung",
    ] {
        assert!(chaos.done.contains_key(what), "{what} never happened");
    }
}

/// Without this, a run without violations would prove nothing.
#[test]
fn a_tear_that_nobody_repairs_and_a_ztunnel_that_dies_unannounced_are_violations() {
    if !integration::is_full_run() {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut chaos = Chaos::new(0).unwrap();
    let calm = |chaos: &mut Chaos| {
        for _ in 0..40 {
            chaos.pass(Duration::from_millis(100)).unwrap();
        }
        std::mem::take(&mut chaos.violations).join("\n")
    };
    assert_eq!(calm(&mut chaos), "");
    // What repairs drift in time is no violation.
    chaos
        .tear_at("resident", Some(&["nft", "flush", "ruleset"]))
        .unwrap();
    assert_eq!(calm(&mut chaos), "");

    for service in ["netconfig", "pod-events"] {
        chaos.cluster.node.signal(service, Signal::SIGSTOP).unwrap();
    }
    chaos
        .tear_at("resident", Some(&["nft", "flush", "ruleset"]))
        .unwrap();
    std::thread::sleep(REPAIR);
    let found = calm(&mut chaos);
    for what in [
        "outbound: a connection was direct",
        "inbound: a connection was direct",
        "was seen outside of capture",
    ] {
        assert!(found.contains(what), "{what}: {found}");
    }
    assert!(!found.contains(" s: witness"), "{found}");

    // Its end is not announced to the oracle.
    chaos
        .cluster
        .node
        .stop("ztunnel-1", Signal::SIGKILL)
        .unwrap();
    let found = calm(&mut chaos);
    for what in [
        "a connection failed",
        "outbound: a long connection (Captured) broke",
        "inbound: a long connection (Captured) broke",
    ] {
        assert!(found.contains(what), "{what}: {found}");
    }
}
