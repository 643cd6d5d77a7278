//! Checks that each fault of a broken peer is caught by the case for the fault; in `peers.rs` a peer without the fault
//! passes the case. The tests need root, or `integration/isolate` before `cargo test`.

use std::{
    collections::BTreeSet,
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use crate::run::{Run, bin, broken_agent, ztunnel};
use crate::table::{OF_A_ZTUNNEL, OF_AN_AGENT, Row};

/// The number of concurrent runs, which mostly wait.
const WORKERS: usize = 4;

/// Runs the case for each fault, and returns the faults that no case has caught.
fn missed(table: &[Row], run: impl Fn(&[&str], &str) -> Run + Sync) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut missed = Vec::new();
        while let Some((fault, case, evidence)) = table.get(next.fetch_add(1, Ordering::Relaxed)) {
            let run = run(&["--patience", "2", "--storm", "20", "--case", case], fault);
            let caught = run
                .outcomes
                .get(*case)
                .is_some_and(|outcome| outcome == "failed");
            if !caught || run.code != Some(1) || !run.output.contains(evidence) {
                missed.push(format!(
                    "{fault}: {case} did not fail with \"{evidence}\"\n{}",
                    run.output
                ));
            }
        }
        missed
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().unwrap())
            .collect()
    })
}

#[test]
fn each_fault_of_a_ztunnel_is_caught_by_its_case() {
    let broken = bin("broken-ztunnel");
    let missed = missed(OF_A_ZTUNNEL, |options, fault| {
        ztunnel(options, &[&broken, "{socket}", fault])
    });
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn each_fault_of_an_agent_is_caught_by_its_case() {
    let missed = missed(OF_AN_AGENT, broken_agent);
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn each_fault_that_a_broken_peer_has_is_in_the_table() {
    for (peer, table) in [
        ("broken-ztunnel", OF_A_ZTUNNEL),
        ("broken-agent", OF_AN_AGENT),
    ] {
        let help = Command::new(bin(peer)).output().unwrap();
        let help = String::from_utf8(help.stderr).unwrap();
        let faults = help.rsplit_once("  none\n").unwrap().1.split_whitespace();
        let tried: BTreeSet<_> = table.iter().map(|(fault, ..)| *fault).collect();
        assert_eq!(tried, faults.collect(), "{peer}");
    }
}

#[test]
fn each_case_catches_a_fault() {
    for (peer, table) in [("ztunnel", OF_A_ZTUNNEL), ("agent", OF_AN_AGENT)] {
        let list = Run::of(&[peer, "--list"]).output;
        let cases = list
            .lines()
            .filter_map(|line| line.split_whitespace().next());
        let tried: BTreeSet<_> = table.iter().map(|(_, case, _)| *case).collect();
        assert_eq!(tried, cases.collect(), "{peer}");
    }
}
