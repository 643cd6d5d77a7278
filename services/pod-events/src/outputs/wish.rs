//! What a pod is to bear: a pure function of where it stands and what is wanted of it.
//!
//! Peers use HBONE with a pod that bears `enabled`. It changes only at enrollment, withdrawal and a new sandbox: whether
//! a ztunnel is there at the moment is nothing that it tells (Istio's agent: services/docs/facts/istio-ambient.md sections 1.7 and 3.1).

use inpod_types::{Enrollment, Failure, Reason, SandboxRef, keys};

use crate::{
    checkpoint::{Intent, Record},
    decide::Decision,
    pipeline::is_transient,
    pod::Pod,
    task::View,
};

/// A value of the annotation `ambient.istio.io/redirection`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// The pod is in the mesh.
    Enabled,
    /// It is to be, and no ztunnel has acknowledged it yet in this sandbox.
    Pending,
    /// It is outside.
    Absent,
}

impl Mark {
    /// What stands in the annotation.
    pub(crate) fn value(self) -> Option<&'static str> {
        match self {
            Self::Enabled => Some(keys::REDIRECTION_ENABLED),
            Self::Pending => Some(keys::REDIRECTION_PENDING),
            Self::Absent => None,
        }
    }

    /// Whether this is what stands there.
    pub(crate) fn is(self, shown: Option<&str>) -> bool {
        self.value() == shown
    }
}

/// What is known of a pod that the source shows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing<'a> {
    /// The pod.
    pub(crate) pod: &'a Pod,
    /// Its current sandbox, if any is known.
    pub(crate) record: Option<&'a Record>,
    /// What has gone wrong with that and is not mended.
    pub(crate) failure: Option<&'a Failure>,
    /// What it should be.
    pub(crate) wanted: Enrollment,
    /// Why it should be that.
    pub(crate) why: Reason,
    /// Whether a pod without a sandbox has none: those that ran before were taken over.
    pub(crate) taken_over: bool,
}

impl<'a> Standing<'a> {
    /// Of a pod and its task's view. A failure is of the last sandbox, which may be a successor's.
    pub(crate) fn of(
        pod: &'a Pod,
        view: Option<&'a View>,
        decision: &Decision,
        taken_over: bool,
    ) -> Self {
        let records = view.map(|view| view.records.as_slice()).unwrap_or_default();
        let record = records.iter().rev().find(|record| record.belongs_to(pod));
        let is_last = records.last().is_none_or(|last| last.belongs_to(pod));
        let failure = view.and_then(|view| view.failure.as_ref());
        Self {
            pod,
            record,
            failure: failure.filter(|failure| is_last && !is_transient(failure.reason)),
            wanted: decision.enrollment,
            why: decision.reason,
            taken_over,
        }
    }

