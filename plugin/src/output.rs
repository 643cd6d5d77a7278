//! Describes the outcome of a call, and prints the reply to the runtime.

use std::io::{self, Write as _};

use inpod_cni::{config::Level, error::CniError, version::SpecVersion};

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// The document for the runtime, or an empty text for verbs without a document.
    pub(crate) stdout: String,
    pub(crate) level: Level,
    pub(crate) message: &'static str,
    /// The reason, or an empty text if the message suffices.
    pub(crate) cause: String,
}

impl Outcome {
    /// Returns a success, logged at info: the agent has handled the call.
    pub(crate) fn done(message: &'static str) -> Self {
        Self {
            stdout: String::new(),
            level: Level::Info,
            message,
            cause: String::new(),
        }
    }

    /// Returns a success, logged at debug: the call does not concern inpod.
    pub(crate) fn skipped(message: &'static str) -> Self {
        Self {
            level: Level::Debug,
            ..Self::done(message)
        }
    }

    pub(crate) fn with_stdout(self, stdout: String) -> Self {
        Self { stdout, ..self }
    }

    /// Keeps the success, but logs the problem at the given level.
    pub(crate) fn with_problem(self, level: Level, cause: impl Into<String>) -> Self {
        Self {
            level,
            cause: cause.into(),
            ..self
        }
    }
}

/// Prints the reply to stdout; no other code writes there.
pub(crate) fn print(outcome: &Result<Outcome, CniError>, version: SpecVersion) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match outcome {
        Ok(outcome) => stdout.write_all(outcome.stdout.as_bytes())?,
        Err(error) => stdout.write_all(version.render_error(error).as_bytes())?,
    }
    stdout.flush()
}
