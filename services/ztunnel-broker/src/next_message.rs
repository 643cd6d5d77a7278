//! Decides a session's next message about a pod from the acknowledged and the desired state.

use std::time::Instant;

use inpod_proto::ztunnelbroker::v1::WorkloadPhase;
use inpod_types::{NetnsId, WorkloadInfo};

use crate::{desired::Entry, nack::Nack};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub netns: NetnsId,
    pub info: WorkloadInfo,
}

impl Target {
    /// Returns `None` while the workload's descriptor is missing.
    pub fn of(entry: &Entry) -> Option<Self> {
        let netns = entry.descriptor.as_ref()?.netns();
        let info = entry.workload.info.clone();
        Some(Self { netns, info })
    }

    fn is_of(&self, entry: &Entry) -> bool {
        let netns = entry.descriptor.as_ref().map(|held| held.netns());
        netns == Some(self.netns) && entry.workload.info == self.info
    }
}

/// The state of a pod according to ztunnel's acknowledgements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodState {
    /// ztunnel serves the pod in the given netns, with the given info.
    Added(Target),
    /// ztunnel continues to serve the pod as before the session.
    Kept,
    Refused(Refusal),
    /// The pod was deleted within the snapshot: ztunnel may continue with the given info until the snapshot is
    /// complete.
    Cleared(WorkloadInfo),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub target: Target,
    pub nack: Nack,
    pub times: u32,
    /// Set while the pod is pending in ztunnel, which is not ready until a Del removes the pod.
    pub pending: bool,
    pub retry_at: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The pod is in sync, or no message would improve it.
    Nothing,
    Add,
    /// Only possible within the snapshot.
    Keep,
    Del,
}

/// Decides the next message about a pod. No pod is deleted before a new Add is possible: while the descriptor of the
/// new netns is missing, ztunnel continues with the old netns.
pub fn decide(state: Option<&PodState>, wanted: Option<&Entry>, now: Instant) -> Action {
    #[cfg(test)]
    crate::fixture::count_step();
    match (state, wanted) {
        (None, None) | (Some(PodState::Cleared(_)), None) => Action::Nothing,
        (None, Some(entry)) if entry.descriptor.is_some() => Action::Add,
        (None, Some(_)) => Action::Keep,
        (Some(PodState::Refused(refusal)), None) if !refusal.pending => Action::Nothing,
        (Some(_), None) => Action::Del,
        (Some(PodState::Refused(refusal)), Some(_)) if refusal.pending => Action::Del,
        (Some(state), Some(entry)) if entry.descriptor.is_some() => {
            decide_change(state, entry, now)
        }
        (Some(_), Some(_)) => Action::Nothing,
    }
}

/// Decides how to change a pod whose descriptor is held. An Add with another netns replaces the pod; ztunnel would
/// ignore an Add with the same netns and other info.
fn decide_change(state: &PodState, wanted: &Entry, now: Instant) -> Action {
    match state {
        PodState::Kept => Action::Add,
        PodState::Added(target) if target.is_of(wanted) => Action::Nothing,
        PodState::Added(target) if wanted.workload.netns == Some(target.netns) => Action::Del,
        PodState::Added(_) => Action::Add,
        PodState::Refused(refusal) if is_waiting(refusal, wanted, now) => Action::Nothing,
        PodState::Refused(_) => Action::Add,
        // ztunnel ignores changed info of a served netns, and may serve the pod until the snapshot is complete.
        PodState::Cleared(info) if *info == wanted.workload.info => Action::Add,
        PodState::Cleared(_) => Action::Nothing,
    }
}

/// Returns whether the refusal is of the wanted workload, and the time of its retry is not reached.
fn is_waiting(refusal: &Refusal, wanted: &Entry, now: Instant) -> bool {
    refusal.target.is_of(wanted) && refusal.retry_at > now
}

