//! Plans a sandbox's next action: a pure function of its progress and its desired state.

use std::time::Duration;

use crate::{boottime::BootInstant, checkpoint::Intent};

/// The time after a DEL from which on the sandbox counts as ended even if processes are left in its netns.
pub const DELETE_TIMEOUT: Duration = Duration::from_secs(60);

/// The time for which a pod may be missing from the source while its manifest is replaced.
pub const GONE_GRACE: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Desired {
    In {
        /// Set if the requested settings and addresses equal the applied settings and addresses.
        in_sync: bool,
    },
    /// Redirected to its sidecar until the sandbox ends, but unmanaged.
    Detached {
        /// Set while netconfig holds the sandbox's netns.
        is_claimed: bool,
    },
    Out {
        /// Set once the pod's annotation is withdrawn, so that peers no longer see the pod as redirected.
        is_announced: bool,
    },
    Gone {
        since: BootInstant,
    },
    /// The source does not know the desired state, so nothing is changed.
    Unknown,
}

#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// The time from the announcement until capture ends.
    pub propagation: Duration,
    /// The time from the end of capture until captured connections are cut.
    pub grace: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Idle,
    WaitUntil(BootInstant),
    /// Put every part of the enrollment in place, even if some parts are in place already.
    Enroll,
    /// Give ztunnel the netns of a sandbox with another agent's rules.
    Serve,
    Update,
    Detach,
    Undo,
    /// Withdraw the pod's annotation to announce to peers that the pod leaves.
    StartWithdrawal,
    AwaitAnnouncement,
    AwaitPropagation,
    Drain,
    /// Remove the rest once no captured connection is left, or at once if overdue.
    Finish {
        overdue: bool,
    },
    /// Delete a sandbox after its DEL, once only the sandbox's own process is left or the deletion is overdue
    /// ([`DELETE_TIMEOUT`]).
    Delete {
        overdue: bool,
    },
    /// Clean up after a pod that is gone without a DEL: forget the sandbox once the netns is empty. If overdue
    /// ([`GONE_TIMEOUT`]), withdraw the sandbox and keep the record until the sandbox ends.
    GarbageCollect {
        overdue: bool,
    },
}

/// The time after which a pod missing from the source leaves the mesh although its containers run. The time exceeds
/// usual termination grace periods, during which pods still serve.
pub const GONE_TIMEOUT: Duration = Duration::from_secs(600);

