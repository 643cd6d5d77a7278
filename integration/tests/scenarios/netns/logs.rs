//! The log of the agent: calls of the plugin that the agent has not answered, and levels that change while it runs.

use std::{fs, process::Command};

use anyhow::ensure;
use integration::{Call, Node, Spec, TIMEOUT, bin, eventually};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// Returns the lines of pod-events that have a text.
fn lines_with(node: &Node, text: &str) -> Vec<String> {
    let log = node.tail("pod-events", 10_000);
    let lines = log.lines().filter(|line| line.contains(text));
    lines.map(str::to_owned).collect()
}

/// Runs the client; returns its exit code and everything that it printed, separated by single spaces.
fn inpod(node: &Node, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(bin("inpod").unwrap());
    command.arg("--run-dir").arg(node.run_dir()).args(arguments);
    let output = command.output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed);
    let words: Vec<_> = printed.split_whitespace().collect();
    (output.status.code(), words.join(" "))
}

#[test]
fn calls_that_the_agent_missed_are_in_its_log_later() {
    let node = Node::running().unwrap();
    let answered = node.pod(Spec::new("answered").ambient()).unwrap();
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    let waiting = node.sandbox(Spec::new("waiting").ambient()).unwrap();
    let outcome = node.call(Call::add, &waiting).run().unwrap();
    assert_eq!(outcome.error().unwrap().get("code"), Some(&json!(11)));
    let line: Value = serde_json::from_str(&outcome.stderr).unwrap();
    node.start("pod-events").unwrap();
    let found = eventually("the agent logs the call", TIMEOUT, || {
        let mut found = lines_with(&node, "A call of the plugin");
        ensure!(found.len() == 1, "{found:?}");
        anyhow::Ok(found.remove(0))
    })
    .unwrap();
    for field in ["verb", "pod", "sandbox", "code", "trace_id", "error"] {
        let expected = format!("{field}={}", line.get(field).unwrap());
        assert!(found.contains(&expected), "{expected}: {found}");
    }
    let outcome = format!("outcome={}", line.get("message").unwrap());
    assert!(found.contains(&outcome), "{found}");
    // The agent's own line has the call that it answered.
    let name = &answered.spec.name;
    assert!(!lines_with(&node, "Enrolled").is_empty(), "{name}");
    let kept = fs::read_dir(node.state_dir().join("log")).unwrap();
    assert_eq!(kept.count(), 0);
}

#[test]
fn scope_is_logged_at_another_level_until_its_time_ends() {
    let node = Node::running().unwrap();
    node.stop("pod-events", Signal::SIGTERM).unwrap();
    let settings = ["--peer", "uid", "--log-level", "info"];
    node.start_with("pod-events", &settings).unwrap();
    node.ready().unwrap();
    let set = |level: &str| {
        let arguments = ["log-level", "pod-events", level, "--scope", "inpod_service"];
        inpod(&node, &arguments)
    };
    // The harness starts services at the level debug.
    let began = lines_with(&node, "Answered").len();
    let answered = || lines_with(&node, "Answered").len() - began;
    inpod(&node, &["status"]);
    assert_eq!(answered(), 0);
    let (code, printed) = set("debug");
    assert_eq!(code, Some(0), "{printed}");
    let rows = ["pod-events * info", "pod-events inpod_service debug"];
    for row in rows {
        assert!(printed.contains(row), "{row}: {printed}");
    }
    // No installer runs on this node; the others are listed all the same.
    let (code, printed) = inpod(&node, &["log-level"]);
    assert_eq!(code, Some(3), "{printed}");
    for text in [
        rows[1],
        "netconfig ",
        "ztunnel-broker ",
        "cannot reach installer",
    ] {
        assert!(printed.contains(text), "{text}: {printed}");
    }
    let logged = eventually("calls are logged", TIMEOUT, || {
        let (_, printed) = inpod(&node, &["status"]);
        ensure!(answered() > 0, "{printed}");
        anyhow::Ok(answered())
    })
    .unwrap();
    assert!(logged > 0);
    set("default");
    let ended = "A scope is logged at the default level again";
    eventually("the end is logged", TIMEOUT, || {
        ensure!(!lines_with(&node, ended).is_empty(), "no line");
        anyhow::Ok(())
    })
    .unwrap();
    let before = answered();
    inpod(&node, &["status"]);
    node.pod(Spec::new("later").ambient()).unwrap();
    assert_eq!(answered(), before);
    // An operator's call is logged whatever its scope.
    assert!(!lines_with(&node, "An operator calls").is_empty());
    let (code, printed) = set("error");
    assert_eq!(code, Some(1), "{printed}");
    assert!(printed.contains("field level"), "{printed}");
}
