//! The remedy of an explanation, and the wait of an ADD.

use inpod_proto::podevents::v1::{AddWait as WireWait, PodState, RulesReport, ZtunnelReport};
use inpod_types::Reason;

use super::{PodInfo, bypass::is_wanted};
use crate::{
    counters::Phase,
    tasks::{AddWait, Synced, state},
};

const AWAIT_ADD: &str = "Wait for the pod's CNI ADD. If the pod does not start, read its Events: the plugin may not reach pod-events.";
const AWAIT_NEXT_STEP: &str = "Wait: inpod takes the next step by itself.";
const AWAIT_REPAIR: &str = "Wait: inpod restores the rules by itself. Find out what changed them.";

/// Returns the remedy of the failure or, if there is none, of the decision. A decision for the mesh has the remedy
/// "Nothing to do", which holds only for a pod in the desired state.
pub(super) fn describe(
    known: &PodInfo,
    rules: Option<&RulesReport>,
    ztunnels: &[ZtunnelReport],
    unavailable: &[String],
) -> &'static str {
    let decided = known.decision.reason.remedy();
    if let Some(failure) = known.failure() {
        return failure.reason.remedy();
    }
    let wanted = is_wanted(known);
    if let Some(wait) = known.wait.filter(|_| wanted) {
        return remedy_of_wait(wait.phase, ztunnels);
    }
    let is_unacknowledged = known
        .current()
        .is_some_and(|record| !record.redirection.is_sidecar())
        && ztunnels.iter().all(|it| it.acknowledged_at.is_none());
    match state(known.current()) {
        PodState::Withdrawing | PodState::Deleting => AWAIT_NEXT_STEP,
        _ if !wanted => decided,
        PodState::Enrolled if rules.is_some_and(|rules| !rules.differences.is_empty()) => {
            AWAIT_REPAIR
        }
        PodState::Enrolled if !unavailable.is_empty() => Reason::DependencyUnavailable.remedy(),
        PodState::Enrolled if is_unacknowledged => reason_without_ztunnel(ztunnels).remedy(),
        PodState::Enrolled if !known.view.is_step_due() => decided,
        _ if known.current().is_none() => AWAIT_ADD,
        PodState::Unspecified | PodState::Out | PodState::Enrolling | PodState::Enrolled => {
            AWAIT_NEXT_STEP
        }
    }
}

/// Returns the reason why no ztunnel has acknowledged a pod.
fn reason_without_ztunnel(ztunnels: &[ZtunnelReport]) -> Reason {
    if ztunnels.is_empty() {
        Reason::ZtunnelNeverConnected
    } else {
        Reason::ZtunnelSilent
    }
}

fn remedy_of_wait(phase: Phase, ztunnels: &[ZtunnelReport]) -> &'static str {
    let reason = match phase {
        Phase::Queue => Reason::Overloaded,
        Phase::Decide => Reason::SourceUnavailable,
        Phase::HandOver => reason_without_ztunnel(ztunnels),
        Phase::Claim | Phase::Rules | Phase::Other => Reason::DependencyUnavailable,
    };
    reason.remedy()
}

pub(super) fn wait_to_wire(wait: AddWait, synced: &Synced) -> WireWait {
    let waits_for = match wait.phase {
        Phase::Queue => "another ADD or the pod's task",
        Phase::Decide => "the source of pods",
        Phase::HandOver => "ztunnel",
        Phase::Claim | Phase::Rules => "netconfig",
        Phase::Other if synced.netconfig.is_none() => "netconfig",
        Phase::Other if synced.broker.is_none() => "ztunnel-broker",
        Phase::Other => "pod-events",
    };
    WireWait {
        waits_for: waits_for.to_owned(),
        since: Some(wait.since.into()),
        until: Some(wait.until.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::SystemTime};

    use inpod_types::{Enrollment, Failure};

    use super::*;
    use crate::{
        checkpoint::{Intent, Record},
        explain::tests::running_pod,
        tasks::Refusal,
        testing::{enrolled, record},
    };

    fn known(intent: Option<Intent>) -> PodInfo {
        let record = |intent| Record {
            intent,
            ..record("c1")
        };
        running_pod(
            Enrollment::Ambient,
            intent.map(record).into_iter().collect(),
        )
    }

    fn ztunnel(acknowledges: bool) -> ZtunnelReport {
        ZtunnelReport {
            acknowledged_at: acknowledges.then(|| SystemTime::now().into()),
            ..ZtunnelReport::default()
        }
    }

    #[test]
    fn nothing_is_to_do_only_for_a_pod_that_is_as_desired() {
        let served = [ztunnel(true)];
        let differ = RulesReport {
            differences: vec!["a route is missing".to_owned()],
            ..RulesReport::default()
        };
        let in_sync = RulesReport::default();
        let silent = "netconfig: the rules: no answer".to_owned();
        let of =
            |intent, rules, ztunnels: &[_]| describe(&known(intent), Some(rules), ztunnels, &[]);
        let nothing = Reason::LabelOnPod.remedy();
        assert_eq!(of(Some(enrolled()), &in_sync, &served), nothing);
        assert_eq!(of(Some(enrolled()), &differ, &served), AWAIT_REPAIR);
        let absent = Reason::ZtunnelNeverConnected.remedy();
        assert_eq!(of(Some(enrolled()), &in_sync, &[]), absent);
        let mute = Reason::ZtunnelSilent.remedy();
        assert_eq!(of(Some(enrolled()), &in_sync, &[ztunnel(false)]), mute);
        assert_eq!(of(None, &in_sync, &[]), AWAIT_ADD);
        assert_eq!(of(Some(Intent::Enrolling), &in_sync, &[]), AWAIT_NEXT_STEP);
        assert_eq!(
            of(Some(Intent::Announcing), &in_sync, &served),
            AWAIT_NEXT_STEP
        );
        let unanswered = describe(&known(Some(enrolled())), None, &served, &[silent]);
        assert_eq!(unanswered, Reason::DependencyUnavailable.remedy());
        let mut retried = known(Some(enrolled()));
        retried.view.next_attempt = Some(SystemTime::now());
        let described = describe(&retried, Some(&in_sync), &served, &[]);
        assert_eq!(described, AWAIT_NEXT_STEP);
    }

    #[test]
    fn a_waiting_add_names_its_service_unless_it_was_refused_before() {
        let mut waits = known(Some(Intent::Enrolling));
        let since = SystemTime::now();
        let wait = |phase| AddWait {
            phase,
            since,
            until: since,
        };
        waits.wait = Some(wait(Phase::HandOver));
        let absent = Reason::ZtunnelNeverConnected.remedy();
        assert_eq!(describe(&waits, None, &[], &[]), absent);
        let shown = |phase| wait_to_wire(wait(phase), &Synced::default()).waits_for;
        assert_eq!(shown(Phase::HandOver), "ztunnel");
        assert_eq!(shown(Phase::Other), "netconfig");
        let refusal = |uid: &str| {
            let failure = Failure::new(Reason::NetnsInUse, "taken");
            let uid = Some(uid.parse().unwrap());
            Some(Arc::new(Refusal { uid, failure }))
        };
        waits.view.refusal = refusal("of-an-earlier-pod");
        assert_eq!(describe(&waits, None, &[], &[]), absent);
        waits.view.refusal = refusal(record("c1").pod.uid.as_str());
        let in_use = Reason::NetnsInUse.remedy();
        assert_eq!(describe(&waits, None, &[], &[]), in_use);
        waits.decision.enrollment = Enrollment::None;
        assert!(waits.failure().is_none(), "the pod is no longer wanted");
    }
}
