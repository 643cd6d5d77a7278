//! What is to be done next about a sandbox: a pure function of how far it has come and what is wanted of it.

use std::time::{Duration, SystemTime};

use crate::checkpoint::Intent;

/// After this long a sandbox whose end was announced is taken as ended although processes are left in its netns.
pub const DELETE_BOUND: Duration = Duration::from_secs(60);

/// What is wanted of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// In the mesh.
    In,
    /// Outside of the mesh, running.
    Out,
    /// Its pod is gone from the source.
    Gone {
        /// Since when.
        since: SystemTime,
    },
}

/// How long the phases of a withdrawal take.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// From the announcement to the end of capture.
    pub propagation: Duration,
    /// From the end of capture to the end of what was captured.
    pub grace: Duration,
}

/// What is to be done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// All is as it should be.
    Rest,
    /// Come back then.
    WaitUntil(SystemTime),
    /// Put everything in place, whatever of it is there already.
    Enroll,
    /// Take back what an unfinished enrolment left.
    Abandon,
    /// Tell peers that the pod leaves.
    StartLeaving,
    /// Let new connections go direct.
    Drain,
    /// Take the rest away once no captured connection is left, or at once.
    Finish {
        /// Whether the grace is over.
        overdue: bool,
    },
    /// Forget the sandbox once nothing runs in it, or at once.
    Delete {
        /// Whether the bound has passed.
        overdue: bool,
        /// Whether the runtime itself said that the sandbox ends.
        announced: bool,
    },
}

/// The next action.
pub fn next(intent: &Intent, wanted: Wanted, now: SystemTime, timing: Timing) -> Action {
    let past =
        |since: SystemTime, wait: Duration| now.duration_since(since).is_ok_and(|age| age >= wait);
    match (intent, wanted) {
        (Intent::Deleting { since }, _) => Action::Delete {
            overdue: past(*since, DELETE_BOUND),
            announced: true,
        },
        (_, Wanted::Gone { since }) => Action::Delete {
            overdue: past(since, DELETE_BOUND),
            announced: false,
        },
        (Intent::Enrolled { .. }, Wanted::In) | (Intent::Out, Wanted::Out) => Action::Rest,
        (_, Wanted::In) => Action::Enroll,
        (Intent::Enrolling, Wanted::Out) => Action::Abandon,
        (Intent::Enrolled { .. }, Wanted::Out) => Action::StartLeaving,
        (Intent::Leaving { since }, Wanted::Out) if past(*since, timing.propagation) => {
            Action::Drain
        }
        (Intent::Leaving { since }, Wanted::Out) => Action::WaitUntil(*since + timing.propagation),
        (Intent::Draining { since }, Wanted::Out) => Action::Finish {
            overdue: past(*since, timing.grace),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMING: Timing = Timing {
        propagation: Duration::from_secs(5),
        grace: Duration::from_secs(30),
    };

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1000 + seconds)
    }

    fn enrolled() -> Intent {
        Intent::Enrolled {
            fingerprint: "f".into(),
        }
    }

    fn next_at(seconds: u64, intent: &Intent, wanted: Wanted) -> Action {
        next(intent, wanted, at(seconds), TIMING)
    }

    #[test]
    fn what_is_as_wanted_rests() {
        assert_eq!(next_at(0, &enrolled(), Wanted::In), Action::Rest);
        assert_eq!(next_at(0, &Intent::Out, Wanted::Out), Action::Rest);
    }

    #[test]
    fn a_wanted_pod_is_enrolled_from_wherever_it_is() {
        let leaving = Intent::Leaving { since: at(0) };
        let draining = Intent::Draining { since: at(0) };
        for intent in [Intent::Out, Intent::Enrolling, leaving, draining] {
            assert_eq!(
                next_at(1, &intent, Wanted::In),
                Action::Enroll,
                "{intent:?}"
            );
        }
    }

    #[test]
    fn a_withdrawal_announces_then_drains_then_finishes() {
        assert_eq!(next_at(0, &enrolled(), Wanted::Out), Action::StartLeaving);
        let leaving = Intent::Leaving { since: at(0) };
        assert_eq!(next_at(4, &leaving, Wanted::Out), Action::WaitUntil(at(5)));
        assert_eq!(next_at(5, &leaving, Wanted::Out), Action::Drain);
        let draining = Intent::Draining { since: at(5) };
        assert_eq!(
            next_at(34, &draining, Wanted::Out),
            Action::Finish { overdue: false }
        );
        assert_eq!(
            next_at(35, &draining, Wanted::Out),
            Action::Finish { overdue: true }
        );
    }

    #[test]
    fn an_unfinished_enrolment_that_is_no_longer_wanted_is_taken_back() {
        assert_eq!(next_at(0, &Intent::Enrolling, Wanted::Out), Action::Abandon);
    }

    #[test]
    fn an_announced_end_stands_whatever_is_wanted() {
        let deleting = Intent::Deleting { since: at(0) };
        for wanted in [Wanted::In, Wanted::Out, Wanted::Gone { since: at(0) }] {
            let early = Action::Delete {
                overdue: false,
                announced: true,
            };
            assert_eq!(next_at(59, &deleting, wanted), early);
            let late = Action::Delete {
                overdue: true,
                announced: true,
            };
            assert_eq!(next_at(60, &deleting, wanted), late);
        }
    }

    #[test]
    fn a_pod_that_is_gone_from_the_source_is_deleted_without_an_announcement() {
        let gone = Wanted::Gone { since: at(0) };
        let action = Action::Delete {
            overdue: false,
            announced: false,
        };
        assert_eq!(next_at(1, &enrolled(), gone), action);
    }

    #[test]
    fn a_clock_that_went_back_waits_and_does_not_panic() {
        let leaving = Intent::Leaving { since: at(10) };
        assert_eq!(next_at(0, &leaving, Wanted::Out), Action::WaitUntil(at(15)));
    }
}
