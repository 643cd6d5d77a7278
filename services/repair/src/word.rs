//! What pod-events says of a pod.

use std::time::{Duration, SystemTime};

use inpod_proto::{
    podevents::v1::{PodState, PodSummary},
    types::v1::Enrollment,
};
use inpod_types::Reason;

/// What pod-events says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// It is not heard.
    Away,
    /// It does not know the pod.
    Stranger,
    /// The pod is not to be redirected, and why.
    Unwanted(Reason),
    /// Nobody can tell whether the pod is to be redirected.
    Undecided,
    /// The pod is to be redirected.
    Wanted(Standing),
}

/// How far a pod is that is to be redirected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Whether its traffic goes to a proxy of its own, not to ztunnel.
    pub has_proxy: bool,
    /// Where it stands.
    pub place: Place,
}

/// Where a pod stands that is to be redirected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// It is redirected, since when.
    In(Option<SystemTime>),
    /// It is not yet; what went wrong last, empty where nothing did.
    Out(String),
    /// It leaves, or ends.
    Leaving,
}

impl Word {
    /// Reads a summary. What a later release says that this one does not know is taken for not decided.
    pub fn of(summary: &PodSummary) -> Self {
        let wanted = |has_proxy| {
            Self::Wanted(Standing {
                has_proxy,
                place: place(summary),
            })
        };
        match summary.desired() {
            Enrollment::Ambient => wanted(false),
            Enrollment::Sidecar => wanted(true),
            Enrollment::None => {
                let reason = Reason::from_number(summary.reason);
                reason.map_or(Self::Undecided, Self::Unwanted)
            }
            Enrollment::Unknown | Enrollment::Unspecified => Self::Undecided,
        }
    }
}

fn place(summary: &PodSummary) -> Place {
    match summary.state() {
        PodState::Enrolled => Place::In(summary.since.as_ref().and_then(|since| {
            let seconds = Duration::from_secs(u64::try_from(since.seconds).ok()?);
            SystemTime::UNIX_EPOCH.checked_add(seconds)
        })),
        PodState::Withdrawing | PodState::Deleting => Place::Leaving,
        PodState::Out | PodState::Enrolling | PodState::Unspecified => {
            let failure = summary.last_failure.as_ref();
            Place::Out(failure.map_or_else(String::new, |failure| failure.message.clone()))
        }
    }
}

#[cfg(test)]
mod tests {
    use inpod_proto::types::v1 as types;

    use super::*;

    fn word(desired: Enrollment, state: PodState) -> Word {
        Word::of(&PodSummary {
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

    fn wanted(has_proxy: bool, place: Place) -> Word {
        Word::Wanted(Standing { has_proxy, place })
    }

    #[test]
    fn a_summary_is_read() {
        let (ambient, sidecar) = (Enrollment::Ambient, Enrollment::Sidecar);
        let out = || Place::Out("the kernel refused".to_owned());
        assert_eq!(word(ambient, PodState::Out), wanted(false, out()));
        assert_eq!(word(sidecar, PodState::Enrolling), wanted(true, out()));
        assert_eq!(
            word(sidecar, PodState::Enrolled),
            wanted(true, Place::In(None))
        );
        assert_eq!(
            word(sidecar, PodState::Withdrawing),
            wanted(true, Place::Leaving)
        );
        assert_eq!(
            word(ambient, PodState::Deleting),
            wanted(false, Place::Leaving)
        );
        assert_eq!(
            word(Enrollment::None, PodState::Out),
            Word::Unwanted(Reason::NamespaceExcluded)
        );
        assert_eq!(word(Enrollment::Unknown, PodState::Out), Word::Undecided);
    }

    #[test]
    fn what_a_later_release_may_say_decides_nothing() {
        let odd = PodSummary {
            desired: 99,
            state: 99,
            ..PodSummary::default()
        };
        assert_eq!(Word::of(&odd), Word::Undecided);
        let reason = PodSummary {
            desired: Enrollment::None.into(),
            reason: 9999,
            ..PodSummary::default()
        };
        assert_eq!(Word::of(&reason), Word::Undecided);
    }
}
