//! What is remembered of pods that lack redirection, and what is to be done now: the kindest thing that may still help.
//!
//! In place comes first: pod-events puts the rules into the running pod, and the container that failed passes when it is
//! started again. Each kinder way is given [`Modes::wait`]; then comes the label, then the deletion, each where its mode
//! is on. A pod that serves is never deleted, nor one whose successor would fare no better.

use std::{collections::BTreeMap, time::Duration};

use inpod_types::PodUid;
use tokio::time::Instant;

use crate::{
    config::{Label, Modes},
    diagnosis::{Diagnosis, Hopeless},
    error::ChangeError,
    limit::{Backoff, Bucket},
    metrics::{Came, Way},
    pods::Pod,
};

/// How long the watch may take to show what was done.
const SHOWN: Duration = Duration::from_secs(10);

/// How soon a pod is looked at again that had changed meanwhile.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The reasons of Events. Those of labels and deletions are Istio's.
const REPAIR: &str = "RepairBrokenPod";
const LABEL: &str = "LabelBrokenPod";
const DELETE: &str = "DeleteBrokenPod";

/// Something to tell of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Whether somebody should look.
    pub is_warning: bool,
    /// The Event's reason.
    pub reason: &'static str,
    /// What, for people.
    pub text: String,
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Tell it.
    Tell(Note),
    /// Count it.
    Count(Way, Came),
    /// Ask the API server for it, and say what became of it.
    Change(Change),
}

/// Something that the API server is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Put our label on the pod.
    Label,
    /// Take it off.
    Unlabel,
    /// Delete the pod as it was seen.
    Delete,
}

/// What is remembered of a pod.
#[derive(Debug)]
struct Case {
    since: Instant,
    /// Why it lacks redirection, as it was last known.
    why: String,
    /// Its init container has failed.
    has_failed: bool,
    /// It was told that it is not repaired in place.
    is_told: bool,
    /// It was told that it is.
    is_mended: bool,
    labelled: Option<Instant>,
    /// The label was there before us.
    was_labelled: bool,
    backoff: Backoff,
}

/// What may be done to a pod.
#[derive(Clone, Copy, Debug)]
struct May {
    label: bool,
    delete: bool,
}

/// All pods that lack redirection.
#[derive(Debug)]
pub struct Ledger {
    modes: Modes,
    label: Label,
    bucket: Bucket,
    cases: BTreeMap<PodUid, Case>,
}

impl Ledger {
    /// Nothing is remembered.
    pub fn new(modes: Modes, label: Label, bucket: Bucket) -> Self {
        Self {
            modes,
            label,
            bucket,
            cases: BTreeMap::new(),
        }
    }

    /// Forgets pods that are no more.
    pub fn keep(&mut self, is_known: impl Fn(&PodUid) -> bool) {
        self.cases.retain(|uid, _| is_known(uid));
    }

    /// Whether something may become due though nothing changes.
    pub fn is_open(&self) -> bool {
        !self.cases.is_empty()
    }

    /// How many pods stay without redirection.
    pub fn amiss(&self) -> usize {
        self.cases.values().filter(|case| case.is_told).count()
    }

    /// What is to be done with a pod now.
    pub fn look(&mut self, pod: &Pod, diagnosis: &Diagnosis, now: Instant) -> Vec<Step> {
        if pod.is_ending {
            self.cases.remove(&pod.pod.uid);
            return Vec::new();
        }
        match diagnosis {
            Diagnosis::Unsure => Vec::new(),
            Diagnosis::Well(is_redirected) => self.close(pod, *is_redirected, now),
            Diagnosis::Mended => {
                let case = self.case(pod, now);
                case.is_told = false;
                let is_news = !std::mem::replace(&mut case.is_mended, true);
                self.mended(is_news)
            }
            Diagnosis::Lacks(lack) => {
                let may = May {
                    label: lack.has_failed || lack.has_proxy,
                    delete: lack.has_failed && lack.is_known,
                };
                let patience = if self.modes.repair {
                    self.modes.wait
                } else {
                    Duration::ZERO
                };
                let case = self.case(pod, now);
                case.is_mended = false;
                case.has_failed |= lack.has_failed;
                if now.saturating_duration_since(case.since) < patience {
                    return Vec::new();
                }
                self.take_up(pod, &lack.why, Came::Fail, may, now)
            }
            Diagnosis::Hopeless(Hopeless::Again(why)) => {
                let may = May {
                    label: true,
                    delete: true,
                };
                self.take_up(pod, why, Came::Fail, may, now)
            }
            Diagnosis::Hopeless(Hopeless::Unwanted(why)) => {
                let may = May {
                    label: true,
                    delete: false,
                };
                self.take_up(pod, why, Came::Skip, may, now)
            }
        }
    }

