use std::{fmt, io};

/// The kernel refused, or did not answer.
#[derive(Debug, thiserror::Error)]
#[error("cannot {act}{}", KernelMessage(.message.as_deref()))]
pub struct KernelError {
    act: String,
    message: Option<String>,
    #[source]
    source: io::Error,
}

/// What the kernel says beside the error number.
struct KernelMessage<'a>(Option<&'a str>);

impl fmt::Display for KernelMessage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |message| write!(f, " ({message})"))
    }
}

impl KernelError {
    /// An act that failed: "cannot `act`".
    pub(crate) fn new(act: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self {
            act: act.into(),
            message: None,
            source: source.into(),
        }
    }

    /// An act that the kernel did not answer.
    pub(crate) fn no_answer(act: &str) -> Self {
        Self::new(act, nix::Error::ETIMEDOUT)
    }

    /// The same, with a sentence of the kernel's.
    pub(crate) fn with_message(mut self, message: Option<String>) -> Self {
        self.message = message;
        self
    }

    /// Whether this is the error number.
    pub(crate) fn is(&self, errno: nix::Error) -> bool {
        self.source.raw_os_error() == io::Error::from(errno).raw_os_error()
    }

    /// Whether this is an error number that only one part of the kernel has.
    pub(crate) fn is_number(&self, number: i32) -> bool {
        self.source.raw_os_error() == Some(number)
    }

    /// Whether somebody else changed the kernel's state meanwhile, so that a repetition makes sense.
    pub(crate) fn is_race(&self) -> bool {
        self.is(nix::Error::ERESTART) || self.is(nix::Error::EINTR)
    }
}
