//! Plans a sandbox's next action: a pure function of its progress and its desired state.

use std::time::Duration;

use crate::{boottime::BootInstant, checkpoint::Intent};

/// The time after a DEL from which on the sandbox counts as ended even if processes are left in its netns.
pub(crate) const DELETE_TIMEOUT: Duration = Duration::from_secs(60);

/// The time for which a pod may be missing from the source while its manifest is replaced.
pub(crate) const GONE_GRACE: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Desired {
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
pub(super) struct Timing {
    /// The time from the announcement until capture ends.
    pub propagation: Duration,
    /// The time from the end of capture until captured connections are cut.
    pub grace: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
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
pub(crate) const GONE_TIMEOUT: Duration = Duration::from_secs(600);

pub(super) fn next(intent: &Intent, desired: Desired, now: BootInstant, timing: Timing) -> Action {
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
    use crate::testing::enrolled;

    const TIMING: Timing = Timing {
        propagation: Duration::from_secs(5),
        grace: Duration::from_secs(30),
    };

    const IN: Desired = Desired::In { in_sync: true };

    const OUT: Desired = Desired::Out { is_announced: true };

    fn at(seconds: u64) -> BootInstant {
        BootInstant::after_boot(Duration::from_secs(1000 + seconds))
    }

    fn assert_next(cases: &[(u64, Intent, Desired, Action)]) {
        for (seconds, intent, desired, expected) in cases {
            let action = next(intent, *desired, at(*seconds), TIMING);
            assert_eq!(action, *expected, "{seconds} {intent:?} {desired:?}");
        }
    }

    /// Returns every intent except a deletion and another agent's redirection.
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
    fn the_desired_state_decides_unless_the_pod_is_gone_or_unknown() {
        let changed = Desired::In { in_sync: false };
        let detached = |is_claimed| Desired::Detached { is_claimed };
        let unannounced = Desired::Out {
            is_announced: false,
        };
        let wait = Action::WaitUntil(at(5));
        let [leaving, draining] = [
            Intent::Leaving { since: at(0) },
            Intent::Draining { since: at(5) },
        ];
        assert_next(&[
            (0, enrolled(), IN, Action::Idle),
            (0, enrolled(), changed, Action::Update),
            (0, Intent::Enrolling, changed, Action::Enroll),
            (0, Intent::Out, OUT, Action::Idle),
            (0, Intent::Enrolling, OUT, Action::Undo),
            (0, enrolled(), OUT, Action::StartWithdrawal),
            (0, Intent::Adopted, OUT, Action::StartWithdrawal),
            (
                9,
                Intent::Announcing,
                unannounced,
                Action::AwaitAnnouncement,
            ),
            (0, Intent::Announcing, OUT, Action::AwaitPropagation),
            (4, leaving.clone(), OUT, wait),
            (5, leaving, OUT, Action::Drain),
            (34, draining.clone(), OUT, Action::Finish { overdue: false }),
            (35, draining, OUT, Action::Finish { overdue: true }),
            (0, enrolled(), detached(true), Action::Detach),
            (9, enrolled(), detached(false), Action::Idle),
            (0, Intent::Adopted, detached(true), Action::Detach),
            (0, Intent::Out, detached(false), Action::Idle),
            (0, Intent::Enrolling, detached(true), Action::Undo),
        ]);
        for intent in every_intent() {
            if intent != enrolled() {
                assert_next(&[(1, intent.clone(), IN, Action::Enroll)]);
            }
            assert_next(&[(100, intent, Desired::Unknown, Action::Idle)]);
        }
    }

    #[test]
    fn legacy_rules_of_another_agent_are_served_not_withdrawn() {
        let detached = Desired::Detached { is_claimed: true };
        for desired in [IN, Desired::In { in_sync: false }, OUT, detached] {
            assert_next(&[
                (9, Intent::Legacy, desired, Action::Serve),
                (9, Intent::ServedLegacy, desired, Action::Idle),
            ]);
        }
    }

    #[test]
    fn a_delete_proceeds_whatever_is_desired() {
        let deleting = Intent::Deleting { since: at(0) };
        let delete = |overdue| Action::Delete { overdue };
        for desired in [IN, OUT, Desired::Unknown, Desired::Gone { since: at(0) }] {
            assert_next(&[
                (59, deleting.clone(), desired, delete(false)),
                (60, deleting.clone(), desired, delete(true)),
            ]);
        }
    }

    #[test]
    fn a_gone_pod_may_come_back_before_it_is_garbage_collected() {
        let gone = Desired::Gone { since: at(0) };
        let collect = |overdue| Action::GarbageCollect { overdue };
        for intent in every_intent() {
            assert_next(&[
                (1, intent.clone(), gone, Action::WaitUntil(at(2))),
                (2, intent.clone(), gone, collect(false)),
                (599, intent.clone(), gone, collect(false)),
                (600, intent, gone, collect(true)),
            ]);
        }
    }
}
