//! Events, on their way to the API server, one after the other.

use std::time::Duration;

use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder},
};
use tokio::{sync::mpsc, time::timeout};
use workload::{NodeName, PodRef};

use crate::{ledger::Note, metrics::Metrics};

/// Who tells, for `kubectl describe`, and whose a change is in a pod's `managedFields`. Its instance is the node.
pub(crate) const REPORTER: &str = "inpod.io/repair";

/// What the Events are about: Event v1 wants a verb.
const ACTION: &str = "Repair";

/// How many Events wait for the API server; further ones are dropped, and counted.
const QUEUE: usize = 256;

/// How long the API server may take for one.
const ANSWER: Duration = Duration::from_secs(5);

/// Where Events are put.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    queue: mpsc::Sender<(PodRef, Note)>,
    metrics: Metrics,
}

impl Events {
    /// Begins to send what is put there.
    pub(crate) fn start(client: Client, node: &NodeName, metrics: Metrics) -> Self {
        let (queue, waiting) = mpsc::channel(QUEUE);
        let recorder = Recorder::new(client, kubernetes::reporter(REPORTER, node));
        tokio::spawn(send(recorder, waiting, metrics.clone()));
        Self { queue, metrics }
    }

    /// Tells something of a pod.
    pub(crate) fn tell(&self, pod: &PodRef, note: &Note) {
        if self.queue.try_send((pod.clone(), note.clone())).is_err() {
            self.metrics.event("dropped");
        }
    }
}

async fn send(recorder: Recorder, mut waiting: mpsc::Receiver<(PodRef, Note)>, metrics: Metrics) {
    while let Some((pod, note)) = waiting.recv().await {
        let (event, regarding) = (event_of(&note), kubernetes::regarding(&pod));
        let why = match timeout(ANSWER, recorder.publish(&event, &regarding)).await {
            Ok(Ok(())) => {
                metrics.event("sent");
                continue;
            }
            Ok(Err(error)) => kubernetes::told(&error),
            Err(_) => "the API server does not answer in time".to_owned(),
        };
        tracing::warn!(%pod, reason = note.reason, why, "Could not make an Event");
        metrics.event("failed");
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
        note: Some(kubernetes::note(&note.text)),
        action: ACTION.to_owned(),
        secondary: None,
    }
}
