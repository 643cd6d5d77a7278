//! Events, on their way to the API server, one after the other.

use inpod_types::{NodeName, PodRef};
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder},
};
use tokio::{sync::mpsc, time::Instant};

use crate::{escalation::Note, metrics::Metrics};

/// Who tells, for `kubectl describe`, and whose a change is in a pod's `managedFields`. Its instance is the node.
pub(crate) const REPORTER: &str = "inpod.io/repair";

/// What the Events are about: Event v1 wants a verb.
const ACTION: &str = "Repair";

/// How many Events wait for the API server; further ones are dropped, and counted.
const QUEUE_CAPACITY: usize = 256;

/// Something to tell of a pod.
#[derive(Debug)]
struct QueuedEvent {
    pod: PodRef,
    note: Note,
    queued_at: Instant,
}

/// Where Events are put.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    queue: mpsc::Sender<QueuedEvent>,
    metrics: Metrics,
}

impl Events {
    /// Begins to send what is put there.
    pub(crate) fn start(client: Client, node: &NodeName, metrics: Metrics) -> Self {
        let (queue, waiting) = mpsc::channel(QUEUE_CAPACITY);
        let recorder = Recorder::new(client, inpod_kube::reporter(REPORTER, node));
        tokio::spawn(inpod_service::vital(
            "events",
            send(recorder, waiting, metrics.clone()),
        ));
        Self { queue, metrics }
    }

    /// Tells something of a pod.
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
        match inpod_kube::deliver(&recorder, &event, &regarding, queued_at).await {
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
        note: Some(inpod_kube::note(&note.text)),
        action: ACTION.to_owned(),
        secondary: None,
    }
}
