//! What a call comes to, and the one JSON document on stdout that tells the runtime.

use std::io::{self, Write as _};

use inpod_cni::{config::Level, error::CniError, version::SpecVersion};

/// A call that succeeded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// The document for stdout; empty for verbs that print none.
    pub(crate) stdout: String,
    /// How grave what happened is.
    pub(crate) level: Level,
    /// What happened, for the log.
    pub(crate) message: &'static str,
    /// Why, where something is to be said of it.
    pub(crate) cause: String,
}

impl Outcome {
    /// The agent did what was asked.
    pub(crate) fn done(message: &'static str) -> Self {
        Self {
            stdout: String::new(),
            level: Level::Info,
            message,
            cause: String::new(),
        }
    }

    /// The call is none of ours.
    pub(crate) fn skipped(message: &'static str) -> Self {
        Self {
            level: Level::Debug,
            ..Self::done(message)
        }
    }

    /// The same, printing a document.
    pub(crate) fn with_stdout(self, stdout: String) -> Self {
        Self { stdout, ..self }
    }

    /// The same, though something went wrong.
    pub(crate) fn with_problem(self, level: Level, cause: impl Into<String>) -> Self {
        Self {
            level,
            cause: cause.into(),
            ..self
        }
    }
}

/// Writes the runtime's document: the only writer to stdout.
pub(crate) fn print(outcome: &Result<Outcome, CniError>, version: SpecVersion) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match outcome {
        Ok(outcome) => stdout.write_all(outcome.stdout.as_bytes())?,
        Err(error) => stdout.write_all(error.to_json(version).as_bytes())?,
    }
    stdout.flush()
}
