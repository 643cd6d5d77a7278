//! Defines cases, their results, and the checks that end a case early.

use std::{fmt, io};

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

/// The part of the contract to which a case belongs; the report has a verdict per profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Profile {
    /// The protocol, on a ztunnel's side: the rules Z.
    Control,
    /// The listeners of a ztunnel and the connections of pods: the rules D.
    Data,
    /// The protocol, on an agent's side: the rules A.
    Agent,
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Control => "control",
            Self::Data => "data",
            Self::Agent => "agent",
        })
    }
}

/// A case with its place in the list of cases.
#[derive(Debug)]
pub struct Listed<B: 'static> {
    pub case: &'static Case<B>,
    pub profile: Profile,
    /// The case waits for up to a minute and runs only on request.
    pub is_thorough: bool,
}

impl<B> Listed<B> {
    /// Lists the cases of a profile that run by default.
    pub fn all(
        profile: Profile,
        cases: impl IntoIterator<Item = &'static Case<B>>,
    ) -> impl Iterator<Item = Self> {
        cases.into_iter().map(move |case| Self {
            case,
            profile,
            is_thorough: false,
        })
    }
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
    pub profile: Profile,
    pub outcome: Outcome,
    /// Observations that are neither right nor wrong.
    pub notes: Vec<String>,
    pub milliseconds: u128,
}