/// Returns the phase of a pod about which no message is in flight.
pub fn phase(state: Option<&PodState>, wanted: &Entry, now: Instant) -> WorkloadPhase {
    match state {
        Some(PodState::Added(target)) if target.is_of(wanted) => WorkloadPhase::Added,
        Some(PodState::Kept) if wanted.descriptor.is_none() => WorkloadPhase::Kept,
        Some(PodState::Refused(it)) if is_waiting(it, wanted, now) => WorkloadPhase::Refused,
        Some(_) | None => WorkloadPhase::Queued,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        desired::Desired,
        fixture::{descriptor, info, netns, uid, workload},
    };

    fn wanted(inode: u64, held: bool) -> Entry {
        let mut desired = Desired::default();
        let it = workload("c", "p", inode, 1);
        desired.set(it.revision, vec![it.clone()], Instant::now());
        if held {
            desired.store(&it.sandbox, descriptor(inode));
        }
        desired.current(&uid("p")).unwrap().clone()
    }

    fn target(inode: u64, name: &str) -> Target {
        Target {
            netns: netns(inode),
            info: info(name),
        }
    }

    fn refused(pending: bool, retry_at: Instant) -> PodState {
        let message = "failure to start proxy".to_owned();
        PodState::Refused(Refusal {
            target: target(1, "p"),
            nack: Nack {
                kind: inpod_proto::ztunnelbroker::v1::Refusal::StartFailure,
                message,
            },
            times: 1,
            pending,
            retry_at,
        })
    }

    fn added(inode: u64, name: &str) -> Option<PodState> {
        Some(PodState::Added(target(inode, name)))
    }

    fn cleared(name: &str) -> Option<PodState> {
        Some(PodState::Cleared(info(name)))
    }

    fn check(now: Instant, state: &Option<PodState>, wanted: &Option<Entry>, expected: Action) {
        let decided = decide(state.as_ref(), wanted.as_ref(), now);
        assert_eq!(decided, expected, "state {state:?}, wanted {wanted:?}");
    }

    #[test]
    fn a_pod_that_was_not_sent_is_added_or_kept() {
        let now = Instant::now();
        check(now, &None, &None, Action::Nothing);
        check(now, &None, &Some(wanted(1, true)), Action::Add);
        check(now, &None, &Some(wanted(1, false)), Action::Keep);
        check(now, &None, &Some(wanted(0, false)), Action::Keep);
    }

    #[test]
    fn a_pod_that_is_served_changes_only_to_something_that_can_be_served() {
        let now = Instant::now();
        check(now, &added(1, "p"), &Some(wanted(1, true)), Action::Nothing);
        check(now, &added(1, "p"), &None, Action::Del);
        check(now, &added(2, "p"), &Some(wanted(1, true)), Action::Add);
        check(
            now,
            &added(2, "p"),
            &Some(wanted(1, false)),
            Action::Nothing,
        );
        check(now, &added(1, "q"), &Some(wanted(1, true)), Action::Del);
        let kept = || Some(PodState::Kept);
        check(now, &kept(), &Some(wanted(1, false)), Action::Nothing);
        check(now, &kept(), &Some(wanted(1, true)), Action::Add);
        check(now, &kept(), &None, Action::Del);
    }

    #[test]
    fn a_refused_pod_is_taken_back_first_and_tried_again_when_due_or_changed() {
        let now = Instant::now();
        let later = now + Duration::from_secs(5);
        let pending = || Some(refused(true, later));
        check(now, &pending(), &Some(wanted(1, true)), Action::Del);
        check(now, &pending(), &None, Action::Del);
        let back = || Some(refused(false, later));
        check(now, &back(), &Some(wanted(1, true)), Action::Nothing);
        check(later, &back(), &Some(wanted(1, true)), Action::Add);
        check(now, &back(), &Some(wanted(2, true)), Action::Add);
        check(now, &back(), &None, Action::Nothing);
    }

    #[test]
    fn a_pod_that_was_deleted_during_the_snapshot_comes_back_with_the_same_info_only() {
        let now = Instant::now();
        check(now, &cleared("p"), &None, Action::Nothing);
        check(now, &cleared("p"), &Some(wanted(1, true)), Action::Add);
        check(now, &cleared("q"), &Some(wanted(1, true)), Action::Nothing);
    }
}
