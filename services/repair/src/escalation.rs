//! Decides about pods that lack redirection, and selects the least disruptive action that may still help.
//!
//! First, pod-events gets time to apply the rules to the running pod; the failed container then passes when the kubelet
//! restarts it. If redirection is still missing after each [`Modes::wait`], the label follows and then the deletion, if
//! these modes are enabled. A pod that serves is never deleted, nor is a pod whose replacement would fare no better.

use std::{collections::BTreeMap, time::Duration};

use inpod_service::TokenBucket;
use inpod_types::PodUid;
use tokio::time::Instant;

use crate::{
    config::{Label, Modes},
    diagnosis::{Diagnosis, PermanentFailure},
    error::ChangeError,
    limit::ChangeBackoff,
    metrics::{Action, Outcome},
    pods::Pod,
};

/// The time after which the watch of pods must show a completed change.
const WATCH_DELAY: Duration = Duration::from_secs(10);

/// The delay before a pod that changed meanwhile is reconciled again.
const CHANGED_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The reasons of Events; Istio's repair controller uses the same reasons for labels and deletions.
const REPAIR_EVENT: &str = "RepairBrokenPod";
const LABEL_EVENT: &str = "LabelBrokenPod";
const DELETE_EVENT: &str = "DeleteBrokenPod";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    pub is_warning: bool,
    pub reason: &'static str,
    pub text: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Report(Note),
    Count(Action, Outcome),
    /// Request the change from the API server and record the result.
    Change(Change),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Label,
    Unlabel,
    /// Deletes the pod only in the version last seen.
    Delete,
}

/// The case of a pod that lacks redirection, from its first diagnosis until its end.
#[derive(Debug)]
struct Case {
    since: Instant,
    why: String,
    has_failed: bool,
    /// An Event has reported the pod as not repaired in place.
    is_reported: bool,
    /// The pod is repaired in place, as an Event has reported.
    is_repaired: bool,
    labelled: Option<Instant>,
    /// The label was already set when the case began.
    was_labelled: bool,
    backoff: ChangeBackoff,
}

#[derive(Clone, Copy, Debug)]
struct AllowedChanges {
    label: bool,
    delete: bool,
}

#[derive(Debug)]
pub struct Escalation {
    modes: Modes,
    label: Label,
    bucket: TokenBucket,
    cases: BTreeMap<PodUid, Case>,
}

impl Escalation {
    pub fn new(modes: Modes, label: Label, bucket: TokenBucket) -> Self {
        Self {
            modes,
            label,
            bucket,
            cases: BTreeMap::new(),
        }
    }

    pub fn retain(&mut self, is_known: impl Fn(&PodUid) -> bool) {
        self.cases.retain(|uid, _| is_known(uid));
    }

    /// Returns whether an action may become due even if no pod changes.
    pub fn has_open_cases(&self) -> bool {
        !self.cases.is_empty()
    }

    /// Returns the number of pods that stay without redirection.
    pub fn unhealthy(&self) -> usize {
        self.cases.values().filter(|case| case.is_reported).count()
    }

    pub fn reconcile(&mut self, pod: &Pod, diagnosis: &Diagnosis, now: Instant) -> Vec<Step> {
        if pod.is_ending {
            self.cases.remove(&pod.pod.uid);
            return Vec::new();
        }
        match diagnosis {
            Diagnosis::Unknown => Vec::new(),
            Diagnosis::Healthy(is_redirected) => self.close(pod, *is_redirected, now),
            Diagnosis::Repaired => {
                let case = self.case(pod, now);
                case.is_reported = false;
                let is_new = !std::mem::replace(&mut case.is_repaired, true);
                self.report_repaired(is_new)
            }
            Diagnosis::Missing(lack) => {
                let allowed = AllowedChanges {
                    label: lack.has_failed || lack.has_proxy,
                    delete: lack.has_failed && lack.is_known,
                };
                let wait = if self.modes.repair {
                    self.modes.wait
                } else {
                    Duration::ZERO
                };
                let case = self.case(pod, now);
                case.is_repaired = false;
                case.has_failed |= lack.has_failed;
                if now.saturating_duration_since(case.since) < wait {
                    return Vec::new();
                }
                self.report_and_escalate(pod, &lack.why, Outcome::Fail, allowed, now)
            }
            Diagnosis::Permanent(PermanentFailure::FailedAgain(why)) => {
                let allowed = AllowedChanges {
                    label: true,
                    delete: true,
                };
                self.report_and_escalate(pod, why, Outcome::Fail, allowed, now)
            }
            Diagnosis::Permanent(PermanentFailure::NotDesired(why)) => {
                let allowed = AllowedChanges {
                    label: true,
                    delete: false,
                };
                self.report_and_escalate(pod, why, Outcome::Skip, allowed, now)
            }
        }
    }

