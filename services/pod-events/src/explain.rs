//! What is known of a pod, put into words for people.

use daemon::Readiness;
use inpod_proto::{
    addresses_to,
    netconfig::v1::{InspectNetnsResponse, VerifyRulesResponse},
    podevents::v1 as wire,
    types::v1 as types,
    ztunnelbroker::v1::{ListWorkloadsResponse, WorkloadPhase},
};
use workload::{Enrollment, PodRef, Reason, keys};

use crate::{
    checkpoint::{Intent, Record},
    decide::Decision,
    registry::Registry,
    source::PodKey,
    task::{Shared, View},
    timeline::Entry,
};

/// Everything that pod-events itself knows of a pod; `None` where neither source nor checkpoint knows it.
pub(crate) fn of(
    shared: &Shared,
    registry: &Registry,
    key: &PodKey,
) -> Option<wire::ExplainPodResponse> {
    let view = registry.view(key).unwrap_or_default();
    let inventory = shared.source.inventory();
    let shown = inventory.pod(key);
    let pod = shown
        .map(|pod| pod.pod.clone())
        .or_else(|| Some(view.records.last()?.pod.clone()))?;
    let guessed = view.records.last().is_some_and(|record| record.let_through);
    let unanswered = inventory.namespaces_exist && !inventory.is_complete();
    let decision = match shown {
        Some(pod) => shared.decide(pod),
        None if guessed || unanswered => undecided(),
        None => gone(),
    };
    Some(answer(&pod, decision, &view))
}

/// A pod that the source does not show (any more).
fn gone() -> Decision {
    Decision {
        enrollment: Enrollment::None,
        reason: Reason::PodUnknown,
        inputs: Vec::new(),
    }
}

/// A pod of which Kubernetes has not said anything (yet).
fn undecided() -> Decision {
    Decision {
        enrollment: Enrollment::Unknown,
        reason: Reason::SourceUnavailable,
        inputs: Vec::new(),
    }
}

fn answer(pod: &PodRef, decision: Decision, view: &View) -> wire::ExplainPodResponse {
    let current = view.records.last();
    let reason = view
        .failure
        .as_ref()
        .map_or(decision.reason, |failure| failure.reason);
    let state = state(current);
    wire::ExplainPodResponse {
        pod: Some(pod.into()),
        desired: types::Enrollment::from(decision.enrollment).into(),
        reason: decision.reason.number(),
        remedy: reason.remedy().to_owned(),
        inputs: decision
            .inputs
            .into_iter()
            .map(|(name, value)| wire::Input { name, value })
            .collect(),
        state: state.into(),
        last_failure: view.failure.as_ref().map(Into::into),
        sandbox: current.map(|record| (&record.sandbox).into()),
        netns: current.and_then(|record| record.netns_id).map(Into::into),
        netns_path: current
            .map(|record| record.netns.path.display().to_string())
            .unwrap_or_default(),
        addresses: current
            .map(|record| addresses_to(&record.addresses))
            .unwrap_or_default(),
        rules: None,
        ztunnels: Vec::new(),
        timeline: view.timeline.entries().map(entry).collect(),
        redirection_annotation: annotation(state),
        shown_annotation: String::new(),
        bypasses: Vec::new(),
        next_attempt_at: view.next_attempt.map(Into::into),
        next_step: String::new(),
        drift: Vec::new(),
    }
}

/// Where a pod stands, by its current sandbox.
pub(crate) fn state(current: Option<&Record>) -> wire::PodState {
    match current.map(|record| &record.intent) {
        None | Some(Intent::Out) => wire::PodState::Out,
        Some(Intent::Enrolling | Intent::Inherited) => wire::PodState::Enrolling,
        Some(Intent::Enrolled { .. }) => wire::PodState::Enrolled,
        Some(Intent::Announcing | Intent::Leaving { .. } | Intent::Draining { .. }) => {
            wire::PodState::Withdrawing
        }
        Some(Intent::Deleting { .. }) => wire::PodState::Deleting,
    }
}

/// The annotation goes with the first phase of a withdrawal: peers are to stop dialling 15008.
fn annotation(state: wire::PodState) -> String {
    let enrolled = state == wire::PodState::Enrolled;
    if enrolled {
        keys::REDIRECTION_ENABLED.to_owned()
    } else {
        String::new()
    }
}

fn entry(entry: &Entry) -> wire::TimelineEntry {
    wire::TimelineEntry {
        at: Some(entry.at.into()),
        event: entry.event.clone(),
        took: entry.took.and_then(|took| took.try_into().ok()),
    }
}

/// The rules and what uses them.
pub(crate) fn rules(rules: VerifyRulesResponse, seen: InspectNetnsResponse) -> wire::RulesReport {
    wire::RulesReport {
        fingerprint: rules.fingerprint,
        differences: rules.differences,
        listening_ports: seen.listening_ports,
        captured_flows: seen.captured_flows,
        direct_flows: seen.direct_flows,
        findings: Vec::new(),
        transaction: String::new(),
    }
}

/// What each ztunnel said of a sandbox.
pub(crate) fn ztunnels(all: &ListWorkloadsResponse, record: &Record) -> Vec<wire::ZtunnelReport> {
    let sandbox = types::SandboxRef::from(&record.sandbox);
    let states = all.workloads.iter().flat_map(|workload| &workload.states);
    let own = states.filter(|state| state.sandbox.as_ref() == Some(&sandbox));
    own.map(|state| wire::ZtunnelReport {
        session_id: state.session_id,
        state: phase(state.phase()).to_owned(),
        acknowledged_at: state.acknowledged_at,
        error: state.error.clone(),
    })
    .collect()
}

fn phase(phase: WorkloadPhase) -> &'static str {
    match phase {
        WorkloadPhase::Unspecified => "unknown",
        WorkloadPhase::Queued => "queued",
        WorkloadPhase::Sent => "sent",
        WorkloadPhase::Added => "added",
        WorkloadPhase::Kept => "kept",
        WorkloadPhase::Refused => "refused",
        WorkloadPhase::Removed => "removed",
        WorkloadPhase::Quarantined => "quarantined",
    }
}

/// A pod in a line.
pub(crate) fn summary(answer: wire::ExplainPodResponse) -> wire::PodSummary {
    wire::PodSummary {
        pod: answer.pod,
        desired: answer.desired,
        reason: answer.reason,
        state: answer.state,
        sandbox: answer.sandbox,
        last_failure: answer.last_failure,
        let_through: false,
        since: None,
        next_attempt_at: answer.next_attempt_at,
    }
}

/// What is depended on.
pub(crate) fn conditions(conditions: &Readiness) -> Vec<wire::Condition> {
    let all = conditions.all().into_iter();
    all.map(|(name, condition)| wire::Condition {
        name: name.to_owned(),
        ok: condition.ok,
        since: Some(condition.since.into()),
        message: condition.message,
    })
    .collect()
}
