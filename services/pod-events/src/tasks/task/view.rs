use std::{sync::Arc, time::SystemTime};

use inpod_proto::podevents::v1::PodState;
use inpod_types::{Enrollment, Failure, PodUid, Reason, SandboxRef};

use crate::{
    checkpoint::{Intent, Record},
    decide::Decision,
    drift::Drift,
    tasks::{pipeline::is_transient, plan::Action},
    timeline::Timeline,
};

/// A pod's state, readable without waiting for the task.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// The records of the pod's sandboxes; the current sandbox is the last.
    pub records: Vec<Arc<Record>>,
    pub failure: Option<Failure>,
    /// The failure of an enrolled pod whose traffic does not reach ztunnel.
    pub blocked: Option<Failure>,
    /// The failure of an enrolled pod that no ztunnel serves.
    pub unserved: Option<Arc<Failure>>,
    pub refusal: Option<Arc<Refusal>>,
    pub timeline: Timeline,
    pub next_attempt: Option<SystemTime>,
    /// The action of the next attempt; `None` if the attempt claims the netns again.
    pub(in crate::tasks) next: Option<Action>,
    /// The time when the sandbox entered its state; `None` if this process found the sandbox in the state.
    pub since: Option<SystemTime>,
    pub drift: Drift,
    pub(crate) evidence: Evidence,
}

/// The times at which this process last confirmed facts about the enrolled pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Evidence {
    /// The rules were read back from the kernel.
    pub(crate) rules: Option<SystemTime>,
    /// Only ztunnel listened on its ports, and nothing stopped or bypassed the pod's traffic.
    pub(crate) path: Option<SystemTime>,
}

/// The last refusal of an ADD, kept until the pod is enrolled.
#[derive(Debug)]
pub struct Refusal {
    /// The pod's UID; `None` if neither the runtime nor the source named a UID.
    pub uid: Option<PodUid>,
    pub failure: Failure,
}

impl Refusal {
    /// Returns whether the refusal concerns the pod with the UID and the decision.
    pub(crate) fn concerns(&self, decision: &Decision, has_uid: impl Fn(&PodUid) -> bool) -> bool {
        let waits = decision.enrollment != Enrollment::None || decision.is_unmet();
        waits && self.uid.as_ref().is_none_or(has_uid)
    }
}

impl View {
    /// Returns the failure of the last step or, if there is none, the reason why no ztunnel serves the pod or the pod's
    /// traffic is blocked. Such a reason also precedes a step that is only to be repeated.
    pub fn current_failure(&self) -> Option<&Failure> {
        let own = self.failure.as_ref();
        let lasting = own.filter(|failure| !is_transient(failure.reason));
        let is_enrolled = self.sandbox_with_ztunnel().is_some();
        let blocked = self.blocked.as_ref().filter(|_| is_enrolled);
        lasting.or(self.unserved.as_deref()).or(blocked).or(own)
    }

    /// Returns the current failure or, if there is none, the failure of the last refused ADD. After a refused ADD, a
    /// search finds no netns because the runtime has deleted the sandbox, so the refusal is the cause.
    pub(crate) fn last_failure(
        &self,
        is_current: impl FnOnce(&Refusal) -> bool,
    ) -> Option<&Failure> {
        let refusal = self.refusal.as_deref().filter(|it| is_current(it));
        let is_cause =
            |failure: &&Failure| refusal.is_none() || failure.reason != Reason::NetnsNotFound;
        let refused = refusal.map(|refusal| &refusal.failure);
        self.current_failure().filter(is_cause).or(refused)
    }

    /// Returns the current sandbox of a pod that is enrolled with ztunnel.
    pub(in crate::tasks) fn sandbox_with_ztunnel(&self) -> Option<&SandboxRef> {
        let record = self.records.last()?;
        let is_enrolled = state(Some(record)) == PodState::Enrolled;
        (is_enrolled && !record.redirection.is_sidecar()).then_some(&record.sandbox)
    }

    pub(super) fn state_since(&self, records: &[Arc<Record>]) -> Option<SystemTime> {
        let place = |record: &Arc<Record>| (record.sandbox.clone(), state(Some(record)));
        let before = self.records.last().map(place);
        match records.last().map(place) {
            now if now == before => self.since,
            now => now.map(|_| SystemTime::now()),
        }
    }
}

pub(crate) fn state(current: Option<&Record>) -> PodState {
    match current.map(|record| &record.intent) {
        None | Some(Intent::Out) => PodState::Out,
        Some(Intent::Enrolling | Intent::Adopted) => PodState::Enrolling,
        Some(Intent::Enrolled { .. } | Intent::Legacy | Intent::ServedLegacy) => PodState::Enrolled,
        Some(Intent::Announcing | Intent::Leaving { .. } | Intent::Draining { .. }) => {
            PodState::Withdrawing
        }
        Some(Intent::Deleting { .. }) => PodState::Deleting,
    }
}
