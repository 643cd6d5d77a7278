//! A driver that calls an external program for every change.
//!
//! | Called as | Must |
//! |---|---|
//! | `DRIVER begin` | return when the agent accepts calls |
//! | `DRIVER seed` | send the agent its whole set; standard input has a line per workload, the arguments of `add` |
//! | `DRIVER add UID NAMESPACE NAME SERVICE_ACCOUNT NETNS` | exit with 0 when a ztunnel serves it, or with another code |
//! | `DRIVER remove UID` | return when it is no longer in the agent's set |
//!
//! `NETNS` can be opened during the call and until the workload is removed; `-` stands for a netns unknown to the agent
//! (only in `seed`). The driver writes errors to standard error, and is killed when a call exceeds its limit,
//! `ZDS_DRIVER_SECONDS`.

use std::{
    io::{Read as _, Write as _},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::driver::{Driver, Refusal, Workload};

/// The time limit of a call that waits for no ztunnel.
const CALL: Duration = Duration::from_secs(10);

const POLL_INTERVAL: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub struct Exec {
    command: Vec<String>,
}

impl Exec {
    /// Returns a driver for a program and its first arguments, separated by spaces.
    pub fn new(command: &str) -> Self {
        let command = command.split_whitespace().map(str::to_owned).collect();
        Self { command }
    }

    fn call(&self, arguments: &[&str], input: &str, within: Duration) -> Result<(), Refusal> {
        let text = |error: std::io::Error| format!("the driver: {error}");
        let (program, first) = self.command.split_first().ok_or("the driver has no name")?;
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
            // A failed write is ignored, because a program without interest in its input shows an error by its exit
            // status.
            drop(stdin.write_all(input.as_bytes()));
        }
        // The extra second allows for the start and the end of the program.
        await_end(child, Instant::now() + within + Duration::from_secs(1))
    }
}

fn await_end(mut child: Child, until: Instant) -> Result<(), Refusal> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(failure(&mut child, &status.to_string())),
            Err(error) => return Err(format!("the driver: {error}")),
            Ok(None) if Instant::now() < until => thread::sleep(POLL_INTERVAL),
            Ok(None) => {
                drop(child.kill());
                drop(child.wait());
                return Err("the driver took too long".to_owned());
            }
        }
    }
}

fn failure(child: &mut Child, status: &str) -> Refusal {
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
        let arguments = arguments(workload);
        let mut all = vec!["add"];
        all.extend(arguments.iter().map(String::as_str));
        self.call(&all, "", within)
    }

    fn remove(&self, uid: &str) -> Result<(), Refusal> {
        self.call(&["remove", uid], "", CALL)
    }

    fn can_withhold_netns(&self) -> bool {
        true
    }
}
