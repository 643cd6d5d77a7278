//! The pods whose annotation is not in sync, and their patches. The queue performs no I/O and receives the current time
//! from its callers.
//!
//! A pod in sync has no entry.

use std::{
    collections::{BTreeMap, btree_map},
    time::Duration,
};

use inpod_types::{PodUid, SandboxRef};
use tokio::time::Instant;

use super::Annotation;
use crate::pod::PodKey;

const MAX_IN_FLIGHT: usize = 8;

/// The first and the longest delay between attempts. The delay doubles in between, minus a random part of up to one
/// half.
const RETRY_INTERVAL: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(30)];

/// The time for which an accepted patch counts although the watch does not show the patch.
const WATCH_LAG_TIMEOUT: Duration = Duration::from_secs(60);

/// After this time, an Event reports a Ready pod of the mesh without the annotation.
pub(crate) const ANNOTATION_TIMEOUT: Duration = Duration::from_secs(10);

/// After this long, a refused annotation no longer blocks an uninstall, because a policy refuses the change for good. A
/// restarted API server refuses allowed changes for a shorter time, until RBAC is loaded.
const REFUSAL_LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(crate) struct PatchQueue {
    entries: BTreeMap<PodKey, Entry>,
}

#[derive(Clone, Debug)]
pub(crate) struct PodObservation<'a> {
    pub(crate) uid: &'a PodUid,
    pub(crate) observed: Option<&'a str>,
    /// `None` if any value is acceptable.
    pub(crate) desired: Option<Annotation>,
    /// The sandbox in which the pod is Ready and in the mesh.
    pub(crate) serving_sandbox: Option<&'a SandboxRef>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PatchRequest {
    pub(crate) key: PodKey,
    pub(crate) uid: PodUid,
    pub(crate) annotation: Annotation,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PatchOutcome {
    Accepted,
    Gone,
    Refused(String),
    /// It is unknown whether the patch was written.
    Unanswered(String),
}

#[derive(Debug)]
struct Entry {
    uid: PodUid,
    desired: Option<Annotation>,
    since: Instant,
    observed: Option<String>,
    last_write: LastWrite,
    in_flight: Option<LastWrite>,
    attempts: u32,
    retry_at: Instant,
    /// The time since which every answer was a refusal.
    refused_since: Option<Instant>,
    error: Option<String>,
    unannotated: Option<Unannotated>,
    is_gone: bool,
}

/// The last write, as far as the watch does not show the write yet.
#[derive(Clone, Debug, PartialEq, Eq)]
enum LastWrite {
    Observed,
    /// The write counts until the watch shows a value other than `replaced`, or until `until`.
    Accepted {
        annotation: Annotation,
        replaced: Option<String>,
        until: Instant,
    },
    Uncertain,
}

/// A Ready pod of the mesh without the annotation.
#[derive(Debug)]
struct Unannotated {
    sandbox: SandboxRef,
    since: Option<Instant>,
    is_reported: bool,
}

impl LastWrite {
    fn has_value(&self, annotation: Annotation, observed: Option<&str>, now: Instant) -> bool {
        match self {
            Self::Uncertain => false,
            Self::Accepted {
                annotation: accepted,
                replaced,
                until,
            } if replaced.as_deref() == observed && now < *until => *accepted == annotation,
            Self::Observed | Self::Accepted { .. } => annotation.matches(observed),
        }
    }
}

impl Entry {
    fn new(observation: &PodObservation<'_>, now: Instant) -> Self {
        Self {
            uid: observation.uid.clone(),
            desired: None,
            since: now,
            observed: None,
            last_write: LastWrite::Observed,
            in_flight: None,
            attempts: 0,
            retry_at: now,
            refused_since: None,
            error: None,
            unannotated: None,
            is_gone: false,
        }
    }

    fn has_value(&self, annotation: Annotation, now: Instant) -> bool {
        self.last_write
            .has_value(annotation, self.observed.as_deref(), now)
    }

    fn is_satisfied(&self, now: Instant) -> bool {
        self.is_gone
            || self
                .desired
                .is_none_or(|annotation| self.has_value(annotation, now))
    }

    /// Updates an entry. Only a changed desired value cuts a retry delay short.
    fn observe(&mut self, observation: &PodObservation<'_>, now: Instant) {
        self.observed = observation.observed.map(str::to_owned);
        if let LastWrite::Accepted {
            replaced, until, ..
        } = &self.last_write
            && (*replaced != self.observed || now >= *until)
        {
            self.last_write = LastWrite::Observed;
        }
        if self.desired != observation.desired {
            self.desired = observation.desired;
            (self.since, self.retry_at, self.attempts) = (now, now, 0);
            self.refused_since = None;
        }
        if self.is_satisfied(now) {
            self.error = None;
            self.since = now;
        }
        self.track_unannotated(observation.serving_sandbox, now);
    }

