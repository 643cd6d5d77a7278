//! Errors of the RPCs, and their conversion to gRPC failures.

use std::time::Duration;

use inpod_proto::Invalid;
use inpod_types::{Failure, Reason, with_causes};
use tonic::Status;

use crate::{descriptors::FetchError, desired::ChangeError, outcome::Unserved};

/// A stock ztunnel waits at most 15 s between two attempts to connect.
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(15);

/// The request is for another run of the broker.
#[derive(Debug, thiserror::Error)]
#[error("this run of the broker is {instance_id}, not the one in the request")]
pub struct InstanceMismatch {
    pub instance_id: String,
}

#[derive(Debug, thiserror::Error)]
pub enum SetError {
    #[error(transparent)]
    Request(#[from] Invalid),
    #[error(transparent)]
    Instance(#[from] InstanceMismatch),
}

#[derive(Debug, thiserror::Error)]
pub enum AddError {
    #[error(transparent)]
    Request(#[from] Invalid),
    /// A workload without a netns can be kept, but not added.
    #[error("workload.netns is required")]
    NoNetns,
    #[error(transparent)]
    Instance(#[from] InstanceMismatch),
    #[error("cannot add the workload")]
    Change(#[from] ChangeError),
    #[error("cannot add the workload")]
    Fetch(#[from] FetchError),
    #[error(
        "cannot add the workload: netconfig did not hand over the descriptor in the caller's time"
    )]
    FetchLate,
    #[error("cannot add the workload")]
    Unserved(#[from] Unserved),
}

#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    #[error(transparent)]
    Request(#[from] Invalid),
    #[error(transparent)]
    Instance(#[from] InstanceMismatch),
    #[error("cannot remove the workload")]
    Change(#[from] ChangeError),
}

#[derive(Debug, thiserror::Error)]
pub enum SetZtunnelsError {
    #[error(transparent)]
    Request(#[from] Invalid),
    #[error(transparent)]
    Instance(#[from] InstanceMismatch),
}

impl From<SetZtunnelsError> for Failure {
    fn from(error: SetZtunnelsError) -> Self {
        match error {
            SetZtunnelsError::Request(invalid) => invalid.into(),
            SetZtunnelsError::Instance(mismatch) => {
                Self::new(Reason::InstanceMismatch, mismatch.to_string())
            }
        }
    }
}

impl From<SetError> for Failure {
    fn from(error: SetError) -> Self {
        match error {
            SetError::Request(invalid) => invalid.into(),
            SetError::Instance(mismatch) => {
                Self::new(Reason::InstanceMismatch, mismatch.to_string())
            }
        }
    }
}

impl From<AddError> for Failure {
    fn from(error: AddError) -> Self {
        let reason = match &error {
            AddError::Request(_) | AddError::NoNetns => Reason::InvalidField,
            AddError::Instance(_) => Reason::InstanceMismatch,
            AddError::Change(change) => reason_of_change(change),
            AddError::Fetch(fetch) => reason_of_fetch(fetch),
            AddError::FetchLate => Reason::DescriptorUnavailable,
            AddError::Unserved(unserved) => reason_of_unserved(unserved),
        };
        let message = with_causes(&error);
        match error {
            AddError::Request(invalid) => invalid.into(),
            AddError::NoNetns => Self::new(reason, message).at_field("workload.netns"),
            AddError::Unserved(Unserved::Lost { ago, .. }) => {
                Self::new(reason, message).retry_after(MAX_RECONNECT_DELAY.saturating_sub(ago))
            }
            AddError::Unserved(Unserved::Quarantined { retry_in, .. }) => {
                Self::new(reason, message).retry_after(retry_in)
            }
            AddError::Instance(_)
            | AddError::Change(_)
            | AddError::Fetch(_)
            | AddError::FetchLate
            | AddError::Unserved(_) => Self::new(reason, message),
        }
    }
}

impl From<RemoveError> for Failure {
    fn from(error: RemoveError) -> Self {
        let reason = match &error {
            RemoveError::Request(_) => Reason::InvalidField,
            RemoveError::Instance(_) => Reason::InstanceMismatch,
            RemoveError::Change(change) => reason_of_change(change),
        };
        let message = with_causes(&error);
        match error {
            RemoveError::Request(invalid) => invalid.into(),
            RemoveError::Instance(_) | RemoveError::Change(_) => Self::new(reason, message),
        }
    }
}

fn reason_of_change(error: &ChangeError) -> Reason {
    match error {
        ChangeError::NotSeeded => Reason::NotSeeded,
        ChangeError::Stale { .. } => Reason::RevisionStale,
    }
}

/// Returns the reason of a failed fetch. Passes on the reasons that the caller can repair by claiming the netns again;
/// everything else is a problem between two services.
fn reason_of_fetch(error: &FetchError) -> Reason {
    match error {
        FetchError::Refused {
            reason: Some(reason @ (Reason::ClaimUnknown | Reason::NetnsMismatch)),
            ..
        } => *reason,
        FetchError::Refused { .. }
        | FetchError::Connect { .. }
        | FetchError::Exchange(_)
        | FetchError::Timeout
        | FetchError::Malformed(_)
        | FetchError::WrongNetns { .. } => Reason::DescriptorUnavailable,
    }
}

fn reason_of_unserved(error: &Unserved) -> Reason {
    match error {
        Unserved::Superseded => Reason::RevisionStale,
        Unserved::NeverConnected => Reason::ZtunnelNeverConnected,
        Unserved::Lost { .. } => Reason::ZtunnelLost,
        Unserved::SnapshotUnfinished => Reason::ZtunnelSnapshotUnfinished,
        Unserved::Silent => Reason::ZtunnelSilent,
        Unserved::Refused(_) => Reason::ZtunnelRefused,
        Unserved::Quarantined { .. } => Reason::ZtunnelQuarantined,
        Unserved::Stopping => Reason::DependencyUnavailable,
    }
}

pub(crate) fn into_status(error: impl Into<Failure>) -> Status {
    inpod_proto::into_status(&error.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(error: impl Into<AddError>) -> (Reason, String) {
        let failure = Failure::from(error.into());
        (failure.reason, failure.message)
    }

    #[test]
    fn the_message_contains_what_was_attempted_and_the_whole_cause() {
        let connect = FetchError::Connect {
            path: "/run/x".into(),
            source: std::io::ErrorKind::NotFound.into(),
        };
        let expected =
            "cannot add the workload: cannot connect to netconfig at /run/x: entity not found";
        assert_eq!(
            add(connect),
            (Reason::DescriptorUnavailable, expected.into())
        );
    }

    #[test]
    fn an_unknown_claim_is_passed_on_for_the_caller_to_claim_anew() {
        let refused = FetchError::Refused {
            reason: Some(Reason::ClaimUnknown),
            message: "no claim".into(),
        };
        assert_eq!(add(refused).0, Reason::ClaimUnknown);
    }

    #[test]
    fn a_lost_ztunnel_is_reported_with_since_when_why_and_when_to_retry() {
        let lost = Unserved::Lost {
            ago: Duration::from_secs(4),
            why: "it closed the connection".into(),
        };
        let failure = Failure::from(AddError::from(lost));
        let expected = "cannot add the workload: ztunnel was lost 4 s ago (it closed the connection) and has not come back";
        assert_eq!(failure.message, expected);
        assert_eq!(failure.retry_after, Some(Duration::from_secs(11)));
    }

    #[test]
    fn a_missing_netns_names_its_field() {
        let failure = Failure::from(AddError::NoNetns);
        assert_eq!(
            (failure.reason, &*failure.field),
            (Reason::InvalidField, "workload.netns")
        );
    }
}
