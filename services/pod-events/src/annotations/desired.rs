//! Computes a pod's annotation, and the Events of its failures, from its status and its desired enrollment.
//!
//! Peers use HBONE with a pod that has the value `enabled`. The value changes only at enrollment, at withdrawal and
//! with a new sandbox. The value does not reflect whether a ztunnel is running, as with Istio's agent
//! (services/docs/facts/istio-ambient.md, 1.7 and 3.1).

use inpod_types::{Enrollment, Failure, PodUid, Reason, SandboxRef};

use crate::{
    checkpoint::{Intent, Record},
    decide::Decision,
    pod::Pod,
    status::{
        Annotation, DesiredStatus, EventKind,
        condition::{Condition, DesiredCondition},
    },
    tasks::{View, is_transient},
};

const NOT_IN_MESH: &str = "The pod is not in the mesh";

#[derive(Clone, Copy, Debug)]
pub(crate) struct PodStatus<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) record: Option<&'a Record>,
    pub(crate) failure: Option<&'a Failure>,
    pub(crate) decision: Decision,
    /// The runtime class, if nothing else keeps the pod outside the mesh.
    pub(crate) sandboxed_class: Option<&'a str>,
    /// Set once the pods that ran before this process are adopted: from then on, a pod without a record has no sandbox.
    pub(crate) adopted: bool,
}

/// The last failure of a pod that an Event reported, until the pod joins the mesh.
#[derive(Debug, Default)]
pub(super) struct ReportedFailure {
    reason: Option<Reason>,
    /// Cleared when the failure disappears, so that a returning failure is reported again.
    is_current: bool,
}

impl ReportedFailure {
    pub(super) fn is_empty(&self) -> bool {
        self.reason.is_none()
    }
}

/// The kind, the reason and the message of an Event.
type FailureEvent = (EventKind, Reason, String);

impl<'a> PodStatus<'a> {
    /// Combines a pod with its task's view. The failure of the view belongs to the last sandbox, which may be a
    /// successor's.
    pub(crate) fn of(pod: &'a Pod, view: &'a View, decision: &Decision, adopted: bool) -> Self {
        let mut latest = view.records.iter().rev();
        let record = latest.find(|record| record.belongs_to(pod));
        let is_last = view.records.last().is_none_or(|last| last.belongs_to(pod));
        let has_uid = |uid: &PodUid| pod.has_uid(uid);
        let last = view.last_failure(|refusal| refusal.concerns(decision, has_uid));
        // A refusal without a failure is an ADD in progress, whose failure is reported again.
        let failure = view.current_failure().and(last);
        Self {
            pod,
            record: record.map(|record| &**record),
            failure: failure.filter(|failure| is_last && !is_transient(failure.reason)),
            decision: *decision,
            sandboxed_class: None,
            adopted,
        }
    }

    fn is_enrolled(&self) -> bool {
        let is_enrolled = |record: &Record| matches!(record.intent, Intent::Enrolled { .. });
        self.record.is_some_and(is_enrolled)
    }