    /// What became of a change, which is to be told in turn.
    pub fn did(
        &mut self,
        pod: &Pod,
        change: Change,
        answer: &Result<(), ChangeError>,
        now: Instant,
    ) -> Vec<Step> {
        let case = self.case(pod, now);
        match answer {
            Ok(()) if change == Change::Label => case.labelled = Some(now),
            Ok(()) => case.backoff.rest(now, SHOWN),
            Err(ChangeError::Changed) => case.backoff.rest(now, LOOK_AGAIN),
            Err(ChangeError::Failed(_)) => case.backoff.fail(now),
        }
        let (way, reason, what) = match change {
            Change::Label => (Way::Label, LABEL, "labelled"),
            Change::Delete => (Way::Delete, DELETE, "deleted"),
            Change::Unlabel => return Vec::new(),
        };
        let warn = |text| {
            Step::Tell(Note {
                is_warning: true,
                reason,
                text,
            })
        };
        match answer {
            Ok(()) => vec![
                Step::Count(way, Came::Success),
                warn(format!("The pod is {what}: {}", case.why)),
            ],
            Err(ChangeError::Changed) => vec![Step::Count(way, Came::Skip)],
            Err(ChangeError::Failed(error)) => vec![
                Step::Count(way, Came::Fail),
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
                has_failed: pod.broken.is_some(),
                is_told: false,
                is_mended: false,
                labelled: None,
                was_labelled: pod.label.is_some(),
                backoff: Backoff::default(),
            })
    }

    /// The pod lacks nothing. Its case is over when our label is gone, too.
    fn close(&mut self, pod: &Pod, is_redirected: bool, now: Instant) -> Vec<Step> {
        let is_labelled = self.modes.label && pod.label.as_ref() == Some(&self.label.value);
        let known = self.cases.get_mut(&pod.pod.uid);
        let is_news = known
            .as_ref()
            .is_some_and(|case| (case.is_told || case.has_failed) && !case.is_mended);
        let may = known.is_none_or(|case| {
            case.is_told = false;
            case.has_failed = false;
            case.backoff.is_over(now)
        });
        let mut steps = self.mended(is_news && is_redirected);
        if !is_labelled {
            self.cases.remove(&pod.pod.uid);
        } else if may && self.bucket.take(now) {
            steps.push(Step::Change(Change::Unlabel));
        }
        steps
    }

    fn mended(&self, is_news: bool) -> Vec<Step> {
        if !is_news || !self.modes.repair {
            return Vec::new();
        }
        let text = "The pod is redirected now: pod-events put the rules into it while it runs";
        vec![
            Step::Count(Way::Repair, Came::Success),
            Step::Tell(Note {
                is_warning: false,
                reason: REPAIR,
                text: text.to_owned(),
            }),
        ]
    }

    /// In place did not help: this is told once, and then come the others.
    fn take_up(&mut self, pod: &Pod, why: &str, came: Came, may: May, now: Instant) -> Vec<Step> {
        let tells = self.modes.repair;
        let case = self.case(pod, now);
        why.clone_into(&mut case.why);
        let is_news = !std::mem::replace(&mut case.is_told, true);
        let mut steps = Vec::new();
        if is_news && tells {
            steps.push(Step::Count(Way::Repair, came));
            steps.push(Step::Tell(Note {
                is_warning: true,
                reason: REPAIR,
                text: format!("The pod is not redirected: {why}"),
            }));
        }
        steps.extend(self.escalate(pod, may, now));
        steps
    }

    fn escalate(&mut self, pod: &Pod, may: May, now: Instant) -> Vec<Step> {
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
        let mut is_due = delete && may.delete;
        if label && may.label {
            if pod.label.is_none() {
                let is_done = case
                    .labelled
                    .is_some_and(|at| now.saturating_duration_since(at) < SHOWN);
                if !is_done && case.backoff.is_over(now) && self.bucket.take(now) {
                    steps.push(Step::Change(Change::Label));
                }
                return steps;
            }
            if std::mem::take(&mut case.was_labelled) {
                steps.push(Step::Count(Way::Label, Came::Skip));
            }
            let labelled = *case.labelled.get_or_insert(now);
            is_due = is_due && now.saturating_duration_since(labelled) >= wait;
        }
        if is_due && case.backoff.is_over(now) && self.bucket.take(now) {
            steps.push(Step::Change(Change::Delete));
        }
        steps
    }
}

#[cfg(test)]
mod tests;
