//! Tracks the enrollment of each pod through a stream of pod-events, which is reopened whenever it ends.

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

use crate::enrollment_status::EnrollmentStatus;

/// The condition that reports the stream. Readiness does not require the stream, because broken pods are also detected
/// by their status.
const CONDITION: &str = "pod-events";

const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The largest accepted message: the initial state of all pods of a node may exceed the default of 4 MiB.
const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// The statuses by pod UID, or `None` while pod-events is not available.
type Statuses = Option<BTreeMap<PodUid, EnrollmentStatus>>;

#[derive(Clone, Debug)]
pub(crate) struct Enrollments {
    statuses: Arc<Mutex<Statuses>>,
    changes: watch::Receiver<()>,
}

impl Enrollments {
    pub(crate) fn start(channel: Channel, conditions: Readiness) -> Self {
        let (sender, changes) = watch::channel(());
        let statuses = Arc::<Mutex<Statuses>>::default();
        let subscriber = Subscriber {
            statuses: Arc::clone(&statuses),
            changes: sender,
            conditions,
        };
        let client =
            PodEventsServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
        tokio::spawn(inpod_service::abort_on_panic(
            "enrollments",
            subscriber.run(client),
        ));
        Self { statuses, changes }
    }

    pub(crate) fn get(&self, uid: &PodUid) -> EnrollmentStatus {
        match &*lock(&self.statuses) {
            None => EnrollmentStatus::Unavailable,
            Some(statuses) => statuses
                .get(uid)
                .cloned()
                .unwrap_or(EnrollmentStatus::UnknownPod),
        }
    }

    pub(crate) async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

fn lock(statuses: &Mutex<Statuses>) -> MutexGuard<'_, Statuses> {
    statuses.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Subscriber {
    statuses: Arc<Mutex<Statuses>>,
    changes: watch::Sender<()>,
    conditions: Readiness,
}

impl Subscriber {
    async fn run(self, client: PodEventsServiceClient<Channel>) {
        loop {
            let why = match self.receive(client.clone()).await {
                Ok(()) => "pod-events ended the stream".to_owned(),
                Err(status) => failure_of(&status).to_string(),
            };
            *lock(&self.statuses) = None;
            self.changes.send_replace(());
            self.conditions.set(CONDITION, Err(why));
            sleep(RETRY_INTERVAL).await;
        }
    }

    async fn receive(&self, mut client: PodEventsServiceClient<Channel>) -> Result<(), Status> {
        // The request has no timeout, because a timeout would end the stream.
        let request = Request::new(WatchEnrollmentsRequest { pod: None });
        let mut stream = client.watch_enrollments(request).await?.into_inner();
        let mut state = State::Initial(BTreeMap::new());
        while let Some(message) = stream.message().await? {
            let Some(event) = message.event else { continue };
            state = self.handle(state, event);
        }
        Ok(())
    }

    fn handle(&self, state: State, event: Event) -> State {
        match (state, event) {
            (State::Initial(statuses), Event::StateComplete(_)) => {
                *lock(&self.statuses) = Some(statuses);
                self.conditions.set(CONDITION, Ok(()));
                self.changes.send_replace(());
                State::Complete
            }
            (State::Initial(mut statuses), event) => {
                apply(&mut statuses, event);
                State::Initial(statuses)
            }
            (State::Complete, event) => {
                if let Some(statuses) = &mut *lock(&self.statuses) {
                    apply(statuses, event);
                }
                self.changes.send_replace(());
                State::Complete
            }
        }
    }
}

enum State {
    /// Not all pods of the initial state were received yet.
    Initial(BTreeMap<PodUid, EnrollmentStatus>),
    /// All pods of the initial state were received, and changes follow.
    Complete,
}

/// Applies an event. A pod with an invalid UID is skipped, because no pod of the API server has such a UID.
fn apply(statuses: &mut BTreeMap<PodUid, EnrollmentStatus>, event: Event) {
    match event {
        Event::Pod(summary) => {
            if let Some(uid) = uid(summary.pod.as_ref()) {
                statuses.insert(uid, EnrollmentStatus::from_summary(&summary));
            }
        }
        Event::Gone(pod) => {
            if let Some(uid) = uid(Some(&pod)) {
                statuses.remove(&uid);
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

    fn message(uid: &str) -> Event {
        Event::Pod(PodSummary {
            pod: Some(pod(uid)),
            desired: Enrollment::Sidecar.into(),
            state: PodState::Enrolled.into(),
            ..PodSummary::default()
        })
    }

    #[test]
    fn nothing_is_known_before_the_initial_state_is_complete_and_then_each_change_counts() {
        let (sender, changes) = watch::channel(());
        let statuses = Arc::<Mutex<Statuses>>::default();
        let enrollments = Enrollments {
            statuses: Arc::clone(&statuses),
            changes,
        };
        let subscriber = Subscriber {
            statuses,
            changes: sender,
            conditions: Readiness::default(),
        };
        let of = |uid: &str| enrollments.get(&uid.parse().unwrap());
        let state = State::Initial(BTreeMap::new());
        let state = subscriber.handle(state, Event::InstanceId("run-1".to_owned()));
        let state = subscriber.handle(state, message("a"));
        assert_eq!(of("a"), EnrollmentStatus::Unavailable);
        let state = subscriber.handle(state, Event::StateComplete(StateComplete {}));
        assert!(matches!(of("a"), EnrollmentStatus::Desired(_)));
        assert_eq!(of("b"), EnrollmentStatus::UnknownPod);
        let state = subscriber.handle(state, message("b"));
        let state = subscriber.handle(state, Event::Gone(pod("a")));
        assert!(matches!(state, State::Complete));
        assert_eq!(of("a"), EnrollmentStatus::UnknownPod);
        assert!(matches!(of("b"), EnrollmentStatus::Desired(_)));
    }
}