    fn track_unannotated(&mut self, serving_sandbox: Option<&SandboxRef>, now: Instant) {
        let is_unannotated = |_: &&SandboxRef| !self.has_value(Annotation::Enabled, now);
        let Some(sandbox) = serving_sandbox.filter(is_unannotated) else {
            if let Some(unannotated) = &mut self.unannotated {
                unannotated.since = None;
            }
            return;
        };
        match &mut self.unannotated {
            Some(unannotated) if unannotated.sandbox == *sandbox => {
                unannotated.since.get_or_insert(now);
            }
            unannotated => {
                *unannotated = Some(Unannotated {
                    sandbox: sandbox.clone(),
                    since: Some(now),
                    is_reported: false,
                });
            }
        }
    }

    fn event_due_at(&self) -> Option<Instant> {
        let unannotated = self
            .unannotated
            .as_ref()
            .filter(|unannotated| !unannotated.is_reported)?;
        unannotated.since.map(|since| since + ANNOTATION_TIMEOUT)
    }

    fn is_idle(&self, now: Instant) -> bool {
        let is_reported = self.unannotated.as_ref().is_some_and(|it| it.is_reported);
        self.last_write == LastWrite::Observed
            && self.in_flight.is_none()
            && self.event_due_at().is_none()
            && !is_reported
            && !self.is_gone
            && self.is_satisfied(now)
    }

    fn is_retry_due(&self, now: Instant) -> bool {
        !self.is_satisfied(now) && self.in_flight.is_none() && self.retry_at <= now
    }

    fn is_refused(&self, now: Instant) -> bool {
        let since = self.refused_since;
        since.is_some_and(|since| now.saturating_duration_since(since) >= REFUSAL_LIMIT)
    }

    fn retry_later(&mut self, message: String, now: Instant) {
        let [first, longest] = RETRY_INTERVAL;
        let wait = first.saturating_mul(1 << self.attempts.min(6)).min(longest);
        self.attempts = self.attempts.saturating_add(1);
        self.retry_at = now + wait.mul_f64(fastrand::f64().mul_add(0.5, 0.5));
        self.error = Some(message);
    }

    fn complete(
        &mut self,
        annotation: Annotation,
        before: LastWrite,
        outcome: PatchOutcome,
        now: Instant,
    ) {
        self.refused_since =
            matches!(outcome, PatchOutcome::Refused(_)).then(|| self.refused_since.unwrap_or(now));
        match outcome {
            PatchOutcome::Accepted => {
                (self.attempts, self.retry_at, self.error) = (0, now, None);
                self.last_write = if annotation.matches(self.observed.as_deref()) {
                    LastWrite::Observed
                } else {
                    LastWrite::Accepted {
                        annotation,
                        replaced: self.observed.clone(),
                        until: now + WATCH_LAG_TIMEOUT,
                    }
                };
            }
            PatchOutcome::Gone => (self.is_gone, self.error) = (true, None),
            PatchOutcome::Refused(message) => {
                self.last_write = before;
                self.retry_later(message, now);
            }
            PatchOutcome::Unanswered(message) => self.retry_later(message, now),
        }
    }
}

impl PatchQueue {
    pub(crate) fn observe(&mut self, key: &PodKey, observation: &PodObservation<'_>, now: Instant) {
        let entry = match self.entries.entry(key.clone()) {
            btree_map::Entry::Occupied(known) => {
                let known = known.into_mut();
                if known.uid != *observation.uid {
                    *known = Entry::new(observation, now);
                }
                known
            }
            btree_map::Entry::Vacant(free) => free.insert(Entry::new(observation, now)),
        };
        entry.observe(observation, now);
        if entry.is_idle(now) {
            self.entries.remove(key);
        }
    }

    pub(crate) fn remove(&mut self, key: &PodKey) {
        self.entries.remove(key);
    }

    /// Takes the patch of the pod that has been out of sync the longest. Returns `None` while too many patches are in
    /// flight.
    pub(crate) fn next(&mut self, now: Instant) -> Option<PatchRequest> {
        if !self.has_capacity() {
            return None;
        }
        let retryable = self
            .entries
            .iter_mut()
            .filter(|(_, it)| it.is_retry_due(now));
        let (key, entry) = retryable.min_by_key(|(_, it)| it.since)?;
        let annotation = entry.desired?;
        let last_write = std::mem::replace(&mut entry.last_write, LastWrite::Uncertain);
        entry.in_flight = Some(last_write);
        Some(PatchRequest {
            key: key.clone(),
            uid: entry.uid.clone(),
            annotation,
        })
    }

