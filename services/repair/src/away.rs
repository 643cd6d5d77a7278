//! Decides which pods' condition `inpod.io/InMesh` becomes Unknown while pod-events, the writer of the condition, is
//! away (decision 100).
//!
//! Only True becomes Unknown: False keeps its reason, and pod-events replaces Unknown once a pod is proven again.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use inpod_types::{NodeName, PodUid, keys};
use k8s_openapi::{api::core::v1 as k8s, apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use tokio::time::Instant;

use crate::{error::ChangeError, limit::ChangeBackoff, pods::Pod};

/// The number of patches in flight. The rate limit of labels and deletions does not apply: at six changes a minute, a
/// node with 100 pods would show stale conditions for a quarter of an hour, and labels would wait behind the patches.
const MAX_IN_FLIGHT: usize = 8;

/// The delay after a patch of a pod that had changed since the watch showed the pod.
const CHANGED_RETRY_INTERVAL: Duration = Duration::from_secs(1);

const REASON: &str = "AgentAway";

/// A period without an answer from pod-events. The first period begins with this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absence {
    since: Instant,
    /// The wall-clock time of `since`, for messages.
    began: Timestamp,
}

impl Absence {
    pub(crate) fn begin() -> Self {
        Self {
            since: Instant::now(),
            began: Timestamp::now(),
        }
    }

    /// Returns the condition of a pod that was in the mesh at the beginning of the absence.
    pub(crate) fn condition(&self, node: &NodeName, now: Timestamp) -> k8s::PodCondition {
        let message = format!(
            "pod-events has not answered on node {node} since {:.0}; the rules and ztunnel keep serving. Look at the \
             state and the log of the pod of pod-events on this node.",
            self.began
        );
        k8s::PodCondition {
            type_: keys::IN_MESH.to_owned(),
            status: "Unknown".to_owned(),
            reason: Some(REASON.to_owned()),
            message: Some(message),
            last_transition_time: Some(Time(now)),
            ..k8s::PodCondition::default()
        }
    }
}

/// The pods that were patched during the current absence.
#[derive(Debug)]
pub struct Away {
    /// The length of an absence after which pods are patched; `None` for never.
    after: Option<Duration>,
    absence: Option<Absence>,
    attempts: BTreeMap<PodUid, Attempt>,
}

#[derive(Clone, Copy, Debug)]
enum Attempt {
    /// The pod gets no second patch during the absence. A condition that is True again was set by a pod-events whose
    /// socket this process cannot reach, and the two services would overwrite each other without end.
    Accepted,
    Failed(ChangeBackoff),
}

impl Away {
    pub fn new(after: Option<Duration>) -> Self {
        Self {
            after,
            absence: None,
            attempts: BTreeMap::new(),
        }
    }

    /// Returns whether patches may become due although no pod changes.
    pub fn is_counting(&self) -> bool {
        self.after.is_some() && self.absence.is_some()
    }

    /// Selects the pods to patch now, at most `MAX_IN_FLIGHT`.
    pub fn select(
        &mut self,
        absence: Option<Absence>,
        pods: &BTreeMap<PodUid, Arc<Pod>>,
        now: Instant,
    ) -> Vec<Arc<Pod>> {
        if self.absence != absence {
            self.absence = absence;
            self.attempts.clear();
        }
        self.attempts.retain(|uid, _| pods.contains_key(uid));
        let is_long = |(absence, after): (Absence, Duration)| {
            now.saturating_duration_since(absence.since) >= after
        };
        if !absence.zip(self.after).is_some_and(is_long) {
            return Vec::new();
        }
        let due = pods.values().filter(|pod| self.is_due(pod, now));
        due.take(MAX_IN_FLIGHT).cloned().collect()
    }

    fn is_due(&self, pod: &Pod, now: Instant) -> bool {
        let may = match self.attempts.get(&pod.pod.uid) {
            None => true,
            Some(Attempt::Accepted) => false,
            Some(Attempt::Failed(backoff)) => backoff.is_elapsed(now),
        };
        may && pod.is_in_mesh && !pod.is_ending
    }

