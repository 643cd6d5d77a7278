//! Events, on their way to the API server, one after the other.

use inpod_types::{NodeName, PodRef};
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder},
};
use tokio::{sync::mpsc, time::Instant};

use crate::{ledger::Note, metrics::Metrics};

/// Who tells, for `kubectl describe`, and whose a change is in a pod's `managedFields`. Its instance is the node.
pub(crate) const REPORTER: &str = "inpod.io/repair";

/// What the Events are about: Event v1 wants a verb.
const ACTION: &str = "Repair";

/// How many Events wait for the API server; further ones are dropped, and counted.
const QUEUE: usize = 256;

/// Something to tell of a pod.
#[derive(Debug)]
struct Letter {
    pod: PodRef,
    note: Note,
    written: Instant,
}

/// Where Events are put.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    queue: mpsc::Sender<Letter>,
    metrics: Metrics,
}

impl Events {
    /// Begins to send what is put there.
    pub(crate) fn start(client: Client, node: &NodeName, metrics: Metrics) -> Self {
        let (queue, waiting) = mpsc::channel(QUEUE);
        let recorder = Recorder::new(client, inpod_kube::reporter(REPORTER, node));
        tokio::spawn(inpod_service::vital(
            "events",
            send(recorder, waiting, metrics.clone()),
        ));
        Self { queue, metrics }
    }

    /// Tells something of a pod.
    pub(crate) fn tell(&self, pod: &PodRef, note: &Note) {
        let letter = Letter {
            pod: pod.clone(),
            note: note.clone(),
            written: Instant::now(),
        };
        if self.queue.try_send(letter).is_err() {
            self.metrics.event("dropped");
        }
    }
}

async fn send(recorder: Recorder, mut waiting: mpsc::Receiver<Letter>, metrics: Metrics) {
    while let Some(Letter { pod, note, written }) = waiting.recv().await {
        let (event, regarding) = (event_of(&note), inpod_kube::regarding(&pod));
        match inpod_kube::deliver(&recorder, &event, &regarding, written).await {
            Ok(()) => metrics.event("sent"),
            Err(why) => {
                tracing::warn!(%pod, reason = note.reason, why, "Could not make an Event");
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
