//! The error of an operation, and its conversion to the failure that a caller receives.

mod probes;

use std::{error::Error, fmt, io};

use inpod_types::{Failure, InvalidIdentifier, Reason, with_causes};
use nix::errno::Errno;

use crate::netns_session::ReachError;
pub use crate::{inspect::InspectError, netlink::KernelError};
pub use probes::ProbeSetError;

/// The error of an operation, with the reason and the field for the caller.
#[derive(Debug)]
pub struct Failed {
    pub reason: Reason,
    /// The invalid field of the request, or an empty text.
    pub field: &'static str,
    /// The steps that could not be undone, or the rules left in the kernel.
    pub undo_failures: Vec<String>,
    /// The causes keep their types, because an errno can change the reason, and because some callers retry by cause.
    cause: anyhow::Error,
}

impl Failed {
    pub(crate) fn new(reason: Reason, cause: impl Into<anyhow::Error>) -> Self {
        Self {
            reason,
            field: "",
            undo_failures: Vec::new(),
            cause: cause.into(),
        }
    }

    pub(crate) fn at_field(self, field: &'static str) -> Self {
        Self { field, ..self }
    }

    pub(crate) fn context(self, attempt: impl fmt::Display + Send + Sync + 'static) -> Self {
        Self {
            cause: self.cause.context(attempt),
            ..self
        }
    }

    pub(crate) fn with_undo_failures(mut self, failures: Vec<String>) -> Self {
        self.undo_failures.extend(failures);
        self
    }

    /// Returns the cause of a type, also behind contexts.
    pub(crate) fn cause<E: Error + Send + Sync + 'static>(&self) -> Option<&E> {
        self.cause.downcast_ref()
    }
}

/// Formats the error with its causes.
impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&with_causes(self.cause.as_ref()))
    }
}

/// An error for which the kernel or the node is to blame, and not the request.
pub trait KernelCause: Error + Send + Sync + 'static {}

impl KernelCause for KernelError {}
impl KernelCause for ReachError {}
impl KernelCause for InspectError {}
impl KernelCause for ProbeSetError {}

impl<E: KernelCause> From<E> for Failed {
    fn from(cause: E) -> Self {
        Self::new(Reason::KernelRefused, cause)
    }
}

/// Identifiers of requests are parsed at the edge, so an identifier that is invalid here is a bug.
impl From<InvalidIdentifier> for Failed {
    fn from(cause: InvalidIdentifier) -> Self {
        Self::new(Reason::Internal, cause)
    }
}

impl From<Failed> for Failure {
    /// Without a free file descriptor nothing is wrong with the request or the kernel, so the caller may retry.
    fn from(failed: Failed) -> Self {
        let message = failed.to_string();
        let reason = if failed.cause.chain().any(lacks_descriptors) {
            Reason::Overloaded
        } else if failed.cause.chain().any(is_too_large) {
            Reason::RulesUnreadable
        } else {
            failed.reason
        };
        Self {
            undo_failures: failed.undo_failures,
            ..Self::new(reason, message).at_field(failed.field)
        }
    }
}

type Cause = dyn Error + 'static;

/// Returns whether this process (EMFILE) or the node (ENFILE) has too many open files.
fn lacks_descriptors(cause: &Cause) -> bool {
    let of_io = || cause.downcast_ref::<io::Error>()?.raw_os_error();
    let errno = cause.downcast_ref().copied();
    let errno = errno.or_else(|| of_io().map(Errno::from_raw));
    matches!(errno, Some(Errno::EMFILE | Errno::ENFILE))
}

fn is_too_large(cause: &Cause) -> bool {
    cause.downcast_ref().is_some_and(KernelError::is_too_large)
}

pub(crate) trait Context<T> {
    /// Prepends the attempted operation to the text of an error.
    fn context(self, attempt: &'static str) -> Result<T, Failed>;
}

impl<T, E: Into<Failed>> Context<T> for Result<T, E> {
    fn context(self, attempt: &'static str) -> Result<T, Failed> {
        self.map_err(|error| error.into().context(attempt))
    }
}

/// Fails with the sentences, if there are any.
pub(crate) fn require_none<E>(
    sentences: Vec<String>,
    error: impl FnOnce(Vec<String>) -> E,
) -> Result<(), E> {
    if sentences.is_empty() {
        Ok(())
    } else {
        Err(error(sentences))
    }
}

#[cfg(test)]
mod tests {
    use inpod_linux::EnterError;

    use super::*;

    #[test]
    fn errno_behind_contexts_decides_the_reason() {
        let of_errno = |errno| InspectError::from(KernelError::new("open a socket", errno));
        for (cause, reason) in [
            (of_errno(Errno::EMFILE), Reason::Overloaded),
            (EnterError::Setns(Errno::ENFILE).into(), Reason::Overloaded),
            (
                KernelError::too_many("read the chains", 1).into(),
                Reason::RulesUnreadable,
            ),
            (of_errno(Errno::EPERM), Reason::ListenerLost),
        ] {
            let failed = Failed::new(Reason::ListenerLost, cause);
            let failed = failed.context("cannot read").context("cannot apply");
            assert!(failed.cause::<InspectError>().is_some());
            assert_eq!(Failure::from(failed).reason, reason);
        }
    }
}
