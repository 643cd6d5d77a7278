//! Sends Events to the API server, one at a time.
//!
//! An Event that repeats a recent reason increments the count of the existing series.

use inpod_types::{NodeName, PodRef, Reason};
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder},
};
use tokio::{sync::mpsc, time::Instant};

use super::{EventKind, metrics::StatusMetrics};

pub(super) const QUEUE_CAPACITY: usize = 256;

/// The action of the Events, a field required by the Event v1 API.
const ACTION: &str = "Redirect";

#[derive(Clone, Debug)]
pub(super) struct QueuedEvent {
    pub(super) pod: PodRef,
    pub(super) kind: EventKind,
    pub(super) reason: Reason,
    pub(super) message: String,
    pub(super) created: Instant,
}

pub(super) async fn send(
    client: Client,
    node: NodeName,
    mut queue: mpsc::Receiver<QueuedEvent>,
    metrics: StatusMetrics,
) {
    let recorder = Recorder::new(client, inpod_kube::reporter(super::REPORTER, &node));
    while let Some(queued) = queue.recv().await {
        let (event, regarding) = (event_of(&queued), inpod_kube::regarding(&queued.pod));
        match inpod_kube::publish_event(&recorder, &event, &regarding, queued.created).await {
            Ok(()) => metrics.event("sent"),
            Err(why) => {
                tracing::warn!(pod = %queued.pod, reason = %queued.reason, message = queued.message, why, "Could not create an Event");
                metrics.event("failed");
            }
        }
    }
}

fn event_of(queued: &QueuedEvent) -> Event {
    let (type_, note) = match queued.kind {
        EventKind::Normal => (EventType::Normal, queued.message.clone()),
        EventKind::Warning => {
            let remedy = queued.reason.remedy();
            (EventType::Warning, format!("{}. {remedy}", queued.message))
        }
    };
    Event {
        type_,
        reason: upper_camel_case(queued.reason.name()),
        note: Some(inpod_kube::truncate_note(&note)),
        action: ACTION.to_owned(),
        secondary: None,
    }
}

/// Converts `ZTUNNEL_REFUSED` to `ZtunnelRefused`.
fn upper_camel_case(name: &str) -> String {
    let parts = name.split('_').filter_map(|part| part.split_at_checked(1));
    parts
        .map(|(first, rest)| format!("{first}{}", rest.to_lowercase()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn queued(kind: EventKind, message: &str) -> QueuedEvent {
        QueuedEvent {
            pod: testing::pod("shop", "web").pod,
            kind,
            reason: Reason::ZtunnelRefused,
            message: message.to_owned(),
            created: Instant::now(),
        }
    }

    #[test]
    fn a_reason_is_written_as_kubernetes_writes_reasons() {
        for reason in Reason::ALL {
            assert_eq!(upper_camel_case(reason.name()), format!("{reason:?}"));
        }
    }

    #[test]
    fn a_warning_includes_the_remedy() {
        let note = |message: &str, kind| event_of(&queued(kind, message)).note.unwrap();
        let remedy = Reason::ZtunnelRefused.remedy();
        assert_eq!(note("No", EventKind::Warning), format!("No. {remedy}"));
        assert_eq!(note("Yes", EventKind::Normal), "Yes");
    }
}
