//! What a case is, and how it ends.

use std::io;

/// One check of the contract.
#[derive(Debug)]
pub struct Case<B> {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it shows, in one sentence.
    pub about: &'static str,
    /// The rules of the contract that it proves.
    pub rules: &'static [&'static str],
    /// Runs it on a bench of its own.
    pub run: fn(&mut B) -> Outcome,
}

/// How a case ends.
pub type Outcome<T = ()> = Result<T, Stop>;

/// Why a case did not come to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stop {
    /// The peer broke the contract.
    #[error("expected {expected}; seen: {seen}")]
    Failed {
        /// What the contract says.
        expected: String,
        /// What was there instead.
        seen: String,
    },
    /// It does not apply here.
    #[error("{0}")]
    Skipped(String),
    /// The kit itself could not go on.
    #[error("{0}")]
    Broken(String),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Broken(error.to_string())
    }
}

/// A failure with its evidence.
pub fn failed<T>(expected: impl Into<String>, seen: impl Into<String>) -> Outcome<T> {
    Err(Stop::Failed {
        expected: expected.into(),
        seen: seen.into(),
    })
}

/// Goes on if what the contract says is so.
///
/// # Errors
///
/// A failure otherwise.
pub fn check(holds: bool, expected: &str, seen: impl FnOnce() -> String) -> Outcome {
    if holds {
        Ok(())
    } else {
        failed(expected, seen())
    }
}

/// What became of one case.
#[derive(Debug)]
pub struct Record {
    /// Its name.
    pub name: &'static str,
    /// Its sentence.
    pub about: &'static str,
    /// Its rules.
    pub rules: &'static [&'static str],
    /// How it ended.
    pub outcome: Outcome,
    /// What it saw that is neither right nor wrong.
    pub notes: Vec<String>,
    /// How long it took, in milliseconds.
    pub milliseconds: u128,
}