    /// Records the result of a change, and returns the steps that report the result.
    pub fn record_result(
        &mut self,
        pod: &Pod,
        change: Change,
        answer: &Result<(), ChangeError>,
        now: Instant,
    ) -> Vec<Step> {
        let case = self.case(pod, now);
        match answer {
            Ok(()) if change == Change::Label => case.labelled = Some(now),
            Ok(()) => case.backoff.pause(now, WATCH_DELAY),
            Err(ChangeError::Changed) => case.backoff.pause(now, CHANGED_RETRY_INTERVAL),
            Err(ChangeError::Failed(_)) => case.backoff.fail(now),
        }
        let (action, reason, what) = match change {
            Change::Label => (Action::Label, LABEL_EVENT, "labelled"),
            Change::Delete => (Action::Delete, DELETE_EVENT, "deleted"),
            Change::Unlabel => return Vec::new(),
        };
        let warn = |text| {
            Step::Report(Note {
                is_warning: true,
                reason,
                text,
            })
        };
        match answer {
            Ok(()) => vec![
                Step::Count(action, Outcome::Success),
                warn(format!("The pod is {what}: {}", case.why)),
            ],
            Err(ChangeError::Changed) => vec![Step::Count(action, Outcome::Skip)],
            Err(ChangeError::Failed(error)) => vec![
                Step::Count(action, Outcome::Fail),
                warn(format!("The pod could not be {what}: {error}")),
            ],
        }
    }

    fn case(&mut self, pod: &Pod, now: Instant) -> &mut Case {
        self.cases
            .entry(pod.pod.uid.clone())
            .or_insert_with(|| Case {
                since: now,
                why: String::new(),
                has_failed: pod.failed_init.is_some(),
                is_reported: false,
                is_repaired: false,
                labelled: None,
                was_labelled: pod.label.is_some(),
                backoff: ChangeBackoff::default(),
            })
    }

    /// Handles a pod that lacks nothing. The case of the pod ends once this service's label is removed.
    fn close(&mut self, pod: &Pod, is_redirected: bool, now: Instant) -> Vec<Step> {
        let is_labelled = self.modes.label && pod.label.as_ref() == Some(&self.label.value);
        let known = self.cases.get_mut(&pod.pod.uid);
        let is_new = known
            .as_ref()
            .is_some_and(|case| (case.is_reported || case.has_failed) && !case.is_repaired);
        let may = known.is_none_or(|case| {
            case.is_reported = false;
            case.has_failed = false;
            case.backoff.is_elapsed(now)
        });
        let mut steps = self.report_repaired(is_new && is_redirected);
        if !is_labelled {
            self.cases.remove(&pod.pod.uid);
        } else if may && self.bucket.try_take(now) {
            steps.push(Step::Change(Change::Unlabel));
        }
        steps
    }

    fn report_repaired(&self, is_new: bool) -> Vec<Step> {
        if !is_new || !self.modes.repair {
            return Vec::new();
        }
        let text = "The pod is redirected now: pod-events applied the rules while it runs";
        vec![
            Step::Count(Action::Repair, Outcome::Success),
            Step::Report(Note {
                is_warning: false,
                reason: REPAIR_EVENT,
                text: text.to_owned(),
            }),
        ]
    }

    /// Reports once that the repair in place did not help, and escalates.
    fn report_and_escalate(
        &mut self,
        pod: &Pod,
        why: &str,
        outcome: Outcome,
        allowed: AllowedChanges,
        now: Instant,
    ) -> Vec<Step> {
        let reports = self.modes.repair;
        let case = self.case(pod, now);
        why.clone_into(&mut case.why);
        let is_new = !std::mem::replace(&mut case.is_reported, true);
        let mut steps = Vec::new();
        if is_new && reports {
            steps.push(Step::Count(Action::Repair, outcome));
            steps.push(Step::Report(Note {
                is_warning: true,
                reason: REPAIR_EVENT,
                text: format!("The pod is not redirected: {why}"),
            }));
        }
        steps.extend(self.escalate(pod, allowed, now));
        steps
    }

    fn escalate(&mut self, pod: &Pod, allowed: AllowedChanges, now: Instant) -> Vec<Step> {
        let Modes {
            label,
            delete,
            wait,
            ..
        } = self.modes;
        let Some(case) = self.cases.get_mut(&pod.pod.uid) else {
            return Vec::new();
        };
        let mut steps = Vec::new();
        let mut is_due = delete && allowed.delete;
        if label && allowed.label {
            if pod.label.is_none() {
                let is_done = case
                    .labelled
                    .is_some_and(|at| now.saturating_duration_since(at) < WATCH_DELAY);
                if !is_done && case.backoff.is_elapsed(now) && self.bucket.try_take(now) {
                    steps.push(Step::Change(Change::Label));
                }
                return steps;
            }
            if std::mem::take(&mut case.was_labelled) {
                steps.push(Step::Count(Action::Label, Outcome::Skip));
            }
            let labelled = *case.labelled.get_or_insert(now);
            is_due = is_due && now.saturating_duration_since(labelled) >= wait;
        }
        if is_due && case.backoff.is_elapsed(now) && self.bucket.try_take(now) {
            steps.push(Step::Change(Change::Delete));
        }
        steps
    }
}

#[cfg(test)]
mod tests;