    /// The sandbox in which the pod is Ready and in the mesh, if it is both.
    pub(crate) fn serves_in(&self) -> Option<&'a SandboxRef> {
        let record = self.record?;
        let stands = matches!(record.intent, Intent::Enrolled { .. });
        let serves = self.pod.is_ready && stands && !record.redirection.is_sidecar();
        serves.then_some(&record.sandbox)
    }

    /// What the pod is to bear; `None`: whatever it bears.
    pub(crate) fn wish(&self) -> Option<Mark> {
        let Some(record) = self.record else {
            return self.wish_without_sandbox();
        };
        if self.pod.terminal {
            return Some(Mark::Absent);
        }
        if record.uses_sidecar() {
            // Peers speak to its proxy, and to no ztunnel.
            return (!self.pod.is_terminating).then_some(Mark::Absent);
        }
        let is_wanted = self.wanted == Enrollment::Ambient;
        let was_refused = is_wanted && self.failure.is_some();
        match record.intent {
            // One that is to come back and cannot: each attempt goes through `Enrolling`, and must not flip it.
            Intent::Announcing | Intent::Leaving { .. } | Intent::Draining { .. } => {
                Some(if was_refused {
                    Mark::Pending
                } else {
                    Mark::Absent
                })
            }
            // It serves to its end.
            _ if self.pod.is_terminating => None,
            Intent::Enrolled { .. } => Some(Mark::Enabled),
            Intent::Adopted | Intent::Deleting { .. } => None,
            Intent::Out | Intent::Enrolling if was_refused => Some(Mark::Pending),
            Intent::Out => self.wish_outside(),
            Intent::Enrolling => None,
        }
    }

    fn wish_without_sandbox(&self) -> Option<Mark> {
        let serves = self.pod.is_terminating && !self.pod.terminal;
        (self.taken_over && !serves).then_some(Mark::Absent)
    }

    fn wish_outside(&self) -> Option<Mark> {
        match self.wanted {
            Enrollment::None | Enrollment::Sidecar => Some(Mark::Absent),
            // About to be enrolled, or nobody knows.
            Enrollment::Ambient | Enrollment::Unknown => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{boottime::BootInstant, testing};

    struct Case {
        pod: Pod,
        view: View,
        wanted: Enrollment,
        taken_over: bool,
    }

    fn standing(intent: Intent) -> Case {
        let mut view = View::default();
        let record = testing::record("c1");
        view.records.push(Record { intent, ..record });
        Case {
            pod: testing::pod("shop", "web"),
            view,
            wanted: Enrollment::Ambient,
            taken_over: true,
        }
    }

    fn without_sandbox() -> Case {
        let mut case = standing(Intent::Out);
        case.view.records.clear();
        case
    }

    impl Case {
        fn refused(mut self, reason: Reason) -> Self {
            self.view.failure = Some(Failure::new(reason, "no"));
            self
        }

        fn unwanted(self) -> Self {
            Self {
                wanted: Enrollment::None,
                ..self
            }
        }

        fn terminating(mut self) -> Self {
            self.pod.is_terminating = true;
            self
        }

        fn terminal(mut self) -> Self {
            self.pod.terminal = true;
            self
        }

        fn wish(&self) -> Option<Mark> {
            let decision = Decision {
                enrollment: self.wanted,
                reason: Reason::NotSelected,
                inputs: Vec::new(),
            };
            Standing::of(&self.pod, Some(&self.view), &decision, self.taken_over).wish()
        }
    }

    fn enrolled() -> Intent {
        Intent::Enrolled {
            fingerprint: "f".into(),
        }
    }

    fn leaving() -> [Intent; 2] {
        let since = BootInstant::now();
        [Intent::Leaving { since }, Intent::Draining { since }]
    }

    #[test]
    fn an_enrolled_pod_bears_enabled_whatever_fails_afterwards() {
        assert_eq!(standing(enrolled()).wish(), Some(Mark::Enabled));
        let away = standing(enrolled()).refused(Reason::DependencyUnavailable);
        assert_eq!(away.wish(), Some(Mark::Enabled));
    }

    #[test]
    fn a_pod_that_is_redirected_to_its_sidecar_bears_nothing() {
        let mut case = standing(enrolled());
        case.wanted = Enrollment::Sidecar;
        case.view.records[0].redirection = testing::to_sidecar();
        assert_eq!(case.wish(), Some(Mark::Absent));
        case.pod.is_ready = true;
        let decision = Decision {
            enrollment: Enrollment::Sidecar,
            reason: Reason::SidecarInjected,
            inputs: Vec::new(),
        };
        let standing = Standing::of(&case.pod, Some(&case.view), &decision, true);
        assert_eq!(standing.serves_in(), None);
    }

    #[test]
    fn a_pod_that_was_tried_and_not_acknowledged_bears_pending_before_and_during_the_next_attempt()
    {
        for intent in [Intent::Enrolling, Intent::Out] {
            let refused = standing(intent.clone()).refused(Reason::ZtunnelRefused);
            assert_eq!(refused.wish(), Some(Mark::Pending), "{intent:?}");
            assert_eq!(standing(intent).wish(), None, "the first attempt");
        }
    }

    #[test]
    fn a_passing_failure_is_no_refusal() {
        let passing = standing(Intent::Enrolling).refused(Reason::Starting);
        assert_eq!(passing.wish(), None);
    }

    #[test]
    fn what_leaves_or_is_outside_and_unwanted_bears_nothing() {
        for intent in leaving() {
            let wish = standing(intent.clone()).unwanted().wish();
            assert_eq!(wish, Some(Mark::Absent), "{intent:?}");
            let wish = standing(intent.clone()).unwanted().terminating().wish();
            assert_eq!(wish, Some(Mark::Absent), "{intent:?} in its last minute");
        }
        let refused = standing(Intent::Out)
            .unwanted()
            .refused(Reason::ZtunnelRefused);
        assert_eq!(refused.wish(), Some(Mark::Absent));
    }

    #[test]
    fn a_pod_that_comes_back_and_cannot_is_pending_between_its_attempts_too() {
        for intent in leaving() {
            let wish = standing(intent).refused(Reason::ZtunnelRefused).wish();
            assert_eq!(wish, Some(Mark::Pending));
        }
    }

    #[test]
    fn what_another_agent_did_and_what_ends_stays_as_it_is() {
        let since = BootInstant::now();
        for intent in [Intent::Adopted, Intent::Deleting { since }] {
            assert_eq!(standing(intent).wish(), None);
        }
        assert_eq!(standing(enrolled()).terminating().wish(), None);
        assert_eq!(without_sandbox().terminating().wish(), None);
    }

    #[test]
    fn a_pod_that_has_ended_bears_nothing() {
        assert_eq!(standing(enrolled()).terminal().wish(), Some(Mark::Absent));
        let ended = without_sandbox().terminal().terminating();
        assert_eq!(ended.wish(), Some(Mark::Absent));
    }

    #[test]
    fn a_pod_without_a_sandbox_bears_nothing_once_the_pods_of_before_are_known() {
        assert_eq!(without_sandbox().wish(), Some(Mark::Absent));
        let early = Case {
            taken_over: false,
            ..without_sandbox()
        };
        assert_eq!(early.wish(), None);
        assert_eq!(early.terminal().wish(), None);
    }

    #[test]
    fn where_nobody_knows_what_is_wanted_nothing_changes() {
        let unknown = Case {
            wanted: Enrollment::Unknown,
            ..standing(Intent::Out)
        };
        assert_eq!(unknown.wish(), None);
    }

    #[test]
    fn a_sandbox_of_a_predecessor_says_nothing_of_a_pod() {
        let mut case = standing(enrolled()).refused(Reason::ZtunnelRefused);
        case.pod.pod.uid = "successor".parse().unwrap();
        assert_eq!(case.wish(), Some(Mark::Absent));
    }
}
