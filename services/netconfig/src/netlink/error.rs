use std::{fmt, io};

/// The kernel refused a request, or did not answer.
#[derive(Debug, thiserror::Error)]
#[error("cannot {act}{}", KernelMessage(.message.as_deref()))]
pub struct KernelError {
    act: String,
    message: Option<String>,
    #[source]
    source: io::Error,
}

/// Displays the kernel's message, if it sent one.
struct KernelMessage<'a>(Option<&'a str>);

impl fmt::Display for KernelMessage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |message| write!(f, " ({message})"))
    }
}

impl KernelError {
    /// Creates an error with the text "cannot `act`".
    pub(crate) fn new(act: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self {
            act: act.into(),
            message: None,
            source: source.into(),
        }
    }

    /// Creates an error for a missing response.
    pub(crate) fn no_answer(act: &str) -> Self {
        Self::new(act, nix::Error::ETIMEDOUT)
    }

    /// Adds the kernel's message.
    pub(crate) fn with_message(mut self, message: Option<String>) -> Self {
        self.message = message;
        self
    }

    /// Returns whether the error has this number.
    pub(crate) fn is(&self, errno: nix::Error) -> bool {
        self.source.raw_os_error() == io::Error::from(errno).raw_os_error()
    }

    /// Returns whether the error has this number, which may be specific to one subsystem.
    pub(crate) fn is_number(&self, number: i32) -> bool {
        self.source.raw_os_error() == Some(number)
    }

    /// Returns whether a concurrent change caused the error, so that a retry makes sense.
    pub(crate) fn is_race(&self) -> bool {
        self.is(nix::Error::ERESTART) || self.is(nix::Error::EINTR)
    }
}
