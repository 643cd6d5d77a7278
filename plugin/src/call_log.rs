//! The plugin's log line for a call. The agent logs every call with an answer of the agent, and finds the lines of all
//! other calls as files in `stateDir/log`, so that the agent's log has every call.

use std::{io, path::Path, process};

use serde::{Deserialize, Serialize};

use crate::directory::Directory;

pub const CALL_LOG_DIR: &str = "log";

/// Further lines have no reader, and stay in the runtime's log alone.
pub const MAX_LINES: usize = 200;

/// The longest error of a line in characters, since a runtime may pass any text.
const MAX_ERROR_CHARS: usize = 4096;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    pub level: String,
    pub message: String,
    pub time_unix_ms: u64,
    pub took_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verb: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The CNI error code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<u32>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
}

impl Line {
    /// Limits the error's length, so that the line has a few KiB at most.
    #[must_use]
    pub fn with_error(self, error: &str) -> Self {
        let error = error.chars().take(MAX_ERROR_CHARS).collect();
        Self { error, ..self }
    }

    /// Keeps the line for the agent. The state directory is not created: a node without the directory has no agent.
    ///
    /// # Errors
    ///
    /// Fails if the directory cannot be written, or has lines without a reader.
    pub fn keep(&self, state_dir: &Path) -> io::Result<()> {
        let log = Directory::open(state_dir)?.open_or_create_subdirectory(CALL_LOG_DIR)?;
        if log.has_entries(MAX_LINES)? {
            return Err(io::Error::other("no agent has read the earlier lines"));
        }
        let content = serde_json::to_vec(self)?;
        let name = format!("{:016}-{}.json", self.time_unix_ms, process::id());
        log.write_file(&name, &content)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::directory::testing::{Foreign, Obstacle};

    fn line(time_unix_ms: u64) -> Line {
        Line {
            level: "ERROR".to_owned(),
            message: "Failed the call".to_owned(),
            time_unix_ms,
            took_ms: 3,
            verb: Some("ADD".to_owned()),
            sandbox: None,
            pod: None,
            code: Some(11),
            error: String::new(),
            trace_id: None,
        }
    }

    #[test]
    fn lines_are_kept_until_nobody_reads_them() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..MAX_LINES {
            line(u64::try_from(number).unwrap())
                .keep(dir.path())
                .unwrap();
        }
        let full = line(1_000_000).keep(dir.path()).unwrap_err();
        assert!(full.to_string().contains("no agent"), "{full}");
        let log = dir.path().join(CALL_LOG_DIR);
        let files = fs::read_dir(&log).unwrap().map(|file| file.unwrap().path());
        let first = files.min().unwrap();
        let read: Line = serde_json::from_slice(&fs::read(first).unwrap()).unwrap();
        assert_eq!(read, line(0));
        assert_eq!(fs::read_dir(&log).unwrap().count(), MAX_LINES);
    }

    #[test]
    fn no_directory_is_created_for_an_agent_that_was_never_there() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("plugin");
        line(1).keep(&state_dir).unwrap_err();
        assert!(!state_dir.exists());
    }

    #[test]
    fn a_line_follows_no_symlink() {
        for obstacle in Obstacle::ALL.into_iter().filter(|it| it.is_link()) {
            let (dir, foreign) = (tempfile::tempdir().unwrap(), Foreign::new());
            foreign.put(obstacle, &dir.path().join(CALL_LOG_DIR));
            line(1).keep(dir.path()).unwrap_err();
            foreign.assert_untouched();
        }
    }

    #[test]
    fn an_error_of_any_length_leaves_a_short_line() {
        let long = "\u{1f980}".repeat(1_000_000);
        assert_eq!(line(1).with_error(&long).error.chars().count(), 4096);
    }
}
