//! The enrollment of a pod as pod-events reports it, reduced to the facts that a diagnosis needs.

use std::time::{Duration, SystemTime};

use inpod_proto::{
    podevents::v1::{PodState, PodSummary},
    types::v1::Enrollment,
};
use inpod_types::Reason;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnrollmentStatus {
    Unavailable,
    UnknownPod,
    NotDesired(Reason),
    /// pod-events does not know yet whether the pod is to be redirected.
    Undecided,
    Desired(Redirection),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redirection {
    /// The traffic goes to a proxy in the pod instead of the node's ztunnel.
    pub has_proxy: bool,
    pub progress: Progress,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The pod has been redirected since the given time, if the time is known.
    Redirected(Option<SystemTime>),
    /// The pod is not redirected yet; holds the last failure, which may be empty.
    Pending(String),
    Leaving,
}

impl EnrollmentStatus {
    /// Converts the summary of pod-events. Values that only a later release knows count as undecided.
    pub fn from_summary(summary: &PodSummary) -> Self {
        let wanted = |has_proxy| {
            Self::Desired(Redirection {
                has_proxy,
                progress: progress(summary),
            })
        };
        match summary.desired() {
            Enrollment::Ambient => wanted(false),
            Enrollment::Sidecar => wanted(true),
            Enrollment::None => {
                let reason = Reason::from_number(summary.reason);
                reason.map_or(Self::Undecided, Self::NotDesired)
            }
            Enrollment::Unknown | Enrollment::Unspecified => Self::Undecided,
        }
    }
}

fn progress(summary: &PodSummary) -> Progress {
    match summary.state() {
        PodState::Enrolled => Progress::Redirected(summary.since.as_ref().and_then(|since| {
            let seconds = Duration::from_secs(u64::try_from(since.seconds).ok()?);
            SystemTime::UNIX_EPOCH.checked_add(seconds)
        })),
        PodState::Withdrawing | PodState::Deleting => Progress::Leaving,
        PodState::Out | PodState::Enrolling | PodState::Unspecified => {
            let failure = summary.last_failure.as_ref();
            Progress::Pending(failure.map_or_else(String::new, |failure| failure.message.clone()))
        }
    }
}

#[cfg(test)]
mod tests {
    use inpod_proto::types::v1 as types;

    use super::*;

    fn status(desired: Enrollment, state: PodState) -> EnrollmentStatus {
        EnrollmentStatus::from_summary(&PodSummary {
            desired: desired.into(),
            reason: types::Reason::NamespaceExcluded.into(),
            state: state.into(),
            last_failure: Some(types::Failure {
                message: "the kernel refused".to_owned(),
                ..types::Failure::default()
            }),
            ..PodSummary::default()
        })
    }

    fn wanted(has_proxy: bool, progress: Progress) -> EnrollmentStatus {
        EnrollmentStatus::Desired(Redirection {
            has_proxy,
            progress,
        })
    }

    #[test]
    fn a_summary_is_read() {
        let (ambient, sidecar) = (Enrollment::Ambient, Enrollment::Sidecar);
        let out = || Progress::Pending("the kernel refused".to_owned());
        assert_eq!(status(ambient, PodState::Out), wanted(false, out()));
        assert_eq!(status(sidecar, PodState::Enrolling), wanted(true, out()));
        assert_eq!(
            status(sidecar, PodState::Enrolled),
            wanted(true, Progress::Redirected(None))
        );
        assert_eq!(
            status(sidecar, PodState::Withdrawing),
            wanted(true, Progress::Leaving)
        );
        assert_eq!(
            status(ambient, PodState::Deleting),
            wanted(false, Progress::Leaving)
        );
        assert_eq!(
            status(Enrollment::None, PodState::Out),
            EnrollmentStatus::NotDesired(Reason::NamespaceExcluded)
        );
        assert_eq!(
            status(Enrollment::Unknown, PodState::Out),
            EnrollmentStatus::Undecided
        );
    }

    #[test]
    fn what_a_later_release_may_say_decides_nothing() {
        let odd = PodSummary {
            desired: 99,
            state: 99,
            ..PodSummary::default()
        };
        assert_eq!(
            EnrollmentStatus::from_summary(&odd),
            EnrollmentStatus::Undecided
        );
        let reason = PodSummary {
            desired: Enrollment::None.into(),
            reason: 9999,
            ..PodSummary::default()
        };
        assert_eq!(
            EnrollmentStatus::from_summary(&reason),
            EnrollmentStatus::Undecided
        );
    }
}
