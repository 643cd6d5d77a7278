//! What people and pod-events are shown of the sessions.

use std::time::Instant;

use inpod_types::{PodUid, SandboxRef};

use crate::{
    next_message::{PodState, Refusal, Target},
    peer::Peer,
    quarantine::Suspicion,
    session::{Counts, Session, SessionInputs, Stage},
    sessions::{SessionId, Slot},
};

/// Something that changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A session.
    Session(SessionView),
    /// A workload in a session.
    Workload(WorkloadView),
}

/// A connected ztunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionView {
    /// Its number.
    pub id: SessionId,
    /// Who it is.
    pub peer: Peer,
    /// When it connected.
    pub since: Instant,
    /// How far it is; `None` when it has gone.
    pub stage: Option<Stage>,
    /// Whether it has said hello.
    pub greeted: bool,
    /// What it has answered so far.
    pub counts: Counts,
    /// How many pods it is still to be looked at for.
    pub queued: usize,
    /// How many pods it serves.
    pub workloads: usize,
}

/// How far a workload is in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Not told yet, or not all of it.
    Queued,
    /// Told, not answered.
    Sent,
    /// Added and acknowledged.
    Added,
    /// Kept and acknowledged.
    Kept,
    /// Refused.
    Refused,
    /// No longer desired, and out of the session.
    Removed,
    /// Not told for now, as sessions ended over it.
    Quarantined,
}

/// A workload in a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadView {
    /// The sandbox.
    pub sandbox: SandboxRef,
    /// The pod.
    pub uid: PodUid,
    /// The session.
    pub session: SessionId,
    /// How far it is.
    pub progress: Progress,
    /// When it was answered last.
    pub answered: Option<Instant>,
    /// Its refusal, if it refused.
    pub refusal: Option<Refusal>,
}

/// A session as it is now.
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

/// A pod in a session as it is now; `sandbox` is the one that is meant when the pod is not desired.
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
        Some(PodState::Refused(refusal)) if wanted.is_none() && !refusal.pending => {
            Progress::Removed
        }
        Some(PodState::Refused(_)) => Progress::Refused,
        Some(PodState::Added(_) | PodState::Kept | PodState::Cleared(_)) | None => Progress::Queued,
    };
    let refusal = record.and_then(|record| match &record.state {
        PodState::Refused(refusal) => Some(refusal.clone()),
        PodState::Added(_) | PodState::Kept | PodState::Cleared(_) => None,
    });
    WorkloadView {
        sandbox: sandbox.clone(),
        uid: uid.clone(),
        session: id,
        progress,
        answered: record.map(|record| record.answered),
        refusal,
    }
}
