//! Describes pods to operators.

mod bypass;
mod proof;
mod remedy;
mod report;

use std::{sync::Arc, time::SystemTime};

use inpod_proto::{addresses_to, podevents::v1 as wire, types::v1 as types};
use inpod_service::Readiness;
use inpod_types::{Enrollment, Failure, PodRef, PodUid, Reason};

pub(crate) use report::ServiceReports;

use crate::{
    annotations::desired::PodStatus,
    checkpoint::{Intent, Record},
    decide::{Decision, Demand, Policy, inputs_of},
    drift::DriftKind,
    inventory::Inventory,
    pod::{Pod, PodKey},
    tasks::{AddWait, Registry, Shared, Synced, View, state},
    timeline::Entry,
};

/// The facts about a pod that pod-events knows without other services.
#[derive(Debug)]
pub(crate) struct PodInfo {
    /// The pod's reference from the source, or else from the checkpoint.
    pub(crate) pod: PodRef,
    pub(crate) key: PodKey,
    decision: Decision,
    view: View,
    inventory: Arc<Inventory>,
    wait: Option<AddWait>,
}

/// Returns `None` if neither the source nor the checkpoint knows the pod.
pub(crate) fn pod_info(shared: &Shared, registry: &Registry, key: &PodKey) -> Option<PodInfo> {
    let view = registry.view(key).unwrap_or_default();
    let inventory = shared.source.inventory();
    let (shown, current) = (inventory.pod(key), view.records.last());
    let recorded = current.map(|record| &record.pod);
    let pod = shown.map(|pod| &pod.pod).or(recorded)?.clone();
    let is_unconfirmed = current.is_some_and(|record| record.admitted_unenrolled);
    let is_incomplete = inventory.namespaces_required && !inventory.is_complete();
    let decision = match shown {
        Some(pod) => shared.decide(pod),
        None if is_unconfirmed || is_incomplete => Decision {
            enrollment: Enrollment::Unknown,
            reason: Reason::SourceUnavailable,
            demand: Demand::None,
        },
        None => Decision {
            enrollment: Enrollment::None,
            reason: Reason::PodUnknown,
            demand: Demand::None,
        },
    };
    Some(PodInfo {
        pod,
        key: key.clone(),
        decision,
        view,
        inventory,
        wait: registry.add_wait(key),
    })
}

impl PodInfo {
    pub(crate) fn current(&self) -> Option<&Record> {
        self.view.records.last().map(|record| &**record)
    }

    /// Returns whether the pod of the source or the checkpoint has the UID.
    pub(crate) fn has_uid(&self, uid: &PodUid) -> bool {
        let of_record = |record: &Record| record.pod.uid == *uid;
        self.shown().is_some_and(|pod| pod.has_uid(uid)) || self.current().is_some_and(of_record)
    }

    pub(crate) fn shown(&self) -> Option<&Pod> {
        self.inventory.pod(&self.key)
    }

    fn is_admitted_unenrolled(&self) -> bool {
        self.current()
            .is_some_and(|record| record.admitted_unenrolled)
    }

    fn failure(&self) -> Option<&Failure> {
        let has_uid = |uid: &PodUid| self.has_uid(uid);
        self.view
            .last_failure(|refusal| refusal.concerns(&self.decision, has_uid))
    }
}

pub(crate) fn failure_to_wire(failure: &Failure) -> types::Failure {
    types::Failure {
        message: failure.message.clone(),
        ..failure.into()
    }
}

pub(crate) fn summary(known: &PodInfo) -> wire::PodSummary {
    wire::PodSummary {
        pod: Some((&known.pod).into()),
        desired: types::Enrollment::from(known.decision.enrollment).into(),
        reason: known.decision.reason.number(),
        state: state(known.current()).into(),
        sandbox: known.current().map(|record| (&record.sandbox).into()),
        last_failure: known.failure().map(failure_to_wire),
        let_through: known.is_admitted_unenrolled(),
        since: known.view.since.map(Into::into),
        next_attempt_at: known.view.next_attempt.map(Into::into),
    }
}

