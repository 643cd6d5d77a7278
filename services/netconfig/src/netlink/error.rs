use std::io;

use super::MAX_DUMP_BYTES;

/// Limits the attempts while other processes keep changing what is read or written.
const ATTEMPTS: usize = 8;

/// Repeats work that met a concurrent change.
pub(crate) fn retry_on_race<T>(
    mut attempt: impl FnMut() -> Result<T, KernelError>,
) -> Result<T, KernelError> {
    for _ in 1..ATTEMPTS {
        match attempt() {
            Err(error) if error.is_race() => {}
            result => return result,
        }
    }
    attempt()
}

/// A refusal by the kernel, or the lack of an answer.
#[derive(Debug, thiserror::Error)]
#[error("cannot {act}")]
pub struct KernelError {
    act: String,
    #[source]
    source: io::Error,
}

impl KernelError {
    /// Creates an error with the text "cannot `act`".
    pub(crate) fn new(act: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self {
            act: act.into(),
            source: source.into(),
        }
    }

    pub(crate) fn no_answer(act: &str) -> Self {
        Self::new(act, nix::Error::ETIMEDOUT)
    }

    /// Creates the error for an oversized dump.
    pub(crate) fn too_large(act: &str, bytes: usize) -> Self {
        let bound = MAX_DUMP_BYTES >> 20;
        let problem = format!(
            "the answer has {} MiB, of which netconfig reads {bound}",
            bytes >> 20
        );
        Self::new(act, io::Error::new(io::ErrorKind::FileTooLarge, problem))
    }

    /// Returns whether the netns holds more objects than netconfig reads.
    pub(crate) fn is_too_large(&self) -> bool {
        self.source.kind() == io::ErrorKind::FileTooLarge
    }

    /// Creates the error for a dump of more objects than netconfig reads.
    pub(crate) fn too_many(act: &str, max: usize) -> Self {
        let problem = format!("there are more than {max}");
        Self::new(act, io::Error::new(io::ErrorKind::FileTooLarge, problem))
    }

    pub(crate) fn is(&self, errno: nix::Error) -> bool {
        self.source.raw_os_error() == io::Error::from(errno).raw_os_error()
    }

    /// Returns whether a concurrent change was the cause, so that a retry makes sense.
    pub(crate) fn is_race(&self) -> bool {
        self.is(nix::Error::ERESTART) || self.is(nix::Error::EINTR)
    }
}
