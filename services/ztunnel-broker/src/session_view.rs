//! Read-only views of sessions and workloads.

use std::time::Instant;

use inpod_types::{PodUid, SandboxRef};

use crate::{
    next_message::{PodState, Refusal, Target},
    peer::Peer,
    quarantine::Suspicion,
    session::{Counts, Session, SessionInputs, Stage},
    sessions::{SessionId, Slot},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionView {
    pub id: SessionId,
    pub peer: Peer,
    pub since: Instant,
    /// `None` once the session is closed.
    pub stage: Option<Stage>,
    pub greeted: bool,
    pub counts: Counts,
    pub queued: usize,
    pub workloads: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The pod was not sent yet, or not completely.
    Queued,
    Sent,
    Added,
    Kept,
    Refused,
    /// The pod is no longer desired, and removed from the session.
    Removed,
    /// The pod is not sent for now, because sessions ended over the pod.
    Quarantined,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadView {
    pub sandbox: SandboxRef,
    pub uid: PodUid,
    pub session: SessionId,
    pub progress: Progress,
    /// The time at which the ztunnel acknowledged the workload as it is desired now.
    pub acknowledged: Option<Instant>,
    pub refusal: Option<Refusal>,
}

pub fn session(id: SessionId, slot: &Slot) -> SessionView {
    let stage = slot.session.stage();
    SessionView {
        id,
        peer: slot.peer.clone(),
        since: slot.since,
        stage: Some(stage),
        greeted: stage != Stage::Connected,
        counts: slot.session.counts(),
        queued: slot.session.queued(),
        workloads: slot.session.serves(),
    }
}

/// Returns a pod's view. `sandbox` is used if the pod is not desired.
pub fn workload(
    inputs: SessionInputs<'_>,
    id: SessionId,
    session: &Session,
    uid: &PodUid,
    sandbox: &SandboxRef,
) -> WorkloadView {
    let record = session.record_of(uid);
    let wanted = inputs.desired.current(uid);
    let suspicion = inputs.quarantine.suspicion(uid, session.ztunnel());
    let quarantined = suspicion.is_some_and(Suspicion::is_in_quarantine);
    let sandbox = wanted.map_or(sandbox, |entry| &entry.workload().sandbox);
    let target = wanted.and_then(Target::of);
    let progress = match record.map(|record| &record.state) {
        _ if session.is_sent(uid) => Progress::Sent,
        None if wanted.is_none() => Progress::Removed,
        Some(PodState::Cleared(_)) if wanted.is_none() => Progress::Removed,
        Some(PodState::Added(acknowledged)) if target.as_ref() == Some(acknowledged) => {
            Progress::Added
        }
        Some(PodState::Kept) if wanted.is_some() && target.is_none() => Progress::Kept,
        _ if wanted.is_some() && quarantined => Progress::Quarantined,
        Some(PodState::Refused(it)) if wanted.is_none() && !it.pending => Progress::Removed,
        Some(PodState::Refused(_)) => Progress::Refused,
        Some(PodState::Added(_) | PodState::Kept | PodState::Cleared(_)) | None => Progress::Queued,
    };
    let is_served = matches!(progress, Progress::Added | Progress::Kept);
    let refusal = record.and_then(|record| match &record.state {
        PodState::Refused(refusal) => Some(refusal.clone()),
        PodState::Added(_) | PodState::Kept | PodState::Cleared(_) => None,
    });
    WorkloadView {
        sandbox: sandbox.clone(),
        uid: uid.clone(),
        session: id,
        progress,
        acknowledged: record.filter(|_| is_served).map(|it| it.answered),
        refusal,
    }
}
