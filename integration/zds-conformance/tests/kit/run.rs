//! Runs the kit as a user does, and parses its output.
use std::{collections::BTreeMap, path::PathBuf, process::Command, thread};

use serde_json::Value;
use tempfile::TempDir;

#[track_caller]
pub(crate) fn bin(name: &str) -> String {
    let kit = PathBuf::from(env!("CARGO_BIN_EXE_zds-conformance"));
    let path = kit.with_file_name(name);
    assert!(
        path.is_file(),
        "{name} is not built: cargo build --workspace"
    );
    path.to_str().unwrap().to_owned()
}

/// The exit code, the output, and the outcome of each case.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) output: String,
    pub(crate) outcomes: BTreeMap<String, String>,
}

impl Run {
    pub(crate) fn of<S: AsRef<str>>(arguments: &[S]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let json = directory.path().join("run.json");
        let (peer, rest) = arguments.split_first().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_zds-conformance"));
        command.arg(peer.as_ref()).arg("--json").arg(&json);
        let output = command
            .args(rest.iter().map(AsRef::as_ref))
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let run: Value =
            std::fs::read(&json).map_or(Value::Null, |json| serde_json::from_slice(&json).unwrap());
        let cases = run["cases"].as_array().cloned().unwrap_or_default();
        let word = |case: &Value, field: &str| case[field].as_str().unwrap().to_owned();
        Self {
            code: output.status.code(),
            output: text(&output.stdout) + &text(&output.stderr),
            outcomes: cases
                .iter()
                .map(|case| (word(case, "name"), word(case, "outcome")))
                .collect(),
        }
    }
}

/// Returns the names of the cases that run by default.
fn default_cases(peer: &str) -> Vec<String> {
    let list = Run::of(&[peer, "--list"]).output;
    let lines = list.lines().filter(|line| !line.ends_with("(--thorough)"));
    let cases: Vec<_> = lines
        .filter_map(|line| line.split_whitespace().next())
        .map(str::to_owned)
        .collect();
    assert!(cases.len() > 40, "{list}");
    cases
}

/// Expects that all cases pass.
#[track_caller]
pub(crate) fn passes_every_case(peer: &str, run: impl Fn(&[&str]) -> Run + Sync) {
    passes(&default_cases(peer), run);
}

/// Expects that these cases pass, and runs the cases in four parts at once, because they mostly wait.
#[track_caller]
pub(crate) fn passes<S: AsRef<str> + Sync>(cases: &[S], run: impl Fn(&[&str]) -> Run + Sync) {
    let passes = |part: &[S]| {
        let options: Vec<_> = part
            .iter()
            .flat_map(|case| ["--case", case.as_ref()])
            .collect();
        let run = run(&options);
        assert_eq!(run.code, Some(0), "{}", run.output);
        let passed = run.outcomes.values().filter(|outcome| *outcome == "passed");
        assert_eq!(passed.count(), part.len(), "{}", run.output);
    };
    thread::scope(|scope| {
        for part in cases.chunks(cases.len().div_ceil(4)) {
            let passes = &passes;
            scope.spawn(move || passes(part));
        }
    });
}

pub(crate) fn ztunnel(options: &[&str], command: &[&str]) -> Run {
    let arguments = [&["ztunnel"], options, &["--"], command].concat();
    Run::of(&arguments)
}

pub(crate) fn broken_agent(options: &[&str], fault: &str) -> Run {
    let directory: TempDir = tempfile::tempdir().unwrap();
    let control = directory.path().join("control");
    let (agent, control) = (bin("broken-agent"), control.to_str().unwrap());
    let driver = format!("{agent} drive {control}");
    let driven = ["--ack-timeout", "2", "--driver", &driver];
    let command = [agent.as_str(), "serve", "{socket}", control, fault, "2000"];
    let arguments = [&["agent"], options, &driven[..], &["--"], &command[..]].concat();
    Run::of(&arguments)
}
