//! Computes a pod's annotation from its status and its desired enrollment.
//!
//! Peers use HBONE with a pod that has the value `enabled`. The value changes only at enrollment, at withdrawal and
//! with a new sandbox. The value does not reflect whether a ztunnel is running, as with Istio's agent
//! (services/docs/facts/istio-ambient.md, 1.7 and 3.1).

use inpod_types::{Enrollment, Failure, Reason, SandboxRef};

use crate::{
    checkpoint::{Intent, Record},
    decide::Decision,
    pipeline::is_transient,
    pod::Pod,
    status::Annotation,
    task::View,
};

#[derive(Clone, Copy, Debug)]
pub(crate) struct PodStatus<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) record: Option<&'a Record>,
    pub(crate) failure: Option<&'a Failure>,
    pub(crate) wanted: Enrollment,
    pub(crate) why: Reason,
    /// Set once the pods that ran before this process are adopted: from then on, a pod without a record has no sandbox.
    pub(crate) adoption_done: bool,
}

impl<'a> PodStatus<'a> {
    /// Combines a pod with its task's view. The failure of the view belongs to the last sandbox, which may be a
    /// successor's.
    pub(crate) fn of(
        pod: &'a Pod,
        view: Option<&'a View>,
        decision: &Decision,
        adoption_done: bool,
    ) -> Self {
        let records = view.map(|view| view.records.as_slice()).unwrap_or_default();
        let mut latest = records.iter().rev();
        let record = latest.find(|record| record.belongs_to(pod));
        let is_last = records.last().is_none_or(|last| last.belongs_to(pod));
        let failure = view.and_then(|view| view.failure.as_ref());
        Self {
            pod,
            record: record.map(|record| &**record),
            failure: failure.filter(|failure| is_last && !is_transient(failure.reason)),
            wanted: decision.enrollment,
            why: decision.reason,
            adoption_done,
        }
    }

