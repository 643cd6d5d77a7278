use std::{fmt, io, path::PathBuf, time::Duration};

use super::Variant;

#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    #[error("{} cannot be used: {} missing", .variant, .programs.join(", "))]
    Missing {
        variant: Variant,
        programs: Vec<String>,
    },
    /// Not started, or its output was unreadable.
    #[error("cannot run {program}")]
    Spawn { program: String, source: io::Error },
    #[error("{program} did not end within {after:?}")]
    TimedOut { program: String, after: Duration },
    /// Another process holds a lock of the netns.
    #[error("another process holds {lock}")]
    Locked { lock: String },
    #[error("cannot lock {}", .path.display())]
    Lock { path: PathBuf, source: io::Error },
    #[error("{program} refused{} ({status}): {message}", At(.line.as_deref()))]
    Refused {
        program: String,
        status: String,
        /// Input line that the program names, if any.
        line: Option<String>,
        /// First lines of the error output.
        message: String,
    },
    /// The program refused a rule that matches socket owners, or the end of its table.
    #[error(
        "iptables cannot match socket owners in this netns, as in a pod with its own user namespace: {0}"
    )]
    OwnerMatchRefused(Box<Self>),
    /// Refused, and the rules have changed since they were read.
    #[error("the rules were changed concurrently: {0}")]
    ConcurrentChange(Box<Self>),
    /// The output is not a list of rules.
    #[error("cannot read what {program} printed{}", At(.line.as_deref()))]
    Unreadable {
        program: String,
        /// `None` if the end is missing.
        line: Option<String>,
    },
}

impl ProgramError {
    /// Returns whether a concurrent change was the cause: a retry from the current state makes sense.
    pub(crate) fn is_race(&self) -> bool {
        match self {
            Self::ConcurrentChange(_) => true,
            Self::Missing { .. }
            | Self::Spawn { .. }
            | Self::TimedOut { .. }
            | Self::Locked { .. }
            | Self::Lock { .. }
            | Self::Refused { .. }
            | Self::OwnerMatchRefused(_)
            | Self::Unreadable { .. } => false,
        }
    }
}

struct At<'a>(Option<&'a str>);

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |line| write!(f, " at `{line}`"))
    }
}
