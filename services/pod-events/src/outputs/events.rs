//! Events, on their way to the API server, one after the other.
//!
//! An Event that repeats the reason of one of the last minutes is counted in that one (its series).

use inpod_types::{NodeName, PodRef, Reason};
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder},
};
use tokio::{sync::mpsc, time::Instant};

use super::{Kind, metrics::Counted};

/// How many Events wait for the API server.
pub(super) const QUEUE: usize = 256;

/// What the Events are about: Event v1 wants a verb.
const ACTION: &str = "Redirect";

/// Something to tell of a pod.
#[derive(Clone, Debug)]
pub(super) struct Letter {
    pub(super) pod: PodRef,
    pub(super) kind: Kind,
    pub(super) reason: Reason,
    pub(super) message: String,
    pub(super) written: Instant,
}

/// Sends what is queued, until nobody can queue any more.
pub(super) async fn send(
    client: Client,
    node: NodeName,
    mut queue: mpsc::Receiver<Letter>,
    counted: Counted,
) {
    let recorder = Recorder::new(client, inpod_kube::reporter(super::REPORTER, &node));
    while let Some(letter) = queue.recv().await {
        let (event, regarding) = (event_of(&letter), inpod_kube::regarding(&letter.pod));
        match inpod_kube::deliver(&recorder, &event, &regarding, letter.written).await {
            Ok(()) => counted.event("sent"),
            Err(why) => {
                tracing::warn!(pod = %letter.pod, reason = %letter.reason, message = letter.message, why, "Could not make an Event");
                counted.event("failed");
            }
        }
    }
}

fn event_of(letter: &Letter) -> Event {
    let (type_, note) = match letter.kind {
        Kind::Normal => (EventType::Normal, letter.message.clone()),
        Kind::Warning => {
            let remedy = letter.reason.remedy();
            (EventType::Warning, format!("{}. {remedy}", letter.message))
        }
    };
    Event {
        type_,
        reason: camel_case(letter.reason.name()),
        note: Some(inpod_kube::note(&note)),
        action: ACTION.to_owned(),
        secondary: None,
    }
}

/// `ZTUNNEL_REFUSED` as `ZtunnelRefused`.
fn camel_case(name: &str) -> String {
    let words = name.split('_').filter_map(|word| word.split_at_checked(1));
    words
        .map(|(first, rest)| format!("{first}{}", rest.to_lowercase()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn letter(kind: Kind, message: &str) -> Letter {
        Letter {
            pod: testing::pod("shop", "web").pod,
            kind,
            reason: Reason::ZtunnelRefused,
            message: message.to_owned(),
            written: Instant::now(),
        }
    }

    #[test]
    fn a_reason_is_written_as_kubernetes_writes_reasons() {
        for reason in Reason::ALL {
            assert_eq!(camel_case(reason.name()), format!("{reason:?}"));
        }
    }

    #[test]
    fn a_warning_says_what_helps() {
        let note = |message: &str, kind| event_of(&letter(kind, message)).note.unwrap();
        let remedy = Reason::ZtunnelRefused.remedy();
        assert_eq!(note("No", Kind::Warning), format!("No. {remedy}"));
        assert_eq!(note("Yes", Kind::Normal), "Yes");
    }
}
