use super::View;
use crate::{
    checkpoint::{Intent, Record},
    tasks::plan::Action,
};

impl View {
    /// Describes the next attempt; the text is empty if no attempt is due.
    pub(crate) fn next_step(&self) -> &'static str {
        match (self.next_attempt, self.records.last()) {
            (Some(_), Some(_)) if self.next == Some(Action::Idle) && self.records.len() == 1 => {
                "verify its rules and repair them"
            }
            (Some(_), Some(current)) => step(current, self.next),
            (Some(_), None) | (None, _) => "",
        }
    }

    /// Returns whether the next attempt does more than to verify or to wait.
    pub(crate) fn is_step_due(&self) -> bool {
        let is_routine = matches!(self.next, Some(Action::Idle | Action::WaitUntil(_)));
        self.next_attempt.is_some() && !is_routine
    }
}

fn step(current: &Record, action: Option<Action>) -> &'static str {
    match action {
        None => "claim its netns again and repair it",
        Some(Action::Enroll | Action::StartWithdrawal | Action::GarbageCollect { .. })
            if current.has_unknown_netns() =>
        {
            "search the node's processes for its netns"
        }
        Some(Action::Idle) => "forget an earlier sandbox of the pod",
        Some(Action::WaitUntil(_)) if matches!(current.intent, Intent::Leaving { .. }) => {
            "let its new connections go direct"
        }
        Some(Action::WaitUntil(_)) => "check whether the pod is deleted for good",
        Some(Action::Enroll) => "enroll it",
        Some(Action::Serve) => "give ztunnel its netns",
        Some(Action::Detach) => "release its netns; its sidecar's redirection stays",
        Some(Action::Undo) => "undo an unfinished enrollment",
        Some(Action::Update) => "apply changed annotations or addresses",
        Some(Action::StartWithdrawal) => "announce to its peers that it leaves the mesh",
        Some(Action::AwaitAnnouncement | Action::AwaitPropagation) => {
            "check whether its withdrawal has been announced to its peers"
        }
        Some(Action::Drain) => "let its new connections go direct",
        Some(Action::Finish { .. }) => {
            "remove its rules once no captured connection is left or the grace period is over"
        }
        Some(Action::Delete { .. }) => {
            "forget its sandbox once only the sandbox's own process runs in it, or after 60 s"
        }
        Some(Action::GarbageCollect { .. }) => "forget its sandbox once no process runs in it",
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::{boottime::BootInstant, testing::record};

    fn described(intent: Intent, next: Option<Action>, due: bool) -> &'static str {
        let record = Record {
            intent,
            ..record("c1")
        };
        let view = View {
            records: vec![record.into()],
            next_attempt: due.then(SystemTime::now),
            next,
            ..View::default()
        };
        view.next_step()
    }

    #[test]
    fn the_next_attempt_is_described_only_if_it_is_due() {
        assert_eq!(
            described(Intent::Enrolling, Some(Action::Enroll), false),
            ""
        );
        assert_eq!(View::default().next_step(), "");
        let since = BootInstant::BOOT;
        let wait = Some(Action::WaitUntil(since));
        let enroll = Some(Action::Enroll);
        for (intent, action, expected) in [
            (Intent::Enrolling, enroll, "enroll it"),
            (
                Intent::Enrolling,
                None,
                "claim its netns again and repair it",
            ),
            (
                Intent::Adopted,
                enroll,
                "search the node's processes for its netns",
            ),
            (
                Intent::Leaving { since },
                wait,
                "let its new connections go direct",
            ),
            (
                Intent::Out,
                wait,
                "check whether the pod is deleted for good",
            ),
        ] {
            let described = described(intent.clone(), action, true);
            assert_eq!(described, expected, "{intent:?}");
        }
    }
}
