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
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::{
        boottime::BootInstant,
        pods::{
            describe::describe_next,
            next::{Ending, World},
            state::{Pod, Proxy, Run, Sandbox},
        },
        tasks::{
            plan::{Desired, Timing, next},
            task::shadow::{phase_of, wanted},
        },
        testing::{enrolled, record},
    };

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

    const TIMING: Timing = Timing {
        propagation: Duration::from_secs(5),
        grace: Duration::from_secs(30),
    };

    fn at(seconds: u64) -> BootInstant {
        BootInstant::after_boot(Duration::from_secs(seconds))
    }

    /// Returns the steps named by this core and by the planned one, 1000 s after boot. `runs` are the connected
    /// netconfig and broker; parts of the enrollment are in place at both if `is_held` is set.
    fn named(
        intent: Intent,
        desired: Desired,
        runs: [Option<Run>; 2],
        is_held: bool,
    ) -> (&'static str, String) {
        let record = Record {
            intent,
            ..record("c1")
        };
        let now = at(1000);
        let action = next(&record.intent, desired, now, TIMING);
        let [netconfig, broker] = runs;
        let sandbox = Sandbox {
            phase: phase_of(&record),
            claimed_by: netconfig.clone().filter(|_| is_held),
            served_by: broker.clone().filter(|_| is_held),
            ..Sandbox::new(1)
        };
        let pod = Pod {
            sandboxes: vec![sandbox],
            ..Pod::default()
        };
        let world = World {
            now,
            netconfig,
            broker,
            wanted: wanted(desired, Proxy::Ztunnel),
            ending: Ending::Unknown,
            is_shown: true,
            has_successor: false,
            is_searched: false,
            leave: None,
            is_announced: matches!(desired, Desired::Out { is_announced: true }),
            listener_check: None,
            propagation: TIMING.propagation,
            grace: TIMING.grace,
        };
        (step(&record, Some(action)), describe_next(&pod, &world))
    }

    type Row = (Intent, Desired, &'static str, &'static str);

    fn assert_named(rows: &[Row]) {
        for (intent, desired, today, planned) in rows {
            let runs = [Some("n1".into()), Some("b1".into())];
            let named = named(intent.clone(), *desired, runs, true);
            assert_eq!(
                named,
                (*today, (*planned).to_owned()),
                "{intent:?} {desired:?}"
            );
        }
    }

    #[test]
    fn the_planned_core_names_the_calls_of_a_pod_that_leaves() {
        let leaves = |is_announced| Desired::Out { is_announced };
        let since = at(999);
        let announces = "announce to its peers that it leaves the mesh";
        let announced = "check whether its withdrawal has been announced to its peers";
        assert_named(&[
            (
                Intent::Enrolling,
                leaves(true),
                "undo an unfinished enrollment",
                "remove its rules, its workload and its claim",
            ),
            (enrolled(), leaves(false), announces, announces),
            (
                Intent::Announcing,
                leaves(false),
                announced,
                "record that its withdrawal is announced, once the API server shows so",
            ),
            (
                Intent::Announcing,
                leaves(true),
                announced,
                "record that its withdrawal is announced",
            ),
            (
                Intent::Leaving { since },
                leaves(true),
                "let its new connections go direct",
                "let its new connections go direct, in 4.0 s",
            ),
            (
                Intent::Draining { since },
                leaves(true),
                "remove its rules once no captured connection is left or the grace period is over",
                "count its captured connections; without any, it leaves the mesh",
            ),
        ]);
    }

    #[test]
    fn the_planned_core_names_the_calls_of_a_pod_that_joins_or_ends() {
        let to_join = Desired::In { in_sync: false };
        let gone = |seconds| Desired::Gone { since: at(seconds) };
        let looks = "look which processes run in its netns";
        let updates = "apply changed annotations or addresses";
        assert_named(&[
            (Intent::Enrolling, to_join, "enroll it", "apply its rules"),
            (enrolled(), to_join, updates, updates),
            (
                Intent::Deleting { since: at(999) },
                to_join,
                "forget its sandbox once only the sandbox's own process runs in it, or after 60 s",
                looks,
            ),
            (
                enrolled(),
                gone(990),
                "forget its sandbox once no process runs in it",
                looks,
            ),
            (
                enrolled(),
                gone(999),
                "check whether the pod is deleted for good",
                "look which processes run in its netns, in 1.0 s",
            ),
        ]);
    }

    #[test]
    fn the_planned_core_names_the_service_for_which_an_enrollment_waits() {
        let [netconfig, broker] = [Some("n1".into()), Some("b1".into())];
        let to_join = Desired::In { in_sync: false };
        for (intent, runs, planned) in [
            (
                Intent::Out,
                [netconfig.clone(), broker.clone()],
                "record that its enrollment begins",
            ),
            (
                Intent::Enrolling,
                [netconfig.clone(), None],
                "claim its netns",
            ),
            (
                Intent::Out,
                [netconfig, None],
                "record that its enrollment begins, once ztunnel-broker has the desired set",
            ),
            (
                Intent::Enrolling,
                [None, broker],
                "claim its netns, once netconfig is reachable",
            ),
        ] {
            let named = named(intent.clone(), to_join, runs, false);
            assert_eq!(named, ("enroll it", planned.to_owned()), "{intent:?}");
        }
    }
}
