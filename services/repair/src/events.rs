//! Sends Events to the API server, one at a time.

use inpod_types::{NodeName, PodRef};
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder},
};
use tokio::{sync::mpsc, time::Instant};

use crate::{escalation::Note, metrics::Metrics};

/// The name of the reporting controller in Events, and of the field manager in patches.
pub(crate) const REPORTER: &str = "inpod.io/repair";

/// The action in Events, which the Events v1 API requires.
const ACTION: &str = "Repair";

/// The number of Events that may wait; further Events are dropped and counted.
const QUEUE_CAPACITY: usize = 256;

#[derive(Debug)]
struct QueuedEvent {
    pod: PodRef,
    note: Note,
    queued_at: Instant,
}

#[derive(Clone, Debug)]
pub(crate) struct Events {
    queue: mpsc::Sender<QueuedEvent>,
    metrics: Metrics,
}

impl Events {
    pub(crate) fn start(client: Client, node: &NodeName, metrics: Metrics) -> Self {
        let (queue, waiting) = mpsc::channel(QUEUE_CAPACITY);
        let recorder = Recorder::new(client, inpod_kube::reporter(REPORTER, node));
        tokio::spawn(inpod_service::abort_on_panic(
            "events",
            send(recorder, waiting, metrics.clone()),
        ));
        Self { queue, metrics }
    }

    pub(crate) fn send(&self, pod: &PodRef, note: &Note) {
        let event = QueuedEvent {
            pod: pod.clone(),
            note: note.clone(),
            queued_at: Instant::now(),
        };
        if self.queue.try_send(event).is_err() {
            self.metrics.event("dropped");
        }
    }
}

async fn send(recorder: Recorder, mut waiting: mpsc::Receiver<QueuedEvent>, metrics: Metrics) {
    while let Some(QueuedEvent {
        pod,
        note,
        queued_at,
    }) = waiting.recv().await
    {
        let (event, regarding) = (event_of(&note), inpod_kube::regarding(&pod));
        match inpod_kube::publish_event(&recorder, &event, &regarding, queued_at).await {
            Ok(()) => metrics.event("sent"),
            Err(why) => {
                tracing::warn!(%pod, reason = note.reason, why, "Could not create an Event");
                metrics.event("failed");
            }
        }
    }
}

fn event_of(note: &Note) -> Event {
    Event {
        type_: if note.is_warning {
            EventType::Warning
        } else {
            EventType::Normal
        },
        reason: note.reason.to_owned(),
        note: Some(inpod_kube::truncate_note(&note.text)),
        action: ACTION.to_owned(),
        secondary: None,
    }
}