    /// Returns the sandbox in which the pod is Ready and in the mesh.
    pub(crate) fn serving_sandbox(&self) -> Option<&'a SandboxRef> {
        let record = self.record?;
        let is_enrolled = matches!(record.intent, Intent::Enrolled { .. });
        let serves = self.pod.is_ready && is_enrolled && !record.redirection.is_sidecar();
        serves.then_some(&record.sandbox)
    }

    /// Returns `None` if any value is acceptable.
    pub(crate) fn desired(&self) -> Option<Annotation> {
        let Some(record) = self.record else {
            return self.desired_without_sandbox();
        };
        if self.pod.terminal {
            return Some(Annotation::Absent);
        }
        if record.uses_sidecar() {
            // Peers connect to the sidecar directly, without ztunnel.
            return (!self.pod.is_terminating).then_some(Annotation::Absent);
        }
        let is_wanted = self.wanted == Enrollment::Ambient;
        let has_failed = is_wanted && self.failure.is_some();
        match record.intent {
            // A pod that should rejoin but fails passes through `Enrolling` at each attempt, which must not flip the
            // value.
            Intent::Announcing | Intent::Leaving { .. } | Intent::Draining { .. } => {
                Some(if has_failed {
                    Annotation::Pending
                } else {
                    Annotation::Absent
                })
            }
            // A terminating pod serves until it ends.
            _ if self.pod.is_terminating => None,
            Intent::Enrolled { .. } => Some(Annotation::Enabled),
            Intent::Adopted | Intent::Legacy | Intent::ServedLegacy | Intent::Deleting { .. } => {
                None
            }
            Intent::Out | Intent::Enrolling if has_failed => Some(Annotation::Pending),
            Intent::Out => self.desired_when_out(),
            Intent::Enrolling => None,
        }
    }

    fn desired_without_sandbox(&self) -> Option<Annotation> {
        let serves = self.pod.is_terminating && !self.pod.terminal;
        (self.adoption_done && !serves).then_some(Annotation::Absent)
    }

    fn desired_when_out(&self) -> Option<Annotation> {
        match self.wanted {
            Enrollment::None | Enrollment::Sidecar => Some(Annotation::Absent),
            // The pod is about to be enrolled, or its decision is unknown.
            Enrollment::Ambient | Enrollment::Unknown => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{boottime::BootInstant, testing};

    struct Case {
        pod: Pod,
        view: View,
        wanted: Enrollment,
        adoption_done: bool,
    }

    fn status(intent: Intent) -> Case {
        let mut view = View::default();
        let record = testing::record("c1");
        view.records.push(Record { intent, ..record }.into());
        Case {
            pod: testing::pod("shop", "web"),
            view,
            wanted: Enrollment::Ambient,
            adoption_done: true,
        }
    }

    fn without_sandbox() -> Case {
        let mut case = status(Intent::Out);
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

        fn desired(&self) -> Option<Annotation> {
            let decision = Decision {
                enrollment: self.wanted,
                reason: Reason::NotSelected,
            };
            PodStatus::of(&self.pod, Some(&self.view), &decision, self.adoption_done).desired()
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
    fn an_enrolled_pod_keeps_enabled_whatever_fails_afterwards() {
        assert_eq!(status(enrolled()).desired(), Some(Annotation::Enabled));
        let away = status(enrolled()).refused(Reason::DependencyUnavailable);
        assert_eq!(away.desired(), Some(Annotation::Enabled));
    }

    #[test]
    fn a_pod_that_is_redirected_to_its_sidecar_has_no_annotation() {
        let mut case = status(enrolled());
        case.wanted = Enrollment::Sidecar;
        Arc::make_mut(&mut case.view.records[0]).redirection = testing::to_sidecar();
        assert_eq!(case.desired(), Some(Annotation::Absent));
        case.pod.is_ready = true;
        let decision = Decision {
            enrollment: Enrollment::Sidecar,
            reason: Reason::SidecarInjected,
        };
        let status = PodStatus::of(&case.pod, Some(&case.view), &decision, true);
        assert_eq!(status.serving_sandbox(), None);
    }

    #[test]
    fn a_pod_that_was_not_acknowledged_is_pending_before_and_during_the_next_attempt() {
        for intent in [Intent::Enrolling, Intent::Out] {
            let refused = status(intent.clone()).refused(Reason::ZtunnelRefused);
            assert_eq!(refused.desired(), Some(Annotation::Pending), "{intent:?}");
            assert_eq!(status(intent).desired(), None, "the first attempt");
        }
    }

    #[test]
    fn a_passing_failure_is_no_refusal() {
        let passing = status(Intent::Enrolling).refused(Reason::Starting);
        assert_eq!(passing.desired(), None);
    }

    #[test]
    fn a_pod_that_leaves_or_should_stay_outside_has_no_annotation() {
        for intent in leaving() {
            let desired = status(intent.clone()).unwanted().desired();
            assert_eq!(desired, Some(Annotation::Absent), "{intent:?}");
            let desired = status(intent.clone()).unwanted().terminating().desired();
            assert_eq!(
                desired,
                Some(Annotation::Absent),
                "{intent:?} in its last minute"
            );
        }
        let refused = status(Intent::Out)
            .unwanted()
            .refused(Reason::ZtunnelRefused);
        assert_eq!(refused.desired(), Some(Annotation::Absent));
    }

    #[test]
    fn a_pod_that_comes_back_and_cannot_is_pending_between_its_attempts_too() {
        for intent in leaving() {
            let desired = status(intent).refused(Reason::ZtunnelRefused).desired();
            assert_eq!(desired, Some(Annotation::Pending));
        }
    }

    #[test]
    fn pods_of_another_agent_and_pods_that_end_keep_their_annotation() {
        let since = BootInstant::now();
        let legacy = Intent::ServedLegacy;
        for intent in [Intent::Adopted, legacy, Intent::Deleting { since }] {
            assert_eq!(status(intent).desired(), None);
        }
        assert_eq!(status(enrolled()).terminating().desired(), None);
        assert_eq!(without_sandbox().terminating().desired(), None);
    }

    #[test]
    fn a_pod_that_has_ended_has_no_annotation() {
        assert_eq!(
            status(enrolled()).terminal().desired(),
            Some(Annotation::Absent)
        );
        let ended = without_sandbox().terminal().terminating();
        assert_eq!(ended.desired(), Some(Annotation::Absent));
    }

    #[test]
    fn a_pod_without_a_sandbox_has_no_annotation_once_adoption_is_done() {
        assert_eq!(without_sandbox().desired(), Some(Annotation::Absent));
        let early = Case {
            adoption_done: false,
            ..without_sandbox()
        };
        assert_eq!(early.desired(), None);
        assert_eq!(early.terminal().desired(), None);
    }

    #[test]
    fn while_the_decision_is_unknown_nothing_changes() {
        let unknown = Case {
            wanted: Enrollment::Unknown,
            ..status(Intent::Out)
        };
        assert_eq!(unknown.desired(), None);
    }

    #[test]
    fn a_sandbox_of_a_predecessor_does_not_affect_a_pod() {
        let mut case = status(enrolled()).refused(Reason::ZtunnelRefused);
        case.pod.pod.uid = "successor".parse().unwrap();
        assert_eq!(case.desired(), Some(Annotation::Absent));
    }
}