pub fn next(intent: &Intent, desired: Desired, now: BootInstant, timing: Timing) -> Action {
    let elapsed = |since: BootInstant, wait: Duration| now.since(since) >= wait;
    match (intent, desired) {
        (Intent::Deleting { since }, _) => Action::Delete {
            overdue: elapsed(*since, DELETE_TIMEOUT),
        },
        (_, Desired::Unknown) => Action::Idle,
        (_, Desired::Gone { since }) if !elapsed(since, GONE_GRACE) => {
            Action::WaitUntil(since + GONE_GRACE)
        }
        (_, Desired::Gone { since }) => Action::GarbageCollect {
            overdue: elapsed(since, GONE_TIMEOUT),
        },
        (Intent::Legacy, _) => Action::Serve,
        (Intent::ServedLegacy, _) => Action::Idle,
        (Intent::Enrolled { .. }, Desired::In { in_sync: true })
        | (Intent::Enrolled { .. }, Desired::Detached { is_claimed: false })
        | (Intent::Out, Desired::Out { .. } | Desired::Detached { .. }) => Action::Idle,
        (Intent::Enrolled { .. }, Desired::In { in_sync: false }) => Action::Update,
        (_, Desired::In { .. }) => Action::Enroll,
        (Intent::Enrolling, Desired::Out { .. } | Desired::Detached { .. }) => Action::Undo,
        (_, Desired::Detached { .. }) => Action::Detach,
        (Intent::Enrolled { .. } | Intent::Adopted, Desired::Out { .. }) => Action::StartWithdrawal,
        (Intent::Announcing, Desired::Out { is_announced: true }) => Action::AwaitPropagation,
        (Intent::Announcing, Desired::Out { .. }) => Action::AwaitAnnouncement,
        (Intent::Leaving { since }, Desired::Out { .. }) if elapsed(*since, timing.propagation) => {
            Action::Drain
        }
        (Intent::Leaving { since }, Desired::Out { .. }) => {
            Action::WaitUntil(*since + timing.propagation)
        }
        (Intent::Draining { since }, Desired::Out { .. }) => Action::Finish {
            overdue: elapsed(*since, timing.grace),
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

    const IN: Desired = Desired::In { in_sync: true };

    const OUT: Desired = Desired::Out { is_announced: true };

    fn at(seconds: u64) -> BootInstant {
        BootInstant::after_boot(Duration::from_secs(1000 + seconds))
    }

    fn enrolled() -> Intent {
        Intent::Enrolled {
            fingerprint: "f".into(),
        }
    }

    fn next_at(seconds: u64, intent: &Intent, desired: Desired) -> Action {
        next(intent, desired, at(seconds), TIMING)
    }

    fn every_intent() -> [Intent; 7] {
        let since = at(0);
        [
            Intent::Out,
            Intent::Enrolling,
            Intent::Adopted,
            enrolled(),
            Intent::Announcing,
            Intent::Leaving { since },
            Intent::Draining { since },
        ]
    }

    #[test]
    fn what_is_as_desired_needs_no_action() {
        assert_eq!(next_at(0, &enrolled(), IN), Action::Idle);
        assert_eq!(next_at(0, &Intent::Out, OUT), Action::Idle);
    }

    #[test]
    fn where_the_source_cannot_tell_everything_stays() {
        for intent in every_intent() {
            assert_eq!(
                next_at(100, &intent, Desired::Unknown),
                Action::Idle,
                "{intent:?}"
            );
        }
    }

    #[test]
    fn a_wanted_pod_is_enrolled_from_wherever_it_is() {
        for intent in every_intent()
            .into_iter()
            .filter(|intent| *intent != enrolled())
        {
            assert_eq!(next_at(1, &intent, IN), Action::Enroll, "{intent:?}");
        }
    }

    #[test]
    fn what_another_agent_redirected_by_legacy_rules_is_served_and_never_withdrawn() {
        let at = |intent, desired| next_at(9, &intent, desired);
        let detached = Desired::Detached { is_claimed: true };
        for desired in [IN, Desired::In { in_sync: false }, OUT, detached] {
            assert_eq!(at(Intent::Legacy, desired), Action::Serve, "{desired:?}");
            let served = at(Intent::ServedLegacy, desired);
            assert_eq!(served, Action::Idle, "{desired:?}");
        }
    }

    #[test]
    fn a_withdrawal_announces_then_drains_then_finishes() {
        assert_eq!(next_at(0, &enrolled(), OUT), Action::StartWithdrawal);
        let adopted = next_at(0, &Intent::Adopted, OUT);
        assert_eq!(adopted, Action::StartWithdrawal);
        let unannounced = Desired::Out {
            is_announced: false,
        };
        let announcing = Intent::Announcing;
        assert_eq!(
            next_at(99, &announcing, unannounced),
            Action::AwaitAnnouncement
        );
        assert_eq!(next_at(0, &announcing, OUT), Action::AwaitPropagation);
        let leaving = Intent::Leaving { since: at(0) };
        assert_eq!(next_at(4, &leaving, OUT), Action::WaitUntil(at(5)));
        assert_eq!(next_at(5, &leaving, OUT), Action::Drain);
        let draining = Intent::Draining { since: at(5) };
        assert_eq!(
            next_at(34, &draining, OUT),
            Action::Finish { overdue: false }
        );
        assert_eq!(
            next_at(35, &draining, OUT),
            Action::Finish { overdue: true }
        );
    }

    #[test]
    fn an_enrolled_pod_that_requests_something_else_is_updated_in_place() {
        let changed = Desired::In { in_sync: false };
        assert_eq!(next_at(0, &enrolled(), changed), Action::Update);
        assert_eq!(next_at(0, &Intent::Enrolling, changed), Action::Enroll);
    }

    #[test]
    fn an_unfinished_enrollment_that_is_no_longer_wanted_is_taken_back() {
        assert_eq!(next_at(0, &Intent::Enrolling, OUT), Action::Undo);
    }

    #[test]
    fn what_is_detached_loses_its_claim_once_and_no_rule() {
        let detached = |is_claimed| Desired::Detached { is_claimed };
        assert_eq!(next_at(0, &enrolled(), detached(true)), Action::Detach);
        assert_eq!(next_at(9, &enrolled(), detached(false)), Action::Idle);
        // Nothing of ours is in place yet.
        let found = next_at(0, &Intent::Adopted, detached(true));
        assert_eq!(found, Action::Detach);
        assert_eq!(next_at(0, &Intent::Out, detached(false)), Action::Idle);
        let begun = next_at(0, &Intent::Enrolling, detached(true));
        assert_eq!(begun, Action::Undo);
    }

    #[test]
    fn a_delete_proceeds_whatever_is_desired() {
        let deleting = Intent::Deleting { since: at(0) };
        for desired in [IN, OUT, Desired::Unknown, Desired::Gone { since: at(0) }] {
            assert_eq!(
                next_at(59, &deleting, desired),
                Action::Delete { overdue: false }
            );
            assert_eq!(
                next_at(60, &deleting, desired),
                Action::Delete { overdue: true }
            );
        }
    }

    #[test]
    fn a_pod_that_is_gone_for_a_moment_may_come_back_and_one_that_stays_away_is_garbage_collected()
    {
        let gone = Desired::Gone { since: at(0) };
        for intent in every_intent() {
            assert_eq!(next_at(1, &intent, gone), Action::WaitUntil(at(2)));
            assert_eq!(
                next_at(2, &intent, gone),
                Action::GarbageCollect { overdue: false }
            );
            assert_eq!(
                next_at(599, &intent, gone),
                Action::GarbageCollect { overdue: false }
            );
            assert_eq!(
                next_at(600, &intent, gone),
                Action::GarbageCollect { overdue: true }
            );
        }
    }
}
