//! Events, on their way to the API server, one after the other.
//!
//! An Event that repeats the reason of one of the last minutes is counted in that one (its series).

use std::time::Duration;

use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder},
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, timeout},
};
use workload::{NodeName, PodRef, Reason};

use super::{Kind, metrics::Counted};

/// How many Events wait for the API server.
pub(super) const QUEUE: usize = 256;

/// What the Events are about: Event v1 wants a verb.
const ACTION: &str = "Redirect";

/// How long the API server may take for one.
const ANSWER: Duration = Duration::from_secs(5);

/// Between two attempts the wait doubles from the first to the second, less up to a half by chance.
const WAITS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

/// An Event that could not be told for so long is of no use.
const STALE: Duration = Duration::from_secs(300);

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
    let recorder = Recorder::new(client, kubernetes::reporter(super::REPORTER, &node));
    while let Some(letter) = queue.recv().await {
        match deliver(&recorder, &letter).await {
            Ok(()) => counted.event("sent"),
            Err(why) => {
                tracing::warn!(pod = %letter.pod, reason = %letter.reason, message = letter.message, why, "Could not make an Event");
                counted.event("failed");
            }
        }
    }
}

async fn deliver(recorder: &Recorder, letter: &Letter) -> Result<(), String> {
    let (event, regarding) = (event_of(letter), kubernetes::regarding(&letter.pod));
    let [mut wait, longest] = WAITS;
    loop {
        let why = match timeout(ANSWER, recorder.publish(&event, &regarding)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) if kubernetes::is_final(&error) => return Err(kubernetes::told(&error)),
            Ok(Err(error)) => kubernetes::told(&error),
            Err(_) => "the API server does not answer in time".to_owned(),
        };
        if letter.written.elapsed() + wait >= STALE {
            return Err(why);
        }
        sleep(wait.mul_f64(fastrand::f64().mul_add(0.5, 0.5))).await;
        wait = longest.min(wait * 2);
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
        note: Some(kubernetes::note(&note)),
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
