use std::{fmt, io, path::PathBuf, time::Duration};

use super::Variant;

/// Why a program of iptables did not do what it was started for.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It is not on this machine.
    #[error("{} cannot be used: {} missing", .variant, .programs.join(", "))]
    Missing {
        /// Of which iptables.
        variant: Variant,
        /// What was looked for and not found.
        programs: Vec<String>,
    },
    /// It could not be started, or not be listened to.
    #[error("cannot run {program}")]
    Spawn {
        /// The program.
        program: String,
        /// The cause.
        source: io::Error,
    },
    /// It did not end in time, and was ended.
    #[error("{program} did not end within {after:?}")]
    TimedOut {
        /// The program.
        program: String,
        /// How long it was waited for.
        after: Duration,
    },
    /// Another process holds a lock of the netns.
    #[error("another process holds {lock}")]
    Locked {
        /// Which.
        lock: String,
    },
    /// A lock of the netns cannot be had at all.
    #[error("cannot lock {}", .path.display())]
    Lock {
        /// Its file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It did not do it, and said why.
    #[error("{program} refused{} ({status}): {message}", At(.line.as_deref()))]
    Refused {
        /// The program.
        program: String,
        /// How it ended.
        status: String,
        /// The line of its input that it complains of, where it names one.
        line: Option<String>,
        /// The first lines of what it said.
        message: String,
    },
    /// It did not, at a rule that asks whose socket sends a packet, or at the end of a table that has such a rule.
    #[error(
        "iptables cannot match socket owners in this netns, as in a pod with its own user namespace: {0}"
    )]
    OwnerMatchRefused(Box<Self>),
    /// The same, after somebody else had changed the rules.
    #[error("the rules were changed concurrently: {0}")]
    ConcurrentChange(Box<Self>),
    /// What it printed is no list of rules.
    #[error("cannot read what {program} printed{}", At(.line.as_deref()))]
    Unreadable {
        /// The program.
        program: String,
        /// The line; `None` where the end is missing.
        line: Option<String>,
    },
}

impl ProgramError {
    /// Whether somebody else was faster, so that a repetition from what is there by then makes sense.
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

/// The line that is meant, if one is.
struct At<'a>(Option<&'a str>);

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |line| write!(f, " at `{line}`"))
    }
}
