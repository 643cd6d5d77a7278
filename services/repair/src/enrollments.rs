//! What pod-events says of each pod, as its stream tells it. A stream that breaks means: read again.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use inpod_proto::{
    failure_of,
    podevents::v1::{
        WatchEnrollmentsRequest, pod_events_service_client::PodEventsServiceClient,
        watch_enrollments_response::Event,
    },
    types::v1::PodRef,
};
use inpod_service::Readiness;
use inpod_types::PodUid;
use tokio::{sync::watch, time::sleep};
use tonic::{Request, Status, transport::Channel};

use crate::word::Word;

/// The condition of the stream. It does not hold readiness up: pods are found by their status all the same.
const CONDITION: &str = "pod-events";

/// Between two attempts to read.
const AGAIN: Duration = Duration::from_secs(1);

/// A node's pods in one message may be more than the 4 MiB that are the default.
const LONGEST: usize = 64 << 20;

/// What is said of the pods that pod-events knows; `None`: it is not heard.
type Words = Option<BTreeMap<PodUid, Word>>;

/// What is said, kept up to date. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Enrollments {
    words: Arc<Mutex<Words>>,
    changes: watch::Receiver<()>,
}

impl Enrollments {
    /// Begins to listen, for ever.
    pub(crate) fn follow(channel: Channel, conditions: Readiness) -> Self {
        let (sender, changes) = watch::channel(());
        let words = Arc::<Mutex<Words>>::default();
        let listener = Listener {
            words: Arc::clone(&words),
            changes: sender,
            conditions,
        };
        let client = PodEventsServiceClient::new(channel).max_decoding_message_size(LONGEST);
        tokio::spawn(inpod_service::vital("enrollments", listener.run(client)));
        Self { words, changes }
    }

    /// What is said of a pod now.
    pub(crate) fn of(&self, uid: &PodUid) -> Word {
        match &*lock(&self.words) {
            None => Word::Away,
            Some(words) => words.get(uid).cloned().unwrap_or(Word::Stranger),
        }
    }

    /// Resolves when something else is said.
    pub(crate) async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

fn lock(words: &Mutex<Words>) -> MutexGuard<'_, Words> {
    words.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps it up to date.
struct Listener {
    words: Arc<Mutex<Words>>,
    changes: watch::Sender<()>,
    conditions: Readiness,
}

impl Listener {
    async fn run(self, client: PodEventsServiceClient<Channel>) {
        loop {
            let why = match self.listen(client.clone()).await {
                Ok(()) => "pod-events ended the stream".to_owned(),
                Err(status) => failure_of(&status).to_string(),
            };
            *lock(&self.words) = None;
            self.changes.send_replace(());
            self.conditions.set(CONDITION, Err(why));
            sleep(AGAIN).await;
        }
    }

    async fn listen(&self, mut client: PodEventsServiceClient<Channel>) -> Result<(), Status> {
        // Without a timeout: it would end the stream.
        let request = Request::new(WatchEnrollmentsRequest { pod: None });
        let mut stream = client.watch_enrollments(request).await?.into_inner();
        let mut state = State::First(BTreeMap::new());
        while let Some(told) = stream.message().await? {
            let Some(event) = told.event else { continue };
            state = self.take(state, event);
        }
        Ok(())
    }

    fn take(&self, state: State, event: Event) -> State {
        match (state, event) {
            (State::First(words), Event::StateComplete(_)) => {
                *lock(&self.words) = Some(words);
                self.conditions.set(CONDITION, Ok(()));
                self.changes.send_replace(());
                State::Complete
            }
            (State::First(mut words), event) => {
                note(&mut words, event);
                State::First(words)
            }
            (State::Complete, event) => {
                if let Some(words) = &mut *lock(&self.words) {
                    note(words, event);
                }
                self.changes.send_replace(());
                State::Complete
            }
        }
    }
}

/// How far a stream is.
enum State {
    /// Not every pod was named yet.
    First(BTreeMap<PodUid, Word>),
    /// Every pod was; what comes now are changes.
    Complete,
}

/// Takes a message in. A pod whose UID cannot be used is none of the API server's.
fn note(words: &mut BTreeMap<PodUid, Word>, event: Event) {
    match event {
        Event::Pod(summary) => {
            if let Some(uid) = uid(summary.pod.as_ref()) {
                words.insert(uid, Word::of(&summary));
            }
        }
        Event::Gone(pod) => {
            if let Some(uid) = uid(Some(&pod)) {
                words.remove(&uid);
            }
        }
        Event::InstanceId(_) | Event::StateComplete(_) => {}
    }
}

fn uid(pod: Option<&PodRef>) -> Option<PodUid> {
    pod?.uid.parse().ok()
}

#[cfg(test)]
mod tests {
    use inpod_proto::{
        podevents::v1::{PodState, PodSummary, StateComplete},
        types::v1::Enrollment,
    };

    use super::*;

    fn pod(uid: &str) -> PodRef {
        PodRef {
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            uid: uid.to_owned(),
        }
    }

    fn told(uid: &str) -> Event {
        Event::Pod(PodSummary {
            pod: Some(pod(uid)),
            desired: Enrollment::Sidecar.into(),
            state: PodState::Enrolled.into(),
            ..PodSummary::default()
        })
    }

    #[test]
    fn nothing_is_said_before_everything_is_and_then_each_change_counts() {
        let (sender, changes) = watch::channel(());
        let words = Arc::<Mutex<Words>>::default();
        let said = Enrollments {
            words: Arc::clone(&words),
            changes,
        };
        let listener = Listener {
            words,
            changes: sender,
            conditions: Readiness::default(),
        };
        let of = |uid: &str| said.of(&uid.parse().unwrap());
        let state = State::First(BTreeMap::new());
        let state = listener.take(state, Event::InstanceId("run-1".to_owned()));
        let state = listener.take(state, told("a"));
        assert_eq!(of("a"), Word::Away);
        let state = listener.take(state, Event::StateComplete(StateComplete {}));
        assert!(matches!(of("a"), Word::Wanted(_)));
        assert_eq!(of("b"), Word::Stranger);
        let state = listener.take(state, told("b"));
        let state = listener.take(state, Event::Gone(pod("a")));
        assert!(matches!(state, State::Complete));
        assert_eq!(of("a"), Word::Stranger);
        assert!(matches!(of("b"), Word::Wanted(_)));
    }
}
