//! Runs the binary, and reads its access log and state file.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use crate::agent::Agent;
use crate::network::{Netns, eventually};

/// A running ztunnel, which is killed at the end of the test.
pub(crate) struct Ztunnel {
    pub(crate) process: Child,
    directory: TempDir,
}

impl Ztunnel {
    pub(crate) fn start(options: &[&str]) -> (Self, Agent) {
        let directory = tempfile::tempdir().expect("tempdir");
        let agent = Agent::listen(&directory.path().join("zds.sock"));
        (Self::spawn(directory, options), agent)
    }

    pub(crate) fn spawn(directory: TempDir, options: &[&str]) -> Self {
        let path = |name| directory.path().join(name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_reference-ztunnel"));
        command
            .arg("--uds")
            .arg(path("zds.sock"))
            .arg("--access-log")
            .arg(path("access.log"))
            .arg("--status")
            .arg(path("state.json"))
            .args(options)
            .env("RUST_LOG", "error");
        // A netns of its own protects the machine's netns from the ztunnel.
        let process = Netns::new().within(|| command.spawn()).expect("spawn");
        Self { process, directory }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn state(&self) -> Value {
        let text = fs::read(self.path("state.json")).expect("a state file");
        serde_json::from_slice(&text).expect("JSON")
    }

    pub(crate) fn pods(&self) -> Vec<(String, String)> {
        let text = |pod: &Value, field: &str| pod[field].as_str().expect(field).to_owned();
        let state = self.state();
        let pods = state["pods"].as_array().expect("pods").iter();
        pods.map(|pod| (text(pod, "uid"), text(pod, "state")))
            .collect()
    }

    pub(crate) fn ready(&self) -> bool {
        self.state()["ready"] == true
    }

    pub(crate) fn awaits_line(&self, wanted: impl Fn(&Value) -> bool) -> Value {
        eventually("a line of the access log", || {
            let text = fs::read_to_string(self.path("access.log")).ok()?;
            let mut lines = text
                .lines()
                .filter_map(|line| serde_json::from_str(line).ok());
            lines.find(|line| wanted(line))
        })
    }

    pub(crate) fn terminate(&self) {
        let pid = Pid::from_raw(self.process.id().try_into().expect("a pid"));
        kill(pid, Signal::SIGTERM).expect("kill");
    }

    pub(crate) fn awaits_exit(&mut self) -> ExitStatus {
        eventually("the exit", || self.process.try_wait().expect("wait"))
    }

    pub(crate) fn runs(&mut self) -> bool {
        self.process.try_wait().expect("wait").is_none()
    }
}

impl Drop for Ztunnel {
    fn drop(&mut self) {
        // The kill may fail, because many tests expect the ztunnel to have exited.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}
