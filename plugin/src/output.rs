//! Outcome of a call, and the JSON document on stdout that reports it to the runtime.

use std::io::{self, Write as _};

use inpod_cni::{config::Level, error::CniError, version::SpecVersion};

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Document for stdout; empty for verbs without one.
    pub(crate) stdout: String,
    /// Level of the log line.
    pub(crate) level: Level,
    /// Message of the log line.
    pub(crate) message: &'static str,
    /// Reason, if the message does not suffice.
    pub(crate) cause: String,
}

impl Outcome {
    /// The agent has handled the call.
    pub(crate) fn done(message: &'static str) -> Self {
        Self {
            stdout: String::new(),
            level: Level::Info,
            message,
            cause: String::new(),
        }
    }

    /// The call does not concern inpod.
    pub(crate) fn skipped(message: &'static str) -> Self {
        Self {
            level: Level::Debug,
            ..Self::done(message)
        }
    }

    /// Sets the document for stdout.
    pub(crate) fn with_stdout(self, stdout: String) -> Self {
        Self { stdout, ..self }
    }

    /// Reports success despite a problem.
    pub(crate) fn with_problem(self, level: Level, cause: impl Into<String>) -> Self {
        Self {
            level,
            cause: cause.into(),
            ..self
        }
    }
}

/// Writes the reply; nothing else writes to stdout.
pub(crate) fn print(outcome: &Result<Outcome, CniError>, version: SpecVersion) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match outcome {
        Ok(outcome) => stdout.write_all(outcome.stdout.as_bytes())?,
        Err(error) => stdout.write_all(error.to_json(version).as_bytes())?,
    }
    stdout.flush()
}
