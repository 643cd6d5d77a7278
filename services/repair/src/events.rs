//! Events, on their way to the API server, one after the other.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::{sync::mpsc, time::timeout};
use workload::{NodeName, PodRef};

use crate::{error::told_of_api, ledger::Note, metrics::Metrics};

/// Who tells, for `kubectl describe`, and whose a change is in a pod's `managedFields`. Its instance is the node.
pub(crate) const REPORTER: &str = "inpod.io/repair";

/// What the Events are about: Event v1 wants a verb.
const ACTION: &str = "Repair";

/// How many Events wait for the API server; further ones are dropped, and counted.
const QUEUE: usize = 256;

/// How long the API server may take for one.
const ANSWER: Duration = Duration::from_secs(5);

/// What the API server takes of a note and of an instance's name, in bytes (Event v1).
const LONGEST_NOTE: usize = 1024;
const LONGEST_INSTANCE: usize = 128;

/// Where Events are put.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    queue: mpsc::Sender<(PodRef, Note)>,
    metrics: Metrics,
}

impl Events {
    /// Begins to send what is put there.
    pub(crate) fn start(client: Client, node: &NodeName, metrics: Metrics) -> Self {
        let reporter = Reporter {
            controller: REPORTER.to_owned(),
            instance: Some(cut(node.as_str(), LONGEST_INSTANCE).to_owned()),
        };
        let (queue, waiting) = mpsc::channel(QUEUE);
        let recorder = Recorder::new(client, reporter);
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
        let (event, regarding) = (event_of(&note), regarding(&pod));
        let why = match timeout(ANSWER, recorder.publish(&event, &regarding)).await {
            Ok(Ok(())) => {
                metrics.event("sent");
                continue;
            }
            Ok(Err(error)) => told_of_api(&error),
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
        note: Some(cut(&note.text, LONGEST_NOTE).to_owned()),
        action: ACTION.to_owned(),
        secondary: None,
    }
}

fn regarding(pod: &PodRef) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(pod.namespace.to_string()),
        name: Some(pod.name.to_string()),
        uid: Some(pod.uid.to_string()),
        ..ObjectReference::default()
    }
}

/// As much of a text as has room.
fn cut(text: &str, longest: usize) -> &str {
    let end = text.floor_char_boundary(longest);
    text.get(..end).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_has_no_more_than_the_server_takes() {
        let note = Note {
            is_warning: true,
            reason: "RepairBrokenPod",
            text: "\u{e4}".repeat(2000),
        };
        let event = event_of(&note);
        assert_eq!(event.note.unwrap().len(), LONGEST_NOTE);
        assert!(matches!(event.type_, EventType::Warning));
    }
}
