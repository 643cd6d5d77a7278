//! Maps errors to the [`Failure`] that a caller receives.

use std::io;

use inpod_linux::OpenError;
use inpod_types::{Failure, Reason, with_causes};
use nix::errno::Errno;

use super::{
    ApplyError, ClaimError, ClearError, FindError, KernelError, ListenerError, RemoveError,
    VerifyError,
};

pub(crate) trait IntoFailure: std::error::Error + Sized + 'static {
    fn reason(&self) -> Reason;

    /// Returns the invalid field of the request, if any.
    fn field(&self) -> &'static str {
        ""
    }

    /// Returns the steps that could not be undone, or the rules left in the kernel.
    fn undo_failures(&self) -> &[String] {
        &[]
    }

    /// Builds the failure, with the chain of causes as its message. Without a free file descriptor nothing is wrong with
    /// the request or the kernel, so the caller may retry.
    fn into_failure(self) -> Failure {
        let reason = if has_cause(&self, lacks_descriptors) {
            Reason::Overloaded
        } else if has_cause(&self, is_too_large) {
            Reason::RulesUnreadable
        } else {
            self.reason()
        };
        Failure {
            undo_failures: self.undo_failures().to_vec(),
            ..Failure::new(reason, with_causes(&self)).at_field(self.field())
        }
    }
}

type Cause = dyn std::error::Error + 'static;

fn has_cause(error: &Cause, is_wanted: fn(&Cause) -> bool) -> bool {
    std::iter::successors(Some(error), |error| error.source()).any(is_wanted)
}

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

impl IntoFailure for ApplyError {
    fn reason(&self) -> Reason {
        match self {
            Self::Reach(_)
            | Self::Inspect(_)
            | Self::Kernel { .. }
            | Self::ProbeSet { .. }
            | Self::Differs { .. } => Reason::KernelRefused,
            Self::NoIpv6(_) => Reason::Ipv6Unavailable,
            Self::Blocked(_) => Reason::RoutingTaken,
            Self::Listeners(ListenerError::Missing(_)) => Reason::ListenerLost,
            Self::Listeners(ListenerError::Taken(_)) => Reason::ListenerTaken,
            Self::Listeners(ListenerError::Kernel(_)) => Reason::KernelRefused,
        }
    }

    fn undo_failures(&self) -> &[String] {
        match self {
            Self::Reach(_)
            | Self::NoIpv6(_)
            | Self::Inspect(_)
            | Self::Blocked(_)
            | Self::Listeners(_) => &[],
            Self::Kernel { undo_failures, .. }
            | Self::Differs { undo_failures, .. }
            | Self::ProbeSet { undo_failures, .. } => undo_failures,
        }
    }
}

impl IntoFailure for VerifyError {
    fn reason(&self) -> Reason {
        match self {
            Self::Reach(_) | Self::Kernel(_) => Reason::KernelRefused,
            Self::NoIpv6(_) => Reason::Ipv6Unavailable,
        }
    }
}

impl IntoFailure for RemoveError {
    fn reason(&self) -> Reason {
        match self {
            Self::Reach(_)
            | Self::Inspect(_)
            | Self::Kernel(_)
            | Self::ProbeSet(_)
            | Self::Left(_) => Reason::KernelRefused,
            Self::Drain(error) => error.reason(),
        }
    }

    fn undo_failures(&self) -> &[String] {
        match self {
            Self::Left(left) => left,
            Self::Drain(error) => error.undo_failures(),
            Self::Reach(_) | Self::Inspect(_) | Self::Kernel(_) | Self::ProbeSet(_) => &[],
        }
    }
}

impl IntoFailure for ClearError {
    fn reason(&self) -> Reason {
        match self {
            Self::Held(_) => Reason::NetnsInUse,
            Self::ProbeSet(_) => Reason::KernelRefused,
        }
    }
}

impl IntoFailure for ClaimError {
    fn reason(&self) -> Reason {
        match self {
            Self::Open(error) => reason_of_open(error),
            Self::Unreachable(_) => Reason::NetnsUnreachable,
            Self::Inspect(_) => Reason::KernelRefused,
            Self::HostNetns(_) => Reason::NetnsIsHost,
            Self::Mismatch { .. } | Self::Held { .. } => Reason::NetnsMismatch,
            Self::InUse { .. } => Reason::NetnsInUse,
            Self::Address { .. } => Reason::AddressMismatch,
            Self::Unknown(_) => Reason::ClaimUnknown,
        }
    }

    fn field(&self) -> &'static str {
        match self {
            Self::Open(_) | Self::Unreachable(_) => "netns.path",
            Self::Address { .. } => "addresses",
            Self::HostNetns(_) | Self::Mismatch { .. } | Self::Held { .. } | Self::InUse { .. } => {
                "netns"
            }
            Self::Unknown(_) => "sandbox",
            Self::Inspect(_) => "",
        }
    }
}

impl IntoFailure for FindError {
    fn reason(&self) -> Reason {
        match self {
            Self::List(_) => Reason::KernelRefused,
            Self::Nowhere { .. } | Self::Ambiguous { .. } => Reason::NetnsNotFound,
            Self::Claim(error) => error.reason(),
            Self::Name(_) => Reason::Internal,
            Self::Rules(error) => error.reason(),
        }
    }
}

fn reason_of_open(error: &OpenError) -> Reason {
    match error {
        OpenError::NotPlain(_) | OpenError::OutsideRoots { .. } | OpenError::Symlink(_) => {
            Reason::NetnsPathRefused
        }
        OpenError::Missing(_) => Reason::NetnsMissing,
        OpenError::NotANamespace(_) | OpenError::NotNet(_) => Reason::NetnsNotANetns,
        OpenError::Io { .. } | OpenError::Enter { .. } | OpenError::Cookie(_) => {
            Reason::KernelRefused
        }
    }
}
