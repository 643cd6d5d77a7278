use std::{error::Error, time::Duration};

use crate::Reason;

/// Why a call failed and what helps, as it travels in the details of a gRPC status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The cause, from the closed list.
    pub reason: Reason,
    /// The field of the request, file or setting that is to blame; empty where none is.
    pub field: String,
    /// What was being attempted and what stood in the way: a sentence for people.
    pub message: String,
    /// After how long a repetition makes sense; `None` where waiting does not help.
    pub retry_after: Option<Duration>,
    /// What could not be undone after the failure.
    pub undo_failures: Vec<String>,
}

impl Failure {
    /// A failure without field, wait or undo trouble.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            field: String::new(),
            message: message.into(),
            retry_after: None,
            undo_failures: Vec::new(),
        }
    }

    /// The same, blamed on a field.
    #[must_use]
    pub fn at_field(mut self, field: impl Into<String>) -> Self {
        self.field = field.into();
        self
    }

    /// The same, with a hint when to come back.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.message)?;
        if !self.field.is_empty() {
            write!(f, " (field {})", self.field)?;
        }
        write!(f, " [{}]", self.reason)
    }
}

impl Error for Failure {}

/// An error and its causes in one sentence, as far as each says something new.
pub fn with_causes(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| {
        let more = cause.to_string();
        if text.contains(&more) {
            text
        } else {
            format!("{text}: {more}")
        }
    })
}
