//! A driver that is a program.
//!
//! | called as | has to |
//! |---|---|
//! | `DRIVER begin` | return when the agent takes calls |
//! | `DRIVER seed` | tell the agent its whole set; standard input has a line per workload, the words of `add` |
//! | `DRIVER add UID NAMESPACE NAME SERVICE_ACCOUNT NETNS` | return when a ztunnel serves it, with 0, or with another code |
//! | `DRIVER remove UID` | return when it is out of the agent's set |
//!
//! `NETNS` is a path that can be opened while the call runs and until the workload is removed; `-` is a netns that the
//! agent is not to know (only in `seed`). The words of a failure go to standard error. A call that takes longer than it
//! may is killed; how long that is, in seconds, is in `ZDS_DRIVER_SECONDS`.

use std::{
    io::{Read as _, Write as _},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::driver::{Driver, Refusal, Workload};

/// How long a call may take that waits for no ztunnel.
const CALL: Duration = Duration::from_secs(10);

/// Between two looks.
const LOOK: Duration = Duration::from_millis(5);

/// See the module.
#[derive(Debug)]
pub struct Exec {
    words: Vec<String>,
}

impl Exec {
    /// The program and its first arguments, separated by spaces.
    pub fn new(command: &str) -> Self {
        let words = command.split_whitespace().map(str::to_owned).collect();
        Self { words }
    }

    fn call(&self, arguments: &[&str], input: &str, within: Duration) -> Result<(), Refusal> {
        let text = |error: std::io::Error| format!("the driver: {error}");
        let (program, first) = self.words.split_first().ok_or("the driver has no name")?;
        let mut child = Command::new(program)
            .args(first)
            .args(arguments)
            .env("ZDS_DRIVER_SECONDS", within.as_secs_f64().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(text)?;
        if let Some(mut stdin) = child.stdin.take() {
            // One that does not read its input is told by its outcome.
            drop(stdin.write_all(input.as_bytes()));
        }
        // It answers within its time; a little more is for its own start and end.
        await_end(child, Instant::now() + within + Duration::from_secs(1))
    }
}

fn await_end(mut child: Child, until: Instant) -> Result<(), Refusal> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(words(&mut child, &status.to_string())),
            Err(error) => return Err(format!("the driver: {error}")),
            Ok(None) if Instant::now() < until => thread::sleep(LOOK),
            Ok(None) => {
                drop(child.kill());
                drop(child.wait());
                return Err("the driver took too long".to_owned());
            }
        }
    }
}

fn words(child: &mut Child, status: &str) -> Refusal {
    let mut text = String::new();
    if let Some(stderr) = &mut child.stderr {
        drop(stderr.take(4096).read_to_string(&mut text));
    }
    format!("{status}: {}", text.trim())
}

fn arguments(workload: &Workload) -> Vec<String> {
    let path = workload
        .netns
        .as_ref()
        .map(|netns| netns.path.to_string_lossy().into_owned());
    vec![
        workload.uid.clone(),
        workload.namespace.clone(),
        workload.name.clone(),
        workload.service_account.clone(),
        path.unwrap_or_else(|| "-".to_owned()),
    ]
}

impl Driver for Exec {
    fn begin(&self, within: Duration) -> Result<(), Refusal> {
        self.call(&["begin"], "", within)
    }

    fn seed(&self, all: &[Workload]) -> Result<(), Refusal> {
        let lines = all
            .iter()
            .map(|workload| arguments(workload).join(" ") + "\n");
        self.call(&["seed"], &lines.collect::<String>(), CALL)
    }

    fn add(&self, workload: &Workload, within: Duration) -> Result<(), Refusal> {
        let words = arguments(workload);
        let mut all = vec!["add"];
        all.extend(words.iter().map(String::as_str));
        self.call(&all, "", within)
    }

    fn remove(&self, uid: &str) -> Result<(), Refusal> {
        self.call(&["remove", uid], "", CALL)
    }

    fn can_withhold_netns(&self) -> bool {
        true
    }
}