    fn has_capacity(&self) -> bool {
        let in_flight = self.entries.values().filter(|it| it.in_flight.is_some());
        in_flight.count() < MAX_IN_FLIGHT
    }

    /// Completes a patch. Returns how long the write of the desired value took, if the patch wrote the value.
    pub(crate) fn complete(
        &mut self,
        request: &PatchRequest,
        outcome: PatchOutcome,
        now: Instant,
    ) -> Option<Duration> {
        let entry = self.entries.get_mut(&request.key);
        let entry = entry.filter(|it| it.uid == request.uid)?;
        let before = entry.in_flight.take()?;
        let is_accepted = outcome == PatchOutcome::Accepted;
        entry.complete(request.annotation, before, outcome, now);
        (is_accepted && entry.desired == Some(request.annotation))
            .then(|| now.saturating_duration_since(entry.since))
    }

    /// Returns when the queue needs attention even if nothing changes.
    pub(crate) fn next_wakeup(&self, now: Instant) -> Option<Instant> {
        let has_capacity = self.has_capacity();
        let entries = self.entries.values();
        let times = entries.flat_map(|entry| {
            let open = has_capacity && entry.in_flight.is_none() && !entry.is_satisfied(now);
            let expires = match &entry.last_write {
                LastWrite::Accepted { until, .. } => Some(*until),
                LastWrite::Observed | LastWrite::Uncertain => None,
            };
            [
                open.then_some(entry.retry_at),
                expires,
                entry.event_due_at(),
            ]
        });
        times.flatten().min()
    }

    /// Returns the pods to report as unannotated, once per sandbox, and the pods to observe again because the watch has
    /// not shown an accepted patch in time.
    pub(crate) fn expired(&mut self, now: Instant) -> (Vec<PodKey>, Vec<PodKey>) {
        let (mut late, mut stale) = (Vec::new(), Vec::new());
        for (key, entry) in &mut self.entries {
            if entry.event_due_at().is_some_and(|at| at <= now) {
                late.push(key.clone());
                if let Some(unannotated) = &mut entry.unannotated {
                    unannotated.is_reported = true;
                }
            }
            if matches!(&entry.last_write, LastWrite::Accepted { until, .. } if *until <= now) {
                stale.push(key.clone());
            }
        }
        (late, stale)
    }

    /// Makes delayed patches due at once, because the API server is reachable again.
    pub(crate) fn retry_now(&mut self, now: Instant) {
        for entry in self.entries.values_mut() {
            entry.retry_at = entry.retry_at.min(now);
        }
    }

    /// Returns whether peers are known not to see the pod as redirected.
    pub(crate) fn is_withdrawn(
        &self,
        key: &PodKey,
        uid: &PodUid,
        observed: Option<&str>,
        now: Instant,
    ) -> bool {
        let entry = self.entries.get(key).filter(|it| it.uid == *uid);
        let Some(entry) = entry else {
            return !Annotation::Enabled.matches(observed);
        };
        let is_known =
            entry.last_write != LastWrite::Uncertain && entry.desired != Some(Annotation::Enabled);
        entry.is_gone
            || (is_known
                && !entry
                    .last_write
                    .has_value(Annotation::Enabled, observed, now))
    }

    /// Returns whether the API server refuses to change the annotation, apparently for good.
    pub(crate) fn is_refused(&self, key: &PodKey, uid: &PodUid, now: Instant) -> bool {
        let entry = self.entries.get(key).filter(|it| it.uid == *uid);
        entry.is_some_and(|entry| entry.is_refused(now))
    }

    /// Returns the number of annotations that are not in sync and refused, apparently for good.
    pub(crate) fn refused(&self) -> u64 {
        let now = Instant::now();
        let entries = self.entries.values();
        let refused = entries.filter(|it| it.is_refused(now) && !it.is_satisfied(now));
        refused.count().try_into().unwrap_or(u64::MAX)
    }

    pub(crate) fn unmet(&self) -> u64 {
        let now = Instant::now();
        let unmet = self.entries.values().filter(|it| !it.is_satisfied(now));
        unmet.count().try_into().unwrap_or(u64::MAX)
    }

    /// Returns the number of pods whose last patch failed, and the first error.
    pub(crate) fn failures(&self) -> Option<(usize, String)> {
        let mut errors = self.entries.values().filter_map(|it| it.error.as_ref());
        let first = errors.next()?.clone();
        Some((1 + errors.count(), first))
    }
}

#[cfg(test)]
mod tests;
