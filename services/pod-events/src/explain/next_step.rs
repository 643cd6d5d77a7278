//! What is attempted next, in a few words.

use crate::{
    checkpoint::{Intent, Record},
    plan::Action,
    task::View,
};

/// What is attempted at the next attempt; empty where none is due.
pub(super) fn words(view: &View) -> &'static str {
    match (view.next_attempt, view.records.last()) {
        (Some(_), Some(current)) => step(current, view.next),
        (Some(_), None) | (None, _) => "",
    }
}

/// An action that has to be repeated, or the one that follows a wait.
fn step(current: &Record, action: Option<Action>) -> &'static str {
    match action {
        None => "claim its netns again, and mend what is in it",
        Some(Action::Enroll | Action::StartWithdrawal | Action::GarbageCollect { .. })
            if current.has_unknown_netns() =>
        {
            "look for its netns among the node's processes"
        }
        Some(Action::Idle) => "forget an earlier sandbox of the pod",
        Some(Action::WaitUntil(_)) => match current.intent {
            Intent::Leaving { .. } => "let its new connections go direct",
            Intent::Out
            | Intent::Enrolling
            | Intent::Adopted
            | Intent::Enrolled { .. }
            | Intent::Announcing
            | Intent::Draining { .. }
            | Intent::Deleting { .. } => "see whether the pod is gone for good",
        },
        Some(Action::Enroll) => "enroll it",
        Some(Action::Detach) => "let its netns go; its sidecar's redirection stays",
        Some(Action::Undo) => "take back what an unfinished enrollment left",
        Some(Action::Update) => "apply what changed of its annotations or addresses",
        Some(Action::StartWithdrawal) => "tell its peers that it leaves the mesh",
        Some(Action::AwaitAnnouncement | Action::AwaitPropagation) => {
            "see whether its peers were told that it leaves"
        }
        Some(Action::Drain) => "let its new connections go direct",
        Some(Action::Finish { .. }) => {
            "take its rules away, once no captured connection is left or the grace is over"
        }
        Some(Action::Delete { .. }) => {
            "forget its sandbox, once only the sandbox's own process is in it or 60 s are over"
        }
        Some(Action::GarbageCollect { .. }) => "forget its sandbox, once no process is in it",
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::{boottime::BootInstant, testing::record};

    fn said(intent: Intent, next: Option<Action>, due: bool) -> &'static str {
        words(&View {
            records: vec![Record {
                intent,
                netns_id: None,
                ..record("c1")
            }],
            next_attempt: due.then(SystemTime::now),
            next,
            ..View::default()
        })
    }

    #[test]
    fn nothing_is_said_where_nothing_is_due() {
        assert_eq!(said(Intent::Enrolling, Some(Action::Enroll), false), "");
        assert_eq!(words(&View::default()), "");
    }

    #[test]
    fn what_failed_is_attempted_again_and_a_wait_is_followed_by_what_it_is_for() {
        let since = BootInstant::BOOT;
        let wait = Some(Action::WaitUntil(since));
        for (intent, action, expected) in [
            (Intent::Enrolling, Some(Action::Enroll), "enroll it"),
            (
                Intent::Enrolling,
                None,
                "claim its netns again, and mend what is in it",
            ),
            (
                Intent::Adopted,
                Some(Action::Enroll),
                "look for its netns among the node's processes",
            ),
            (
                Intent::Leaving { since },
                wait,
                "let its new connections go direct",
            ),
            (Intent::Out, wait, "see whether the pod is gone for good"),
        ] {
            assert_eq!(said(intent.clone(), action, true), expected, "{intent:?}");
        }
    }
}