    pub fn record_result(&mut self, pod: &Pod, answer: &Result<(), ChangeError>, now: Instant) {
        let mut backoff = match self.attempts.get(&pod.pod.uid) {
            Some(Attempt::Failed(backoff)) => *backoff,
            Some(Attempt::Accepted) | None => ChangeBackoff::default(),
        };
        let attempt = match answer {
            Ok(()) => Attempt::Accepted,
            Err(ChangeError::Changed) => {
                backoff.pause(now, CHANGED_RETRY_INTERVAL);
                Attempt::Failed(backoff)
            }
            Err(ChangeError::Failed(_)) => {
                backoff.fail(now);
                Attempt::Failed(backoff)
            }
        };
        self.attempts.insert(pod.pod.uid.clone(), attempt);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    const AFTER: Duration = Duration::from_secs(600);

    fn failed() -> Result<(), ChangeError> {
        Err(ChangeError::Failed("no".to_owned()))
    }

    fn pods(all: &[Pod]) -> BTreeMap<PodUid, Arc<Pod>> {
        let entry = |pod: &Pod| (pod.pod.uid.clone(), Arc::new(pod.clone()));
        all.iter().map(entry).collect()
    }

    fn in_mesh(name: &str) -> Pod {
        Pod {
            is_in_mesh: true,
            ..testing::pod(name)
        }
    }

    fn names(selected: &[Arc<Pod>]) -> Vec<String> {
        let names = selected.iter().map(|pod| pod.pod.name.to_string());
        names.collect()
    }

    #[test]
    fn only_running_pods_in_the_mesh_become_unknown_after_the_time() {
        let absence = Absence::begin();
        let ending = Pod {
            is_ending: true,
            ..in_mesh("ending")
        };
        let all = pods(&[in_mesh("web"), testing::pod("outside"), ending]);
        let early = AFTER - Duration::from_millis(1);
        for (after, absence, elapsed, expected) in [
            (Some(AFTER), Some(absence), AFTER, &["web"][..]),
            (Some(AFTER), Some(absence), early, &[]),
            (Some(AFTER), None, AFTER, &[]),
            (None, Some(absence), AFTER * 100, &[]),
        ] {
            let mut away = Away::new(after);
            let now = Instant::now() + elapsed;
            let now = absence.map_or(now, |absence| absence.since + elapsed);
            let selected = away.select(absence, &all, now);
            assert_eq!(names(&selected), expected, "{after:?} {elapsed:?}");
            assert_eq!(away.is_counting(), after.is_some() && absence.is_some());
        }
    }

    #[test]
    fn a_pod_is_patched_once_per_absence_and_again_in_the_next() {
        let (mut away, web) = (Away::new(Some(AFTER)), in_mesh("web"));
        let all = pods(std::slice::from_ref(&web));
        let first = Absence::begin();
        let mut now = first.since + AFTER;
        assert_eq!(names(&away.select(Some(first), &all, now)), ["web"]);
        away.record_result(&web, &Ok(()), now);
        now += AFTER;
        assert!(away.select(Some(first), &all, now).is_empty());
        let next = Absence {
            since: now,
            ..first
        };
        assert!(away.select(Some(next), &all, now).is_empty(), "too early");
        now += AFTER;
        assert_eq!(names(&away.select(Some(next), &all, now)), ["web"]);
    }

    #[test]
    fn failed_patches_wait_and_other_pods_take_their_place() {
        let mut away = Away::new(Some(AFTER));
        let all: Vec<_> = (0..12).map(|i| in_mesh(&format!("web-{i:02}"))).collect();
        let (known, absence) = (pods(&all), Absence::begin());
        let now = absence.since + AFTER;
        let select = |away: &mut Away, now| names(&away.select(Some(absence), &known, now));
        let first = select(&mut away, now);
        assert_eq!(first.len(), MAX_IN_FLIGHT);
        for pod in all.iter().take(MAX_IN_FLIGHT) {
            away.record_result(pod, &failed(), now);
        }
        assert_eq!(select(&mut away, now).len(), all.len() - MAX_IN_FLIGHT);
        for pod in all.iter().skip(MAX_IN_FLIGHT) {
            away.record_result(pod, &Err(ChangeError::Changed), now);
        }
        assert!(select(&mut away, now).is_empty());
        let soon = now + CHANGED_RETRY_INTERVAL;
        assert_eq!(select(&mut away, soon).len(), all.len() - MAX_IN_FLIGHT);
        let later = now + Duration::from_secs(5);
        assert_eq!(select(&mut away, later), first);
    }
}
