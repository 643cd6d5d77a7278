//! The stream of changes of sessions, and views of workloads, as protobuf messages.

use std::time::{Instant, SystemTime};

use futures_util::{Stream, StreamExt as _, stream};
use inpod_proto::ztunnelbroker::v1::{
    self as wire, Session, SessionPhase, StateComplete, WatchSessionsResponse, WorkloadPhase,
    WorkloadState, WorkloadStatus, watch_sessions_response::Event as Payload,
};
use inpod_types::{Failure, Reason};
use tokio_stream::wrappers::{BroadcastStream, errors::BroadcastStreamRecvError};
use tonic::Status;

use crate::{
    hub::{self, Hub, Listed},
    nack::NackKind,
    quarantine::Suspicion,
    session::Stage,
    session_view::{Progress, SessionView, WorkloadView},
};

/// Streams the initial state, its end and then every change. A watcher that falls behind is disconnected, because the
/// watcher would miss changes.
pub fn sessions(
    hub: &Hub,
    instance_id: &str,
) -> impl Stream<Item = Result<WatchSessionsResponse, Status>> + use<> {
    let (status, changes) = hub.watch();
    let first = state(status, instance_id).into_iter().map(Ok);
    let changes = BroadcastStream::new(changes).scan(false, |cut, change| {
        let next = (!*cut).then(|| change.map(payload).map_err(lagged));
        *cut = matches!(next, Some(Err(_)));
        std::future::ready(next)
    });
    stream::iter(first).chain(changes).map(|event| {
        let event = Some(event?);
        Ok(WatchSessionsResponse { event })
    })
}

fn state(status: hub::Status, instance_id: &str) -> Vec<Payload> {
    let complete = StateComplete {
        seeded: status.seeded,
    };
    let mut state = vec![Payload::InstanceId(instance_id.to_owned())];
    state.extend(status.sessions.into_iter().map(payload));
    state.push(Payload::StateComplete(complete));
    state
}

fn payload(view: SessionView) -> Payload {
    Payload::Session(view.into())
}

fn lagged(BroadcastStreamRecvError::Lagged(missed): BroadcastStreamRecvError) -> Status {
    let message = format!("the watcher fell behind by {missed} changes; read again");
    inpod_proto::into_status(&Failure::new(Reason::Overloaded, message))
}

impl From<SessionView> for Session {
    fn from(view: SessionView) -> Self {
        let phase = match view.stage {
            Some(Stage::Connected) => SessionPhase::Connected,
            Some(Stage::Snapshot) => SessionPhase::Snapshot,
            Some(Stage::Live) => SessionPhase::Live,
            None => SessionPhase::Closed,
        };
        // Only version 1 exists; a session with another version is closed.
        let version = if view.greeted { "V1" } else { "" };
        Self {
            session_id: view.id.0,
            peer_pid: view.peer.pid,
            connected_at: Some(timestamp(view.since)),
            phase: phase.into(),
            zds_version: version.to_owned(),
            cgroup: view.peer.cgroup.unwrap_or_default(),
            pod_uid: view
                .peer
                .pod_uid
                .map(|uid| uid.to_string())
                .unwrap_or_default(),
            acknowledged: view.counts.acknowledged,
            refused: view.counts.refused,
            queued: count(view.queued),
            workloads: count(view.workloads),
        }
    }
}

fn count(items: usize) -> u32 {
    u32::try_from(items).unwrap_or(u32::MAX)
}

impl From<WorkloadView> for WorkloadState {
    fn from(view: WorkloadView) -> Self {
        let phase = match view.progress {
            Progress::Queued => WorkloadPhase::Queued,
            Progress::Sent => WorkloadPhase::Sent,
            Progress::Added => WorkloadPhase::Added,
            Progress::Kept => WorkloadPhase::Kept,
            Progress::Refused => WorkloadPhase::Refused,
            Progress::Removed => WorkloadPhase::Removed,
            Progress::Quarantined => WorkloadPhase::Quarantined,
        };
        let refused = view.refusal.as_ref();
        Self {
            sandbox: Some((&view.sandbox).into()),
            uid: view.uid.to_string(),
            session_id: view.session.0,
            phase: phase.into(),
            acknowledged_at: view.acknowledged.map(timestamp),
            error: refused
                .map(|it| it.nack.message.clone())
                .unwrap_or_default(),
            refusal: refused
                .map_or(wire::Refusal::Unspecified, |it| refusal(it.nack.kind))
                .into(),
            refusals: refused.map_or(0, |it| it.times),
            retry_at: refused.map(|it| timestamp(it.retry_at)),
        }
    }
}

impl From<Listed> for WorkloadStatus {
    fn from(listed: Listed) -> Self {
        Self {
            workload: Some((&listed.workload).into()),
            descriptor_held: listed.descriptor_held,
            states: listed.states.into_iter().map(Into::into).collect(),
            known_since: Some(timestamp(listed.since)),
            suspicion: listed.suspicion.map(Into::into),
        }
    }
}

impl From<Suspicion> for wire::Suspicion {
    fn from(suspicion: Suspicion) -> Self {
        let retry_at = suspicion
            .is_in_quarantine()
            .then(|| timestamp(suspicion.due));
        Self {
            sessions_lost: suspicion.times,
            cause: suspicion.cause,
            retry_at,
        }
    }
}

fn refusal(kind: NackKind) -> wire::Refusal {
    match kind {
        NackKind::StartFailure => wire::Refusal::StartFailure,
        NackKind::ReadError => wire::Refusal::ReadError,
        NackKind::ProtocolError => wire::Refusal::ProtocolError,
        NackKind::Other => wire::Refusal::Other,
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