pub(crate) fn response(
    known: &PodInfo,
    policy: &Policy<'_>,
    synced: &Synced,
    reports: ServiceReports,
) -> wire::ExplainPodResponse {
    let (decision, view, current) = (&known.decision, &known.view, known.current());
    let state = state(current);
    let unavailable = reports.unavailable();
    let ztunnels = reports.ztunnels(current);
    let proof = proof::list(known, &reports, &ztunnels, SystemTime::now());
    let rules = reports.rules();
    let netns_path = current.map(|record| record.netns.path.display().to_string());
    let addresses = current.map(|record| addresses_to(&record.addresses));
    wire::ExplainPodResponse {
        pod: Some((&known.pod).into()),
        desired: types::Enrollment::from(decision.enrollment).into(),
        reason: decision.reason.number(),
        remedy: remedy::describe(known, rules.as_ref(), &ztunnels, &unavailable).to_owned(),
        inputs: inputs(known, policy),
        state: state.into(),
        last_failure: known.failure().map(failure_to_wire),
        waiting: known.wait.map(|wait| remedy::wait_to_wire(wait, synced)),
        sandbox: current.map(|record| (&record.sandbox).into()),
        netns: current.and_then(|record| record.netns_id).map(Into::into),
        netns_path: netns_path.unwrap_or_default(),
        addresses: addresses.unwrap_or_default(),
        bypasses: bypass::sentences(known, rules.as_ref()),
        rules,
        ztunnels,
        timeline: view.timeline.entries().iter().map(entry_to_wire).collect(),
        redirection_annotation: expected_annotation(known),
        shown_annotation: shown_annotation(known),
        next_attempt_at: view.next_attempt.map(Into::into),
        next_step: view.next_step().to_owned(),
        drift: view.drift.iter().map(drift_to_wire).collect(),
        unavailable,
        proof,
        condition: expected_condition(known),
        shown_condition: shown_condition(known),
    }
}

/// Returns the inputs of the decision, and whether the sandbox stays redirected to a sidecar regardless of the
/// decision.
fn inputs(known: &PodInfo, policy: &Policy<'_>) -> Vec<wire::Input> {
    let shown = known.shown();
    let inputs = shown.map(|pod| inputs_of(&known.inventory, pod, policy));
    let mut inputs = inputs.unwrap_or_default();
    let is_redirected = |record: &Record| {
        matches!(record.intent, Intent::Enrolled { .. }) && record.redirection.is_sidecar()
    };
    if known.current().is_some_and(is_redirected) {
        let until = "to the pod's sidecar, until the sandbox ends";
        inputs.push(("sandbox is redirected".to_owned(), until.to_owned()));
    }
    let inputs = inputs.into_iter();
    inputs
        .map(|(name, value)| wire::Input { name, value })
        .collect()
}

fn shown_annotation(known: &PodInfo) -> String {
    let shown = known.shown().and_then(|pod| pod.redirection.clone());
    shown.unwrap_or_default()
}

/// Returns the annotation that the pod should have: the current annotation if any value will do.
fn expected_annotation(known: &PodInfo) -> String {
    let Some(pod) = known.shown() else {
        return String::new();
    };
    let status = PodStatus::of(pod, &known.view, &known.decision, true);
    match status.desired().annotation {
        Some(mark) => mark.value().unwrap_or_default().to_owned(),
        None => shown_annotation(known),
    }
}

fn shown_condition(known: &PodInfo) -> String {
    let shown = known.shown().and_then(|pod| pod.in_mesh.as_ref());
    shown.map(ToString::to_string).unwrap_or_default()
}

/// Returns the condition that the pod should have: the current condition if any value will do.
fn expected_condition(known: &PodInfo) -> String {
    let Some(pod) = known.shown() else {
        return String::new();
    };
    let status = PodStatus::of(pod, &known.view, &known.decision, true);
    match status.desired().condition {
        Some(desired) => desired.shown().map(ToString::to_string).unwrap_or_default(),
        None => shown_condition(known),
    }
}

fn drift_to_wire((kind, count): (&DriftKind, &u64)) -> wire::Drift {
    wire::Drift {
        kind: kind.name().to_owned(),
        count: *count,
    }
}

fn entry_to_wire(entry: &Entry) -> wire::TimelineEntry {
    wire::TimelineEntry {
        at: Some(entry.at.into()),
        event: entry.event.to_string(),
        took: entry.took.and_then(|took| took.try_into().ok()),
    }
}

pub(crate) fn list_conditions(conditions: &Readiness) -> Vec<wire::Condition> {
    let all = conditions.all().into_iter();
    all.map(|(name, condition)| wire::Condition {
        name: name.to_owned(),
        ok: condition.ok,
        since: Some(condition.since.into()),
        message: condition.message,
    })
    .collect()
}

#[cfg(test)]
mod tests;