    /// Returns the sandbox in which the pod is Ready and in the mesh.
    pub(crate) fn serving_sandbox(&self) -> Option<&'a SandboxRef> {
        let record = self.record?;
        let serves = self.pod.is_ready && self.is_enrolled() && !record.redirection.is_sidecar();
        serves.then_some(&record.sandbox)
    }

    pub(crate) fn desired(&self) -> DesiredStatus {
        DesiredStatus {
            annotation: self.annotation(),
            condition: self.condition(),
        }
    }

    /// Returns the condition about the proof of the pod's membership; `None` if any value is acceptable. A
    /// pod that is not to be in the mesh has the condition only if the pod is gated or demands the mesh.
    fn condition(&self) -> Option<DesiredCondition> {
        let ends = self.pod.terminal || self.pod.is_terminating;
        let is_asked = self.pod.is_gated || self.decision.demand.is_made();
        let wanted = self.decision.enrollment;
        let is_kept = self.is_enrolled() && self.decision.is_unmet();
        if ends || wanted == Enrollment::Unknown {
            return None;
        }
        if wanted == Enrollment::None && !is_kept {
            if self.is_enrolled() {
                // The pod is about to leave, and one patch then changes annotation and condition.
                return None;
            }
            let reason = self.decision.reason;
            let unmet = || DesiredCondition::Set(Condition::unmet(reason, NOT_IN_MESH));
            return Some(if is_asked {
                unmet()
            } else {
                DesiredCondition::Absent
            });
        }
        if let Some(failure) = self.failure {
            return Some(DesiredCondition::Set(Condition::failed(failure)));
        }
        // Another agent's rules, and rules from before this process, are not proven yet.
        let is_proven = self.adopted && self.is_enrolled();
        is_proven.then(|| {
            let reason = if is_kept {
                Reason::MeshRequired
            } else {
                self.decision.reason
            };
            DesiredCondition::Set(Condition::met(reason, self.proof()))
        })
    }

    fn proof(&self) -> &'static str {
        let uses_sidecar = self.record.is_some_and(Record::uses_sidecar);
        if uses_sidecar {
            "The rules were read back from the kernel"
        } else {
            "ztunnel has acknowledged the pod, and the rules were read back from the kernel"
        }
    }

    /// Returns `None` if any value is acceptable.
    fn annotation(&self) -> Option<Annotation> {
        use Annotation::{Absent, Enabled, Pending};

        let wanted = self.decision.enrollment;
        // A terminating pod serves until it ends.
        let serves_last = self.pod.is_terminating && !self.pod.terminal;
        let Some(record) = self.record else {
            return (self.adopted && !serves_last).then_some(Absent);
        };
        if self.pod.terminal {
            return Some(Absent);
        }
        if record.uses_sidecar() {
            // Peers connect to the sidecar directly, without ztunnel.
            return (!serves_last).then_some(Absent);
        }
        let has_failed = self.failure.is_some() && wanted == Enrollment::Ambient;
        let is_unwanted = matches!(wanted, Enrollment::None | Enrollment::Sidecar);
        // A pod that should rejoin but fails passes through `Enrolling` at each attempt, which must not flip the value.
        let outside = if has_failed { Pending } else { Absent };
        match record.intent {
            Intent::Announcing | Intent::Leaving { .. } | Intent::Draining { .. } => Some(outside),
            _ if serves_last => None,
            Intent::Enrolled { .. } => Some(Enabled),
            Intent::Out | Intent::Enrolling if has_failed => Some(outside),
            Intent::Out if is_unwanted => Some(outside),
            // The pod is about to be enrolled or to end, or its decision is unknown.
            Intent::Out | Intent::Enrolling | Intent::Deleting { .. } => None,
            Intent::Adopted | Intent::Legacy | Intent::ServedLegacy => None,
        }
    }

    /// Returns the failure of the pod or, without a failure, the sandboxed runtime.
    fn problem(&self) -> Option<(Reason, String)> {
        let failure = self.failure.map(|it| (it.reason, it.message.clone()));
        failure.or_else(|| {
            let message = format!(
                "Not enrolled: the runtime class is {}",
                self.sandboxed_class?
            );
            Some((Reason::SandboxedRuntime, message))
        })
    }

    /// Selects the problems that are worth an Event: new or changed problems, and the end of a problem.
    pub(super) fn event(&self, reported: &mut ReportedFailure) -> Option<FailureEvent> {
        let Some((problem, message)) = self.problem() else {
            reported.is_current = false;
            let reason = reported.reason.take_if(|_| self.is_enrolled())?;
            let message = format!("Joined the mesh after {}", reason.name());
            return Some((EventKind::Normal, self.decision.reason, message));
        };
        if reported.is_current && reported.reason == Some(problem) {
            return None;
        }
        (reported.is_current, reported.reason) = (true, Some(problem));
        Some((EventKind::Warning, problem, message))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{boottime::BootInstant, decide::Demand, tasks::Refusal, testing};

    struct Case {
        pod: Pod,
        view: View,
        decision: Decision,
        adopted: bool,
    }

    fn case(intent: Intent) -> Case {
        let mut view = View::default();
        let record = testing::record("c1");
        view.records.push(Record { intent, ..record }.into());
        Case {
            pod: testing::pod("shop", "web"),
            view,
            decision: Decision {
                enrollment: Enrollment::Ambient,
                reason: Reason::LabelOnPod,
                demand: Demand::None,
            },
            adopted: true,
        }
    }

    fn without_sandbox() -> Case {
        let mut case = case(Intent::Out);
        case.view.records.clear();
        case
    }

    impl Case {
        fn failed(mut self, reason: Reason) -> Self {
            self.view.failure = Some(Failure::new(reason, "no"));
            self
        }

        fn wanted(mut self, enrollment: Enrollment) -> Self {
            self.decision.enrollment = enrollment;
            self
        }

        fn terminating(mut self) -> Self {
            self.pod.is_terminating = true;
            self
        }

        fn terminal(mut self) -> Self {
            self.pod.terminal = true;
            self
        }

        fn status(&self) -> PodStatus<'_> {
            PodStatus::of(&self.pod, &self.view, &self.decision, self.adopted)
        }

        #[track_caller]
        fn expect(&self, desired: Option<Annotation>) {
            assert_eq!(self.status().annotation(), desired, "{:?}", self.view);
        }
    }

    fn enrolled() -> Intent {
        Intent::Enrolled {
            fingerprint: "f".into(),
        }
    }

    #[test]
    fn a_pod_redirected_to_its_sidecar_has_no_annotation() {
        let mut case = case(enrolled()).wanted(Enrollment::Sidecar);
        Arc::make_mut(&mut case.view.records[0]).redirection = testing::to_sidecar();
        case.pod.is_ready = true;
        case.expect(Some(Annotation::Absent));
        assert!(case.status().serving_sandbox().is_none());
    }

    #[test]
    fn a_refused_pod_is_pending_before_and_during_the_next_attempt() {
        for intent in [Intent::Enrolling, Intent::Out] {
            let first_attempt = case(intent.clone());
            first_attempt.expect(None);
            let starting = case(intent.clone()).failed(Reason::Starting);
            starting.expect(None);
            let refused = case(intent).failed(Reason::ZtunnelRefused);
            refused.expect(Some(Annotation::Pending));
        }
        let enrolled = case(enrolled()).failed(Reason::ZtunnelRefused);
        enrolled.expect(Some(Annotation::Enabled));
    }

    #[test]
    fn a_leaving_pod_has_no_annotation_unless_it_fails_to_rejoin() {
        let since = BootInstant::now();
        let leaving = [Intent::Leaving { since }, Intent::Draining { since }];
        for intent in leaving.into_iter().chain([Intent::Announcing]) {
            let unwanted = case(intent.clone()).wanted(Enrollment::None);
            unwanted.expect(Some(Annotation::Absent));
            unwanted.terminating().expect(Some(Annotation::Absent));
            let refused = case(intent).failed(Reason::ZtunnelRefused);
            refused.expect(Some(Annotation::Pending));
        }
    }

    #[test]
    fn a_netns_not_found_after_a_refused_add_is_no_event() {
        let mut reported = ReportedFailure::default();
        let mut case = without_sandbox().failed(Reason::ZtunnelRefused);
        let failure = Failure::new(Reason::ZtunnelRefused, "no");
        let uid = Some(case.pod.pod.uid.clone());
        case.view.refusal = Some(Arc::new(Refusal { uid, failure }));
        let event = case.status().event(&mut reported).unwrap();
        assert_eq!(event.1, Reason::ZtunnelRefused);
        let case = case.failed(Reason::NetnsNotFound);
        assert_eq!(case.status().event(&mut reported), None);
        let away = case.failed(Reason::DependencyUnavailable);
        let event = away.status().event(&mut reported).unwrap();
        assert_eq!(event.1, Reason::DependencyUnavailable);
        let mut case = away.failed(Reason::NetnsNotFound);
        case.pod.pod.uid = "successor".parse().unwrap();
        let event = case.status().event(&mut reported).unwrap();
        assert_eq!(event.1, Reason::NetnsNotFound);
    }

    #[test]
    fn a_sandboxed_runtime_is_one_event_with_the_class() {
        let mut reported = ReportedFailure::default();
        let case = case(Intent::Out).wanted(Enrollment::None);
        assert_eq!(case.status().event(&mut reported), None);
        let sandboxed = PodStatus {
            sandboxed_class: Some("kata-qemu"),
            ..case.status()
        };
        let (kind, reason, message) = sandboxed.event(&mut reported).unwrap();
        let expected = (EventKind::Warning, Reason::SandboxedRuntime);
        assert_eq!((kind, reason), expected);
        assert!(message.contains("kata-qemu"), "{message}");
        assert_eq!(sandboxed.event(&mut reported), None);
    }

    /// Returns the status and the reason of the condition; `None` for the removal of the condition.
    fn condition(case: &Case) -> Option<Option<(String, String)>> {
        let desired = case.status().condition()?;
        let shown = desired.shown().cloned();
        Some(shown.map(|shown| (shown.status, shown.reason)))
    }

    #[track_caller]
    fn expect_condition(case: &Case, status: &str, reason: &str) {
        let expected = Some(Some((status.to_owned(), reason.to_owned())));
        assert_eq!(condition(case), expected, "{:?}", case.view);
    }

    #[test]
    fn a_condition_is_true_only_for_a_proven_pod() {
        let mut proven = case(enrolled());
        expect_condition(&proven, "True", "LabelOnPod");
        proven.adopted = false;
        assert_eq!(condition(&proven), None, "not verified by this process");
        for intent in [Intent::Out, Intent::Enrolling, Intent::Adopted] {
            assert_eq!(condition(&case(intent.clone())), None, "{intent:?}");
            let refused = case(intent).failed(Reason::ZtunnelRefused);
            expect_condition(&refused, "False", "ZtunnelRefused");
        }
        let mut unserved = case(enrolled());
        let failure = Failure::new(Reason::ZtunnelLost, "gone");
        unserved.view.unserved = Some(Arc::new(failure));
        expect_condition(&unserved, "False", "ZtunnelLost");
        let mut taken = case(enrolled());
        taken.view.blocked = Some(Failure::new(Reason::ListenerTaken, "pid 7"));
        expect_condition(&taken, "False", "ListenerTaken");
        expect_condition(
            &case(enrolled()).failed(Reason::RulesContested),
            "False",
            "RulesContested",
        );
        assert_eq!(condition(&case(enrolled()).terminating()), None);
        assert_eq!(condition(&case(enrolled()).terminal()), None);
    }

    #[test]
    fn a_pod_outside_the_mesh_has_a_condition_only_if_asked_for() {
        let outside = || case(Intent::Out).wanted(Enrollment::None);
        assert_eq!(condition(&outside()), Some(None));
        let unannounced = case(enrolled()).wanted(Enrollment::None);
        assert_eq!(condition(&unannounced), None);
        let leaving = case(Intent::Announcing).wanted(Enrollment::None);
        assert_eq!(condition(&leaving), Some(None));
        let mut gated = outside();
        gated.pod.is_gated = true;
        gated.decision.reason = Reason::HostNetwork;
        expect_condition(&gated, "False", "HostNetwork");
        let mut demanding = outside();
        demanding.decision.demand = Demand::Mesh;
        demanding.decision.reason = Reason::HasSidecar;
        expect_condition(&demanding, "False", "HasSidecar");
        let mut kept = case(enrolled()).wanted(Enrollment::None);
        kept.decision.demand = Demand::Mesh;
        kept.decision.reason = Reason::NamespaceExcluded;
        expect_condition(&kept, "True", "MeshRequired");
        assert_eq!(condition(&outside().wanted(Enrollment::Unknown)), None);
    }

    #[test]
    fn a_pod_outside_the_mesh_keeps_its_annotation_while_undecided() {
        case(Intent::Out).wanted(Enrollment::Unknown).expect(None);
        let unwanted = case(Intent::Out).wanted(Enrollment::None);
        let refused = unwanted.failed(Reason::ZtunnelRefused);
        refused.expect(Some(Annotation::Absent));
    }

    #[test]
    fn pods_of_another_agent_and_ending_pods_keep_their_annotation() {
        let since = BootInstant::now();
        let legacy = Intent::ServedLegacy;
        for intent in [Intent::Adopted, legacy, Intent::Deleting { since }] {
            case(intent).expect(None);
        }
        for case in [case(enrolled()), without_sandbox()] {
            let terminating = case.terminating();
            terminating.expect(None);
            terminating.terminal().expect(Some(Annotation::Absent));
        }
    }

    #[test]
    fn a_pod_without_a_sandbox_has_no_annotation_after_adoption() {
        let mut case = without_sandbox();
        case.expect(Some(Annotation::Absent));
        case.adopted = false;
        case.expect(None);
        case.terminal().expect(None);
    }

    #[test]
    fn a_sandbox_of_a_predecessor_does_not_affect_a_pod() {
        let mut case = case(enrolled()).failed(Reason::ZtunnelRefused);
        case.pod.pod.uid = "successor".parse().unwrap();
        case.expect(Some(Annotation::Absent));
    }

    #[test]
    fn a_failure_is_reported_when_new_changed_repeated_and_resolved() {
        let (refused, away) = (Reason::ZtunnelRefused, Reason::DependencyUnavailable);
        let warning = |reason| Some((EventKind::Warning, reason));
        let joined = Some((EventKind::Normal, Reason::LabelOnPod));
        let mut reported = ReportedFailure::default();
        for (intent, failure, expected) in [
            (Intent::Out, None, None),
            (Intent::Out, Some(Reason::NotSeeded), None),
            (Intent::Out, Some(refused), warning(refused)),
            (Intent::Enrolling, Some(refused), None),
            (Intent::Out, Some(away), warning(away)),
            (Intent::Out, Some(Reason::Starting), None),
            (Intent::Out, Some(away), warning(away)),
            (enrolled(), None, joined),
            (enrolled(), None, None),
        ] {
            let step = format!("{intent:?} {failure:?}");
            let mut case = case(intent);
            case.view.failure = failure.map(|reason| Failure::new(reason, "no"));
            let event = case.status().event(&mut reported);
            let event = event.map(|(kind, reason, _)| (kind, reason));
            assert_eq!(event, expected, "{step}");
        }
    }
}
