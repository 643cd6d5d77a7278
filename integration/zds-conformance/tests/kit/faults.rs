//! Checks that each fault of a peer is caught by the case for the fault; in `peers.rs` a peer without the fault
//! passes the case. The tests need root, or `integration/isolate` before `cargo test`.

use std::{
    collections::BTreeSet,
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use crate::run::{Run, bin, broken_agent, passes, ztunnel};
use crate::table::{OF_A_ZTUNNEL, OF_AN_AGENT, Row, THOROUGH_OF_A_ZTUNNEL};

/// The number of concurrent runs, which mostly wait.
const WORKERS: usize = 5;

/// A fault of the reference ztunnel that no case may catch.
const HARMLESS: &str = "hello-with-unknown-field";

/// A fault that only agents have to survive: a ztunnel may refuse every Add.
const FOR_AGENTS: &str = "nack-adds";

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

fn faulty_ztunnel(options: &[&str], fault: &str) -> Run {
    ztunnel(options, &[&bin("reference-ztunnel"), "--fault", fault])
}

#[test]
fn each_fault_of_a_ztunnel_is_caught_by_its_case() {
    let missed = missed(OF_A_ZTUNNEL, faulty_ztunnel);
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

/// Takes a minute, the length of the longest case, because all runs are concurrent.
#[test]
fn each_fault_in_time_is_caught_by_its_thorough_case() {
    let reference = bin("reference-ztunnel");
    let cases: BTreeSet<_> = THOROUGH_OF_A_ZTUNNEL.iter().map(|row| row.1).collect();
    let missed = thread::scope(|scope| {
        for case in cases {
            let peer = [reference.as_str()];
            scope.spawn(move || passes(&[case], |options| ztunnel(options, &peer)));
        }
        missed(THOROUGH_OF_A_ZTUNNEL, faulty_ztunnel)
    });
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn a_hello_with_an_unknown_field_is_accepted() {
    passes(&["hello-first"], |options| {
        faulty_ztunnel(options, HARMLESS)
    });
}

#[test]
fn each_fault_of_an_agent_is_caught_by_its_case() {
    let missed = missed(OF_AN_AGENT, broken_agent);
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

/// Returns the rows of a peer's tables.
fn rows(tables: &[&'static [Row]]) -> impl Iterator<Item = &'static Row> {
    tables.iter().copied().flatten()
}

#[test]
fn each_fault_that_a_ztunnel_has_is_in_the_table() {
    let tables = [OF_A_ZTUNNEL, THOROUGH_OF_A_ZTUNNEL];
    let tried = rows(&tables).map(|row| row.0);
    let tried: BTreeSet<_> = tried.chain([HARMLESS, FOR_AGENTS]).collect();
    let help = Command::new(bin("reference-ztunnel"))
        .arg("--help")
        .output();
    let help = String::from_utf8(help.unwrap().stdout).unwrap();
    let faults = help.split_once("Answer N ms late\n").unwrap().1;
    let faults = faults.lines().filter_map(|line| line.split_once(": "));
    let faults = faults.map(|(name, _)| name.trim());
    assert_eq!(tried, faults.collect());
}

#[test]
fn each_fault_that_the_broken_agent_has_is_in_the_table() {
    let tried: BTreeSet<_> = OF_AN_AGENT.iter().map(|row| row.0).collect();
    let help = Command::new(bin("broken-agent")).output().unwrap();
    let help = String::from_utf8(help.stderr).unwrap();
    let faults = help.rsplit_once("  none\n").unwrap().1.split_whitespace();
    assert_eq!(tried, faults.collect());
}

#[test]
fn each_case_catches_a_fault() {
    let of_a_ztunnel = [OF_A_ZTUNNEL, THOROUGH_OF_A_ZTUNNEL];
    for (peer, tables) in [("ztunnel", &of_a_ztunnel[..]), ("agent", &[OF_AN_AGENT])] {
        let list = Run::of(&[peer, "--list"]).output;
        let cases = list
            .lines()
            .filter_map(|line| line.split_whitespace().next());
        let tried: BTreeSet<_> = rows(tables).map(|row| row.1).collect();
        assert_eq!(tried, cases.collect(), "{peer}");
    }
}
