//! Defines cases, their results, and the checks that end a case early.

use std::io;

#[derive(Debug)]
pub struct Case<B> {
    pub name: &'static str,
    /// The checked behavior in one sentence.
    pub about: &'static str,
    /// The rules of the contract covered by the case.
    pub rules: &'static [&'static str],
    /// Runs the case on a bench of its own.
    pub run: fn(&mut B) -> Outcome,
}

/// The result of a case, or of a step in a case.
pub type Outcome<T = ()> = Result<T, Stop>;

/// The reason why a case stopped early.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stop {
    #[error("expected {expected}; seen: {seen}")]
    Failed { expected: String, seen: String },
    /// The case does not apply to this peer or run.
    #[error("{0}")]
    Skipped(String),
    /// The kit itself could not continue, which proves nothing about the peer.
    #[error("{0}")]
    Broken(String),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Broken(error.to_string())
    }
}

pub fn failed<T>(expected: impl Into<String>, seen: impl Into<String>) -> Outcome<T> {
    Err(Stop::Failed {
        expected: expected.into(),
        seen: seen.into(),
    })
}

pub fn check(holds: bool, expected: &str, seen: impl FnOnce() -> String) -> Outcome {
    if holds {
        Ok(())
    } else {
        failed(expected, seen())
    }
}

#[derive(Debug)]
pub struct Record {
    pub name: &'static str,
    pub about: &'static str,
    pub rules: &'static [&'static str],
    pub outcome: Outcome,
    /// Observations that are neither right nor wrong.
    pub notes: Vec<String>,
    pub milliseconds: u128,
}
