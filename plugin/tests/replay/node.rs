//! A node as the plugin sees it.

use std::{
    fs,
    io::Write as _,
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use inpod_cni::spool::Entry;
use serde_json::Value;
use tempfile::TempDir;

use crate::recorded::Recorded;

/// More than any of the plugin's deadlines in these tests.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) struct Node {
    dir: TempDir,
    keys: String,
}

#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
}

impl Node {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("netns"), "").unwrap();
        Self {
            dir,
            keys: String::new(),
        }
    }

    pub(crate) fn with(mut self, keys: &str) -> Self {
        self.keys = format!("{keys},");
        self
    }

    pub(crate) fn with_state(self, file: &str, content: &str) -> Self {
        fs::create_dir_all(self.state_dir()).unwrap();
        fs::write(self.state_dir().join(file), content).unwrap();
        self
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("grpc.sock")
    }

    pub(crate) fn netns(&self) -> PathBuf {
        self.dir.path().join("netns")
    }

    pub(crate) fn state_dir(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    pub(crate) fn spooled(&self) -> Vec<Entry> {
        let Ok(files) = fs::read_dir(self.state_dir().join("spool")) else {
            return Vec::new();
        };
        let mut paths: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        paths.sort();
        let read = |path: PathBuf| serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        paths.into_iter().map(read).collect()
    }

    /// Returns the recorded stdin with this node's paths.
    pub(crate) fn stdin(&self, call: &Recorded) -> String {
        let ours = format!(
            "{{{}\"agentSocket\":{:?},\"stateDir\":{:?},",
            self.keys,
            self.socket(),
            self.state_dir()
        );
        call.stdin.replacen('{', &ours, 1)
    }

    pub(crate) fn run(&self, call: &Recorded) -> Run {
        self.run_with(call, self.stdin(call).as_bytes())
    }

    pub(crate) fn run_with(&self, call: &Recorded, stdin: &[u8]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_inpod-cni"));
        command.env_clear().envs(&call.env);
        if call.var("CNI_NETNS").starts_with("/") && !call.var("CNI_NETNS").starts_with("/proc") {
            command.env("CNI_NETNS", self.netns());
        }
        let began = Instant::now();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The plugin may exit without reading it all.
        let _unread = child.stdin.take().unwrap().write_all(stdin);
        let output = child.wait_with_output().unwrap();
        Run {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
            took: began.elapsed(),
        }
    }
}

impl Run {
    /// Asserts that the run failed and printed nothing but the error object.
    pub(crate) fn error(&self) -> Value {
        assert_eq!(self.code, Some(1), "{self:?}");
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn error_code(&self) -> u64 {
        self.error()["code"].as_u64().unwrap()
    }

    /// Asserts success and exactly this output.
    pub(crate) fn printed(&self, stdout: &str) {
        assert_eq!(
            (self.code, self.stdout.as_str()),
            (Some(0), stdout),
            "{}",
            self.stderr
        );
    }

    pub(crate) fn log(&self) -> Value {
        serde_json::from_str(&self.stderr).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}
