//! The annotations and conditions of the node's pods, and their patches. The queue performs no I/O and receives the current time from
//! its callers.

use std::{collections::BTreeMap, time::Duration};

use inpod_kube::with_jitter;
use inpod_types::{Backoff, PodRef, PodUid, SandboxRef};
use tokio::time::Instant;

use super::{
    Annotation,
    condition::DesiredCondition,
    patch::{DesiredStatus, PatchRequest},
};
use crate::pod::{Pod, PodKey, ShownCondition};

const MAX_IN_FLIGHT: usize = 8;

const RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));

/// The time for which an accepted patch counts although the watch does not show the patch.
const WATCH_LAG_TIMEOUT: Duration = Duration::from_secs(60);

/// After this time, an Event reports a Ready pod of the mesh without the annotation.
pub(crate) const ANNOTATION_TIMEOUT: Duration = Duration::from_secs(10);

/// After this long, a refused annotation no longer blocks an uninstall, because a policy refuses the change for good. A
/// restarted API server refuses allowed changes for a shorter time, until RBAC is loaded.
const REFUSAL_LIMIT: Duration = Duration::from_secs(60);

/// Pods in sync have no entry, so the work per change does not grow with the number of pods. A pod's successor of the
/// same name replaces the entry.
#[derive(Debug, Default)]
pub(crate) struct PatchQueue(BTreeMap<PodKey, (PodUid, Entry)>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PatchOutcome {
    Accepted,
    /// The API server no longer has the pod.
    Gone,
    Refused(String),
    /// It is unknown whether the patch was written.
    Unanswered(String),
}

#[derive(Debug, Default)]
struct Entry {
    observed: Shown,
    desired: DesiredStatus,
    /// The time of the last change of the desired value, or of the last observation in sync.
    since: Option<Instant>,
    in_flight: bool,
    /// Set if a patch after the last accepted patch was not answered and may have been written.
    was_unanswered: bool,
    /// The last accepted values, which count until the given time or until the watch shows other values than before.
    accepted: Option<(DesiredStatus, Instant)>,
    /// Set once a patch of both parts was refused: an admission policy of an earlier release allows only the annotation.
    is_split: bool,
    is_gone: bool,
    /// The failures in a row.
    failures: u32,
    retry_at: Option<Instant>,
    /// The time since which every answer was a refusal.
    refused_since: Option<Instant>,
    error: Option<String>,
    /// The sandbox that serves without the annotation, and since when.
    unannotated: Option<(SandboxRef, Instant)>,
    /// The last sandbox that was reported as unannotated.
    reported: Option<SandboxRef>,
}

/// The values that the watch shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Shown {
    annotation: Option<String>,
    condition: Option<ShownCondition>,
}

impl Shown {
    fn of(pod: &Pod) -> Self {
        Self {
            annotation: pod.redirection.clone(),
            condition: pod.in_mesh.clone(),
        }
    }
}

impl PatchOutcome {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Gone => "gone",
            Self::Refused(_) => "refused",
            Self::Unanswered(_) => "unanswered",
        }
    }
}

impl Entry {
    /// Returns whether the pod may have another value than the watch and the accepted patches show.
    fn is_uncertain(&self) -> bool {
        self.in_flight || self.was_unanswered
    }

    /// Returns the accepted values that count, given the values that the watch shows.
    fn accepted(&self, shown: &Shown, now: Instant) -> Option<&DesiredStatus> {
        let accepted = self.accepted.as_ref();
        let accepted = accepted.filter(|(_, until)| self.observed == *shown && now < *until);
        accepted.map(|(status, _)| status)
    }

    /// Returns whether the pod is known to have the annotation.
    fn has_annotation(&self, annotation: Annotation, shown: &Shown, now: Instant) -> bool {
        let accepted = self.accepted(shown, now).and_then(|it| it.annotation);
        let is_shown = annotation.value() == shown.annotation.as_deref();
        !self.is_uncertain() && accepted.map_or(is_shown, |value| value == annotation)
    }

