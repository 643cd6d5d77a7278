//! The outcome of a call, as stdout reports it to the runtime.

use std::io::{self, Write as _};

use inpod_cni::{config::Level, error::CniError, version::SpecVersion};

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Empty for verbs without a document.
    pub(crate) stdout: String,
    pub(crate) level: Level,
    pub(crate) message: &'static str,
    /// The reason, if the message does not suffice.
    pub(crate) cause: String,
}

impl Outcome {
    /// Succeeds: the agent has handled the call.
    pub(crate) fn done(message: &'static str) -> Self {
        Self {
            stdout: String::new(),
            level: Level::Info,
            message,
            cause: String::new(),
        }
    }

    /// Succeeds: the call does not concern inpod.
    pub(crate) fn skipped(message: &'static str) -> Self {
        Self {
            level: Level::Debug,
            ..Self::done(message)
        }
    }

    pub(crate) fn with_stdout(self, stdout: String) -> Self {
        Self { stdout, ..self }
    }

    /// Succeeds, but logs the problem.
    pub(crate) fn with_problem(self, level: Level, cause: impl Into<String>) -> Self {
        Self {
            level,
            cause: cause.into(),
            ..self
        }
    }
}

/// Prints to stdout, as nothing else does.
pub(crate) fn print(outcome: &Result<Outcome, CniError>, version: SpecVersion) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match outcome {
        Ok(outcome) => stdout.write_all(outcome.stdout.as_bytes())?,
        Err(error) => stdout.write_all(error.to_json(version).as_bytes())?,
    }
    stdout.flush()
}
