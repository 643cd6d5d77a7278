//! Sessions and workloads as protobuf messages.

use std::time::{Instant, SystemTime};

use inpod_proto::ztunnelbroker::v1 as wire;

use crate::{
    desired::Entry,
    next_message::PodState,
    quarantine::Suspicion,
    session::{Session, SessionId},
};

pub(crate) fn session(
    id: SessionId,
    session: &Session,
    phase: wire::SessionPhase,
    queued: usize,
) -> wire::Session {
    let (peer, counts) = (session.peer.clone(), session.counts);
    // Only version 1 exists; a session with another version is closed.
    let version = if session.is_greeted() { "V1" } else { "" };
    wire::Session {
        session_id: id.0,
        peer_pid: peer.pid,
        connected_at: Some(timestamp(session.since)),
        phase: phase.into(),
        zds_version: version.to_owned(),
        cgroup: peer.cgroup.unwrap_or_default(),
        pod_uid: peer.pod_uid.map(|uid| uid.to_string()).unwrap_or_default(),
        acknowledged: counts.acknowledged,
        refused: counts.refused,
        queued: u32::try_from(queued).unwrap_or(u32::MAX),
        workloads: u32::try_from(session.serves()).unwrap_or(u32::MAX),
    }
}

/// Returns the state of a pod's current workload in one session.
pub(crate) fn workload_state(
    id: SessionId,
    session: &Session,
    wanted: &Entry,
    phase: wire::WorkloadPhase,
) -> wire::WorkloadState {
    use wire::WorkloadPhase as Phase;
    let record = session.record_of(&wanted.workload.uid);
    let is_served = matches!(phase, Phase::Added | Phase::Kept);
    let refusal = record.and_then(|record| match &record.state {
        PodState::Refused(refusal) => Some(refusal),
        PodState::Added(_) | PodState::Kept | PodState::Cleared(_) => None,
    });
    wire::WorkloadState {
        sandbox: Some((&wanted.workload.sandbox).into()),
        uid: wanted.workload.uid.to_string(),
        session_id: id.0,
        phase: phase.into(),
        acknowledged_at: record
            .filter(|_| is_served)
            .map(|record| timestamp(record.answered)),
        error: refusal
            .map(|it| it.nack.message.clone())
            .unwrap_or_default(),
        refusal: refusal
            .map_or(wire::Refusal::Unspecified, |it| it.nack.kind)
            .into(),
        refusals: refusal.map_or(0, |it| it.times),
        retry_at: refusal.map(|it| timestamp(it.retry_at)),
    }
}

pub(crate) fn workload_status(
    entry: &Entry,
    states: Vec<wire::WorkloadState>,
    suspicion: Option<&Suspicion>,
) -> wire::WorkloadStatus {
    wire::WorkloadStatus {
        workload: Some((&entry.workload).into()),
        descriptor_held: entry.descriptor.is_some(),
        states,
        known_since: Some(timestamp(entry.since)),
        suspicion: suspicion.map(|suspicion| wire::Suspicion {
            sessions_lost: suspicion.times,
            cause: suspicion.cause.clone(),
            retry_at: suspicion
                .is_in_quarantine()
                .then(|| timestamp(suspicion.due)),
        }),
    }
}

fn timestamp(at: Instant) -> prost_types::Timestamp {
    let (now, clock) = (Instant::now(), SystemTime::now());
    let shown = match at.checked_duration_since(now) {
        Some(ahead) => clock.checked_add(ahead),
        None => clock.checked_sub(now.saturating_duration_since(at)),
    };
    shown.unwrap_or(clock).into()
}