    /// Returns the condition that the pod has as far as is known.
    fn known_condition(&self, now: Instant) -> Option<&ShownCondition> {
        let accepted = self.accepted(&self.observed, now);
        let accepted = accepted.and_then(|it| it.condition.as_ref());
        let shown = self.observed.condition.as_ref();
        accepted.map_or(shown, DesiredCondition::shown)
    }

    fn is_annotation_satisfied(&self, now: Instant) -> bool {
        let has = |annotation| self.has_annotation(annotation, &self.observed, now);
        self.desired.annotation.is_none_or(has)
    }

    fn is_condition_satisfied(&self, now: Instant) -> bool {
        let has = |desired: &DesiredCondition| {
            !self.is_uncertain() && desired.shown() == self.known_condition(now)
        };
        self.desired.condition.as_ref().is_none_or(has)
    }

    fn is_satisfied(&self, now: Instant) -> bool {
        self.is_gone || (self.is_annotation_satisfied(now) && self.is_condition_satisfied(now))
    }

    fn is_withdrawn(&self, shown: &Shown, now: Instant) -> bool {
        let stays_out =
            !self.is_uncertain() && self.desired.annotation != Some(Annotation::Enabled);
        self.is_gone || (stays_out && !self.has_annotation(Annotation::Enabled, shown, now))
    }

    /// Returns the parts of the next patch: what is not satisfied yet.
    fn next_patch(&self, now: Instant) -> DesiredStatus {
        let desired = &self.desired;
        let annotation = desired
            .annotation
            .filter(|_| !self.is_annotation_satisfied(now));
        let waits = self.is_split && annotation.is_some();
        let is_due = !waits && !self.is_condition_satisfied(now);
        DesiredStatus {
            annotation,
            condition: desired.condition.clone().filter(|_| is_due),
        }
    }

    /// Returns whether the entry equals a new entry in effect.
    fn is_idle(&self, now: Instant) -> bool {
        let is_known = self.accepted.is_none() && !self.is_uncertain() && !self.is_gone;
        let is_tracked = self.unannotated.is_some() || self.reported.is_some();
        self.is_satisfied(now) && is_known && !is_tracked
    }

    fn is_due(&self, now: Instant) -> bool {
        let may_retry = self.retry_at.is_none_or(|at| at <= now);
        may_retry && !self.in_flight && !self.is_satisfied(now)
    }

    fn is_refused(&self, now: Instant) -> bool {
        let since = self.refused_since;
        since.is_some_and(|since| now.saturating_duration_since(since) >= REFUSAL_LIMIT)
    }

    /// Updates the values. Only a changed desired value cuts a retry delay short.
    fn observe(&mut self, observed: Shown, desired: DesiredStatus, now: Instant) {
        if self.observed != observed {
            (self.observed, self.accepted) = (observed, None);
        }
        let is_changed = self.desired != desired;
        self.desired = desired;
        let is_satisfied = self.is_satisfied(now);
        if is_satisfied {
            self.error = None;
        }
        if is_changed || is_satisfied {
            (self.since, self.failures) = (Some(now), 0);
            (self.retry_at, self.refused_since) = (None, None);
        }
    }

    /// Returns whether the pod has the annotation as far as is known: the watch may show it before the patch is
    /// answered.
    fn is_annotated(&self, now: Instant) -> bool {
        let enabled = Annotation::Enabled;
        enabled.value() == self.observed.annotation.as_deref()
            || self.has_annotation(enabled, &self.observed, now)
    }

    fn track_unannotated(&mut self, serving_sandbox: Option<&SandboxRef>, now: Instant) {
        let is_annotated = self.is_annotated(now);
        let is_unreported = |sandbox: &&SandboxRef| self.reported.as_ref() != Some(*sandbox);
        let sandbox = serving_sandbox.filter(|it| !is_annotated && is_unreported(it));
        let known = self.unannotated.take();
        let known = known.filter(|(known, _)| Some(known) == sandbox);
        self.unannotated = known.or_else(|| Some((sandbox?.clone(), now)));
    }

    fn event_due_at(&self) -> Option<Instant> {
        let (_, since) = self.unannotated.as_ref()?;
        Some(*since + ANNOTATION_TIMEOUT)
    }

