//! Sends Events to the API server, one at a time.
//!
//! An Event that repeats a recent reason increments the count of the existing series.

use inpod_types::Reason;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, Recorder};
use tokio::{sync::mpsc, time::Instant};

use super::{EventKind, metrics::StatusMetrics};

pub(super) const QUEUE_CAPACITY: usize = 256;

/// The action of the Events, a field required by the Event v1 API.
const ACTION: &str = "Redirect";

#[derive(Clone, Debug)]
pub(super) struct QueuedEvent {
    pub(super) subject: ObjectReference,
    pub(super) kind: EventKind,
    pub(super) reason: Reason,
    pub(super) message: String,
    pub(super) created: Instant,
}

pub(super) async fn send(
    recorder: Recorder,
    mut queue: mpsc::Receiver<QueuedEvent>,
    metrics: StatusMetrics,
) {
    while let Some(queued) = queue.recv().await {
        let (event, subject) = (event_of(&queued), &queued.subject);
        match inpod_kube::publish_event(&recorder, &event, subject, queued.created).await {
            Ok(()) => metrics.count_event("sent"),
            Err(why) => {
                tracing::warn!(subject = ?(&subject.namespace, &subject.name), reason = %queued.reason, message = queued.message, why, "Could not create an Event");
                metrics.count_event("failed");
            }
        }
    }
}

fn event_of(queued: &QueuedEvent) -> Event {
    let note = match queued.kind {
        EventKind::Normal => queued.message.clone(),
        EventKind::Warning => format!("{}. {}", queued.message, queued.reason.remedy()),
    };
    Event {
        type_: queued.kind,
        // Kubernetes writes reasons in upper camel case, as the variants are named.
        reason: format!("{:?}", queued.reason),
        note: Some(inpod_kube::truncate_note(&note)),
        action: ACTION.to_owned(),
        secondary: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_includes_the_remedy() {
        let note = |kind| {
            let queued = QueuedEvent {
                subject: ObjectReference::default(),
                kind,
                reason: Reason::ZtunnelRefused,
                message: "No".to_owned(),
                created: Instant::now(),
            };
            event_of(&queued).note.unwrap()
        };
        let remedy = Reason::ZtunnelRefused.remedy();
        assert_eq!(note(EventKind::Warning), format!("No. {remedy}"));
        assert_eq!(note(EventKind::Normal), "No");
    }
}
