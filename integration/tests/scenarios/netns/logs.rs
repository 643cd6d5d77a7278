//! The log of the agent: calls of the plugin that the agent has not answered.

use std::fs;

use anyhow::ensure;
use integration::{Call, Node, Spec, TIMEOUT, eventually};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// Returns the lines of pod-events that have a text.
fn lines_with(node: &Node, text: &str) -> Vec<String> {
    let log = node.tail("pod-events", 10_000);
    let lines = log.lines().filter(|line| line.contains(text));
    lines.map(str::to_owned).collect()
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
