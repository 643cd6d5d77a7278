use std::{error::Error, time::Duration};

use crate::Reason;

/// The failure of a call, as transported in the details of a gRPC status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The reason, taken from the closed list.
    pub reason: Reason,
    /// The invalid field of the request, file or setting, or an empty text.
    pub field: String,
    /// A description of the attempt and of the error.
    pub message: String,
    /// The delay after which a retry is useful, or `None` if waiting does not help.
    pub retry_after: Option<Duration>,
    /// The steps that could not be rolled back, each described by a text.
    pub undo_failures: Vec<String>,
}

impl Failure {
    /// Creates a failure with a reason and a message, without further details.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            field: String::new(),
            message: message.into(),
            retry_after: None,
            undo_failures: Vec::new(),
        }
    }

    /// Sets the invalid field of the request, file or setting.
    #[must_use]
    pub fn at_field(mut self, field: impl Into<String>) -> Self {
        self.field = field.into();
        self
    }

    /// Sets the delay after which a retry is useful.
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

/// Formats an error and its causes as one sentence, without repetitions.
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
