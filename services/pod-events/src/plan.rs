//! What is to be done next about a sandbox: a pure function of how far it has come and what is wanted of it.

use std::time::Duration;

use crate::{boottime::BootInstant, checkpoint::Intent};

/// After this long a sandbox whose end was announced is taken as ended although processes are left in its netns.
pub const DELETE_TIMEOUT: Duration = Duration::from_secs(60);

/// A pod that is gone from the source for less than this may be one whose manifest is being replaced.
pub const GONE_GRACE: Duration = Duration::from_secs(2);

/// What is wanted of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Desired {
    /// In the mesh.
    In {
        /// Whether what it asks of its redirection, and its addresses, are those that were applied.
        in_sync: bool,
    },
    /// Redirected to its sidecar for the life of its sandbox, and not looked after.
    Detached {
        /// Whether netconfig holds its netns.
        is_claimed: bool,
    },
    /// Outside of the mesh, running.
    Out {
        /// Whether peers have been told: nothing says any more that the pod is redirected.
        is_announced: bool,
    },
    /// Its pod is gone from the source.
    Gone {
        /// Since when.
        since: BootInstant,
    },
    /// The source cannot tell: everything stays as it is.
    Unknown,
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
    Idle,
    /// Come back then.
    WaitUntil(BootInstant),
    /// Put everything in place, whatever of it is there already.
    Enroll,
    /// Apply what has changed of the pod's wishes or addresses; it stays in the mesh.
    Update,
    /// Leave what is in place where it is, and look after it no more.
    Detach,
    /// Take back what an unfinished enrollment left.
    Undo,
    /// Have peers told that the pod leaves.
    StartWithdrawal,
    /// Come back when peers have been told.
    AwaitAnnouncement,
    /// Give peers time to learn it.
    AwaitPropagation,
    /// Let new connections go direct.
    Drain,
    /// Take the rest away once no captured connection is left, or at once.
    Finish {
        /// Whether the grace is over.
        overdue: bool,
    },
    /// The runtime said that the sandbox ends: forget it once nothing but its own process runs in it, or at once.
    Delete {
        /// Whether the bound has passed.
        overdue: bool,
    },
    /// The pod is gone from the source and nobody said that its sandbox ends: forget it once its netns is empty. When
    /// the bound has passed it is taken out of the mesh, and remembered until it has ended.
    GarbageCollect {
        /// Whether the bound has passed.
        overdue: bool,
    },
}

/// After this long a pod that is gone from the source is taken out of the mesh although its containers run: longer
/// than the graces that pods are given to end, during which they serve.
pub const GONE_TIMEOUT: Duration = Duration::from_secs(600);

/// The next action.
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
    fn what_is_as_wanted_rests() {
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
    fn a_withdrawal_announces_then_drains_then_finishes() {
        assert_eq!(next_at(0, &enrolled(), OUT), Action::StartWithdrawal);
        let inherited = next_at(0, &Intent::Adopted, OUT);
        assert_eq!(inherited, Action::StartWithdrawal);
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
    fn an_enrolled_pod_that_asks_for_something_else_is_changed_where_it_stands() {
        let changed = Desired::In { in_sync: false };
        assert_eq!(next_at(0, &enrolled(), changed), Action::Update);
        assert_eq!(next_at(0, &Intent::Enrolling, changed), Action::Enroll);
    }

    #[test]
    fn an_unfinished_enrollment_that_is_no_longer_wanted_is_taken_back() {
        assert_eq!(next_at(0, &Intent::Enrolling, OUT), Action::Undo);
    }

    #[test]
    fn what_is_let_alone_loses_its_claim_once_and_no_rule() {
        let detached = |is_claimed| Desired::Detached { is_claimed };
        assert_eq!(next_at(0, &enrolled(), detached(true)), Action::Detach);
        assert_eq!(next_at(9, &enrolled(), detached(false)), Action::Idle);
        // Nothing of ours is in place of these yet.
        let found = next_at(0, &Intent::Adopted, detached(true));
        assert_eq!(found, Action::Detach);
        assert_eq!(next_at(0, &Intent::Out, detached(false)), Action::Idle);
        let begun = next_at(0, &Intent::Enrolling, detached(true));
        assert_eq!(begun, Action::Undo);
    }

    #[test]
    fn an_announced_end_stands_whatever_is_wanted() {
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
    fn a_pod_that_is_gone_for_a_moment_may_come_back_and_one_that_stays_away_is_let_go() {
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
