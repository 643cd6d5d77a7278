//! Checks that correct peers pass every case: the broken agent without a fault, the reference ztunnel, and the broker.
//! The tests need root, or `integration/isolate` before `cargo test`, and a built workspace.

use crate::run::{Run, bin, broken_agent, passes_every_case, ztunnel};

#[test]
fn the_broken_agent_without_a_fault_passes() {
    passes_every_case("agent", |cases| {
        broken_agent(&[cases, &["--storm", "50"]].concat(), "none")
    });
}

#[test]
fn the_reference_ztunnel_passes() {
    let command = [&*bin("reference-ztunnel")];
    passes_every_case("ztunnel", |cases| {
        ztunnel(&[cases, &["--storm", "200"]].concat(), &command)
    });
}

#[test]
fn the_broker_passes() {
    let broker = bin("ztunnel-broker");
    passes_every_case("agent", |cases| {
        let directory = tempfile::tempdir().unwrap();
        let run_dir = directory.path().to_str().unwrap();
        let options = ["--storm", "50", "--ack-timeout", "2", "--inpod", run_dir];
        // The kit runs outside of pods, so the broker must accept a peer by its user id.
        let settings = [
            ["--run-dir", run_dir],
            ["--zds-socket", "{socket}"],
            ["--peer", "uid"],
            ["--ztunnel-peer", "uid"],
            ["--ack-timeout-seconds", "2"],
            ["--log-level", "warn"],
            ["--log-format", "text"],
        ];
        let command = [&["--", broker.as_str()], settings.as_flattened()].concat();
        Run::of(&[&["agent"], cases, &options, &command[..]].concat())
    });
}

#[test]
fn what_cannot_be_run_is_said_in_one_line_with_code_2() {
    let table: [(&[&str], &str); 5] = [
        (&["ztunnel"], "needs the ztunnel's command"),
        (
            &["ztunnel", "--case", "nonsense", "--", "true"],
            "there is no case nonsense",
        ),
        (
            &["agent", "--", "true"],
            "needs --inpod DIR or --driver PROGRAM",
        ),
        (&["agent", "--driver", "true"], "needs --socket PATH"),
        (
            &["ztunnel", "--case", "hello-first", "--", "/nonexistent"],
            "cannot run /nonexistent",
        ),
    ];
    for (arguments, text) in table {
        let run = Run::of(arguments);
        assert_eq!(run.code, Some(2), "{}", run.output);
        assert!(run.output.contains(text), "{}", run.output);
    }
}

#[test]
fn the_cases_are_listed_with_their_rules() {
    for (peer, case, profile) in [
        ("ztunnel", "hello-first", "control"),
        ("ztunnel", "del-ends-connections", "data"),
        ("agent", "live-add", "agent"),
    ] {
        let run = Run::of(&[peer, "--list"]);
        assert_eq!(run.code, Some(0), "{}", run.output);
        let line = run.output.lines().find(|line| line.starts_with(case));
        let line = line.unwrap();
        assert!(line.contains(profile) && line.contains('['), "{line}");
    }
}
