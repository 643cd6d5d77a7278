//! What is known of a pod, put into words for people.

mod bypass;
mod next_step;
mod report;

use std::sync::Arc;

use inpod_proto::{addresses_to, podevents::v1 as wire, types::v1 as types};
use inpod_service::Readiness;
use inpod_types::{Enrollment, Failure, PodRef, PodUid, Reason};

pub(crate) use report::{Seen, ztunnels};

use crate::{
    checkpoint::{Intent, Record},
    decide::Decision,
    drift::DriftKind,
    outputs::wish::Standing,
    pod::Pod,
    registry::Registry,
    source::{Inventory, PodKey},
    task::{Shared, View},
    timeline::Entry,
};

/// Everything that pod-events itself knows of a pod.
#[derive(Debug)]
pub(crate) struct Known {
    /// The pod: as the source shows it, else as the checkpoint has it.
    pub(crate) pod: PodRef,
    key: PodKey,
    decision: Decision,
    view: View,
    inventory: Arc<Inventory>,
}

/// What is known of a pod; `None` where neither source nor checkpoint knows it.
pub(crate) fn known(shared: &Shared, registry: &Registry, key: &PodKey) -> Option<Known> {
    let view = registry.view(key).unwrap_or_default();
    let inventory = shared.source.inventory();
    let shown = inventory.pod(key);
    let pod = shown
        .map(|pod| pod.pod.clone())
        .or_else(|| Some(view.records.last()?.pod.clone()))?;
    let guessed = view
        .records
        .last()
        .is_some_and(|record| record.admitted_unenrolled);
    let unanswered = inventory.namespaces_exist && !inventory.is_complete();
    let decision = match shown {
        Some(pod) => shared.decide(pod),
        None if guessed || unanswered => undecided(),
        None => gone(),
    };
    Some(Known {
        pod,
        key: key.clone(),
        decision,
        view,
        inventory,
    })
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

impl Known {
    /// The record of its current sandbox.
    pub(crate) fn current(&self) -> Option<&Record> {
        self.view.records.last()
    }

    /// Whether a runtime or a person who says this UID means it.
    pub(crate) fn is_called(&self, uid: &PodUid) -> bool {
        let of_record = |record: &Record| record.pod.uid == *uid;
        self.shown().is_some_and(|pod| pod.is_called(uid)) || self.current().is_some_and(of_record)
    }

    /// The pod as the source shows it.
    pub(crate) fn shown(&self) -> Option<&Pod> {
        self.inventory.pod(&self.key)
    }

    fn is_let_through(&self) -> bool {
        self.current()
            .is_some_and(|record| record.admitted_unenrolled)
    }

    fn failure(&self) -> Option<types::Failure> {
        let failure = self.view.failure.as_ref()?;
        Some(types::Failure {
            message: failure.message.clone(),
            ..failure.into()
        })
    }
}

/// A pod in a line.
pub(crate) fn summary(known: &Known) -> wire::PodSummary {
    wire::PodSummary {
        pod: Some((&known.pod).into()),
        desired: types::Enrollment::from(known.decision.enrollment).into(),
        reason: known.decision.reason.number(),
        state: state(known.current()).into(),
        sandbox: known.current().map(|record| (&record.sandbox).into()),
        last_failure: known.failure(),
        let_through: known.is_let_through(),
        since: known.view.since.map(Into::into),
        next_attempt_at: known.view.next_attempt.map(Into::into),
    }
}

/// A pod in full, with what the other services see of it.
pub(crate) fn answer(known: &Known, seen: Seen) -> wire::ExplainPodResponse {
    let (decision, view, current) = (&known.decision, &known.view, known.current());
    let reason = |failure: &Failure| failure.reason;
    let blamed = view.failure.as_ref().map_or(decision.reason, reason);
    let state = state(current);
    let unavailable = seen.unavailable();
    let ztunnels = seen.ztunnels(current);
    let rules = seen.rules();
    wire::ExplainPodResponse {
        pod: Some((&known.pod).into()),
        desired: types::Enrollment::from(decision.enrollment).into(),
        reason: decision.reason.number(),
        remedy: blamed.remedy().to_owned(),
        inputs: inputs(decision, current),
        state: state.into(),
        last_failure: known.failure(),
        sandbox: current.map(|record| (&record.sandbox).into()),
        netns: current.and_then(|record| record.netns_id).map(Into::into),
        netns_path: current.map(path).unwrap_or_default(),
        addresses: current.map(addresses).unwrap_or_default(),
        bypasses: bypass::sentences(known, rules.as_ref()),
        rules,
        ztunnels,
        timeline: view.timeline.entries().map(entry).collect(),
        redirection_annotation: annotation(known),
        shown_annotation: shown_annotation(known),
        next_attempt_at: view.next_attempt.map(Into::into),
        next_step: next_step::words(view).to_owned(),
        drift: known.view.drift.iter().map(drift).collect(),
        unavailable,
    }
}

/// What was looked at, and what holds whatever is decided.
fn inputs(decision: &Decision, current: Option<&Record>) -> Vec<wire::Input> {
    let stands = |record: &&Record| {
        let is_enrolled = matches!(record.intent, Intent::Enrolled { .. });
        is_enrolled && record.redirection.is_sidecar()
    };
    let stands = current.filter(stands).map(|_| wire::Input {
        name: "sandbox is redirected".to_owned(),
        value: "to the pod's sidecar, until the sandbox ends".to_owned(),
    });
    decision.inputs.iter().map(input).chain(stands).collect()
}

fn input((name, value): &(String, String)) -> wire::Input {
    let (name, value) = (name.clone(), value.clone());
    wire::Input { name, value }
}

fn path(record: &Record) -> String {
    record.netns.path.display().to_string()
}

fn addresses(record: &Record) -> Vec<String> {
    addresses_to(&record.addresses)
}

fn shown_annotation(known: &Known) -> String {
    let shown = known.shown().and_then(|pod| pod.redirection.clone());
    shown.unwrap_or_default()
}

/// Where a pod stands, by its current sandbox.
pub(crate) fn state(current: Option<&Record>) -> wire::PodState {
    match current.map(|record| &record.intent) {
        None | Some(Intent::Out) => wire::PodState::Out,
        Some(Intent::Enrolling | Intent::Adopted) => wire::PodState::Enrolling,
        Some(Intent::Enrolled { .. }) => wire::PodState::Enrolled,
        Some(Intent::Announcing | Intent::Leaving { .. } | Intent::Draining { .. }) => {
            wire::PodState::Withdrawing
        }
        Some(Intent::Deleting { .. }) => wire::PodState::Deleting,
    }
}

/// What the annotation of a pod should say: what it says is right where nobody wants it otherwise.
fn annotation(known: &Known) -> String {
    let Some(pod) = known.shown() else {
        return String::new();
    };
    let standing = Standing::of(pod, Some(&known.view), &known.decision, true);
    match standing.wish() {
        Some(mark) => mark.value().unwrap_or_default().to_owned(),
        None => shown_annotation(known),
    }
}

fn drift((kind, count): (&DriftKind, &u64)) -> wire::Drift {
    wire::Drift {
        kind: kind.name().to_owned(),
        count: *count,
    }
}

fn entry(entry: &Entry) -> wire::TimelineEntry {
    wire::TimelineEntry {
        at: Some(entry.at.into()),
        event: entry.event.clone(),
        took: entry.took.and_then(|took| took.try_into().ok()),
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
