//! What people and pod-events are shown of the sessions.

use std::time::Instant;

use workload::{PodUid, SandboxRef};

use crate::{
    desired::Desired,
    peer::Peer,
    session::{Session, Stage},
    sessions::{SessionId, Slot},
    step::{Target, Told},
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
    /// ztunnel's words, if it refused.
    pub error: Option<String>,
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
    }
}

/// A pod in a session as it is now; `sandbox` is the one that is meant when the pod is not desired.
pub fn workload(
    desired: &Desired,
    id: SessionId,
    session: &Session,
    uid: &PodUid,
    sandbox: &SandboxRef,
) -> WorkloadView {
    let record = session.record_of(uid);
    let wanted = desired.current(uid);
    let sandbox = wanted.map_or(sandbox, |entry| &entry.workload().sandbox);
    let target = wanted.and_then(Target::of);
    let progress = match record.map(|record| &record.told) {
        _ if session.is_sent(uid) => Progress::Sent,
        None if wanted.is_none() => Progress::Removed,
        Some(Told::Cleared(_)) if wanted.is_none() => Progress::Removed,
        Some(Told::Added(told)) if target.as_ref() == Some(told) => Progress::Added,
        Some(Told::Kept) if wanted.is_some() && target.is_none() => Progress::Kept,
        Some(Told::Refused(refusal)) if wanted.is_none() && !refusal.pending => Progress::Removed,
        Some(Told::Refused(_)) => Progress::Refused,
        Some(Told::Added(_) | Told::Kept | Told::Cleared(_)) | None => Progress::Queued,
    };
    let error = record.and_then(|record| match &record.told {
        Told::Refused(refusal) => Some(refusal.nack.words.clone()),
        Told::Added(_) | Told::Kept | Told::Cleared(_) => None,
    });
    WorkloadView {
        sandbox: sandbox.clone(),
        uid: uid.clone(),
        session: id,
        progress,
        answered: record.map(|record| record.answered),
        error,
    }
}