    /// Returns whether the watch shows the values.
    fn shows(&self, status: &DesiredStatus) -> bool {
        let Shown {
            annotation,
            condition,
        } = &self.observed;
        let has_annotation = |it: Annotation| it.value() == annotation.as_deref();
        let has_condition = |it: &DesiredCondition| it.shown() == condition.as_ref();
        status.annotation.is_none_or(has_annotation)
            && status.condition.as_ref().is_none_or(has_condition)
    }

    fn complete(
        &mut self,
        request: &PatchRequest,
        outcome: PatchOutcome,
        now: Instant,
    ) -> Option<Duration> {
        self.in_flight = false;
        let refused_since = self.refused_since.take();
        match outcome {
            PatchOutcome::Accepted => {
                let before = self.accepted(&self.observed, now).cloned();
                let before = before.unwrap_or_default();
                let accepted = DesiredStatus {
                    annotation: request.status.annotation.or(before.annotation),
                    condition: request.status.condition.clone().or(before.condition),
                };
                let is_shown = self.shows(&accepted);
                self.accepted = (!is_shown).then(|| (accepted, now + WATCH_LAG_TIMEOUT));
                (self.was_unanswered, self.error) = (false, None);
                (self.retry_at, self.failures) = (None, 0);
                let is_annotated = self.is_annotated(now);
                self.unannotated.take_if(|_| is_annotated);
                let is_satisfied = self.is_satisfied(now);
                let since = self.since.filter(|_| is_satisfied)?;
                return Some(now.saturating_duration_since(since));
            }
            PatchOutcome::Gone => (self.is_gone, self.error) = (true, None),
            PatchOutcome::Refused(message) => {
                self.refused_since = refused_since.or(Some(now));
                let DesiredStatus {
                    annotation,
                    condition,
                } = &request.status;
                self.is_split |= annotation.is_some() && condition.is_some();
                self.retry_later(message, now);
            }
            PatchOutcome::Unanswered(message) => {
                self.was_unanswered = true;
                self.retry_later(message, now);
            }
        }
        None
    }

    fn retry_later(&mut self, message: String, now: Instant) {
        self.retry_at = Some(now + with_jitter(RETRY.delay(self.failures)));
        self.failures = self.failures.saturating_add(1);
        self.error = Some(message);
    }
}

impl PatchQueue {
    /// Updates a pod. In `serving_sandbox`, the pod is Ready and in the mesh.
    pub(crate) fn observe(
        &mut self,
        pod: &Pod,
        desired: DesiredStatus,
        serving_sandbox: Option<&SandboxRef>,
        now: Instant,
    ) {
        let key = (pod.pod.namespace.clone(), pod.pod.name.clone());
        let known = self.0.remove(&key);
        let known = known.filter(|(uid, _)| *uid == pod.pod.uid);
        let mut entry = known.map(|(_, entry)| entry).unwrap_or_default();
        entry.observe(Shown::of(pod), desired, now);
        entry.track_unannotated(serving_sandbox, now);
        if !entry.is_idle(now) {
            self.0.insert(key, (pod.pod.uid.clone(), entry));
        }
    }

    /// Removes a pod that no longer exists.
    pub(crate) fn forget(&mut self, key: &PodKey) {
        self.0.remove(key);
    }

    fn get(&self, pod: &PodRef) -> Option<&Entry> {
        let (uid, entry) = self.0.get(&(pod.namespace.clone(), pod.name.clone()))?;
        (*uid == pod.uid).then_some(entry)
    }

    fn get_mut(&mut self, pod: &PodRef) -> Option<&mut Entry> {
        let key = (pod.namespace.clone(), pod.name.clone());
        let (uid, entry) = self.0.get_mut(&key)?;
        (*uid == pod.uid).then_some(entry)
    }

    fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.0.values().map(|(_, entry)| entry)
    }

    /// Takes the patch of the pod that has been out of sync the longest. Returns `None` while too many patches are in
    /// flight.
    pub(crate) fn next(&mut self, now: Instant) -> Option<PatchRequest> {
        let in_flight = self.entries().filter(|entry| entry.in_flight).count();
        if in_flight >= MAX_IN_FLIGHT {
            return None;
        }
        let due = self
            .0
            .iter_mut()
            .filter(|(_, (_, entry))| entry.is_due(now));
        let (key, (uid, entry)) = due.min_by_key(|(_, (_, entry))| entry.since)?;
        let request = PatchRequest {
            pod: pod_of(key, uid),
            status: entry.next_patch(now),
            condition_before: entry.known_condition(now).cloned(),
        };
        entry.in_flight = true;
        Some(request)
    }

    /// Completes a patch. Returns how long the write of the desired value took, if the patch wrote the value. Drops the
    /// entry of a pod in sync, because the watch may have shown the patch before the answer.
    pub(crate) fn complete(
        &mut self,
        request: &PatchRequest,
        outcome: PatchOutcome,
        now: Instant,
    ) -> Option<Duration> {
        let entry = self.get_mut(&request.pod)?;
        let took = entry.complete(request, outcome, now);
        if entry.is_idle(now) {
            let pod = &request.pod;
            self.forget(&(pod.namespace.clone(), pod.name.clone()));
        }
        took
    }

    /// Returns when the queue next needs attention even if nothing changes. A patch that is due already waits for the
    /// completion of another patch.
    pub(crate) fn next_wakeup(&self, now: Instant) -> Option<Instant> {
        let times = self.entries().flat_map(|entry| {
            let accepted_until = entry.accepted.as_ref().map(|(_, until)| *until);
            [entry.retry_at, accepted_until, entry.event_due_at()]
        });
        times.flatten().filter(|at| *at > now).min()
    }

    /// Returns the pods to report as unannotated, once per sandbox.
    pub(crate) fn take_late(&mut self, now: Instant) -> Vec<PodRef> {
        let mut late = Vec::new();
        for (key, (uid, entry)) in &mut self.0 {
            if entry.event_due_at().is_some_and(|at| at <= now) {
                entry.reported = entry.unannotated.take().map(|(sandbox, _)| sandbox);
                late.push(pod_of(key, uid));
            }
        }
        late
    }

    /// Makes delayed patches due at once, because the API server is reachable again.
    pub(crate) fn retry_now(&mut self) {
        let entries = self.0.values_mut();
        entries.for_each(|(_, entry)| entry.retry_at = None);
    }

    /// Returns whether peers are known not to see the pod as redirected.
    pub(crate) fn is_withdrawn(&self, pod: &Pod, now: Instant) -> bool {
        let unknown = Entry::default();
        let entry = self.get(&pod.pod).unwrap_or(&unknown);
        entry.is_withdrawn(&Shown::of(pod), now)
    }

    /// Returns whether the API server refuses to change the annotation, apparently for good.
    pub(crate) fn is_refused(&self, pod: &PodRef, now: Instant) -> bool {
        self.get(pod).is_some_and(|entry| entry.is_refused(now))
    }

    pub(crate) fn unmet(&self, now: Instant) -> u64 {
        self.count(|entry| !entry.is_satisfied(now))
    }

    pub(crate) fn refused(&self, now: Instant) -> u64 {
        self.count(|entry| !entry.is_satisfied(now) && entry.is_refused(now))
    }

    fn count(&self, counts: impl Fn(&Entry) -> bool) -> u64 {
        let entries = self.entries().filter(|entry| counts(entry));
        entries.count().try_into().unwrap_or(u64::MAX)
    }

    /// Returns the number of pods whose last patch failed, and the first error.
    pub(crate) fn failures(&self) -> Option<(usize, String)> {
        let mut errors = self.entries().filter_map(|entry| entry.error.as_ref());
        let first = errors.next()?.clone();
        Some((1 + errors.count(), first))
    }
}

fn pod_of((namespace, name): &PodKey, uid: &PodUid) -> PodRef {
    PodRef {
        namespace: namespace.clone(),
        name: name.clone(),
        uid: uid.clone(),
    }
}

#[cfg(test)]
mod tests;
