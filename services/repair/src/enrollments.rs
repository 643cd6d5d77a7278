//! Tracks the enrollment of each pod through a stream of pod-events, which is reopened whenever it ends.

use std::{collections::BTreeMap, time::Duration};

use inpod_proto::{
    failure_of,
    podevents::v1::{
        WatchEnrollmentsRequest, pod_events_service_client::PodEventsServiceClient,
        watch_enrollments_response::Event,
    },
    types::v1::PodRef,
};
use inpod_service::Readiness;
use inpod_types::{PodUid, Reason};
use tokio::{sync::watch, time::sleep};
use tonic::{Request, Status, transport::Channel};

use crate::{away::Absence, enrollment_status::EnrollmentStatus};

/// The condition that reports the stream. Readiness does not require the stream, because broken pods are also detected
/// by their status.
const CONDITION: &str = "pod-events";

const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The largest accepted message: the initial state of all pods of a node may exceed the default of 4 MiB.
const MAX_MESSAGE_BYTES: usize = 64 << 20;

#[derive(Debug)]
pub(crate) enum Enrollments {
    /// The statuses by pod UID.
    Available(Statuses),
    Unavailable(Absence),
}

type Statuses = BTreeMap<PodUid, EnrollmentStatus>;

impl Enrollments {
    pub(crate) fn get(&self, uid: &PodUid) -> EnrollmentStatus {
        match self {
            Self::Unavailable(_) => EnrollmentStatus::Unavailable,
            Self::Available(statuses) => statuses
                .get(uid)
                .cloned()
                .unwrap_or(EnrollmentStatus::UnknownPod),
        }
    }

    pub(crate) fn absence(&self) -> Option<Absence> {
        match self {
            Self::Unavailable(absence) => Some(*absence),
            Self::Available(_) => None,
        }
    }

    /// Marks the statuses as unavailable. A repeated failure continues the absence, unless pod-events has answered.
    fn fail(&mut self, has_answered: bool) {
        if has_answered || matches!(self, Self::Available(_)) {
            *self = Self::Unavailable(Absence::begin());
        }
    }
}

/// Starts the subscription, whose receiver holds the enrollments.
pub(crate) fn start(channel: Channel, conditions: Readiness) -> watch::Receiver<Enrollments> {
    let (sender, enrollments) = watch::channel(Enrollments::Unavailable(Absence::begin()));
    let subscriber = Subscriber {
        enrollments: sender,
        conditions,
    };
    let client = PodEventsServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
    tokio::spawn(inpod_service::abort_on_panic(
        "enrollments",
        subscriber.run(client),
    ));
    enrollments
}

struct Subscriber {
    enrollments: watch::Sender<Enrollments>,
    conditions: Readiness,
}

impl Subscriber {
    async fn run(self, client: PodEventsServiceClient<Channel>) {
        loop {
            let (why, has_answered) = match self.receive(client.clone()).await {
                Ok(()) => ("pod-events ended the stream".to_owned(), false),
                Err(status) => {
                    let failure = failure_of(&status);
                    // A pod-events that refuses this caller still updates the pods' conditions.
                    (failure.to_string(), failure.reason == Reason::CallerRefused)
                }
            };
            self.enrollments
                .send_modify(|enrollments| enrollments.fail(has_answered));
            self.conditions.set(CONDITION, Err(why));
            sleep(RETRY_INTERVAL).await;
        }
    }

    async fn receive(&self, mut client: PodEventsServiceClient<Channel>) -> Result<(), Status> {
        // The request has no timeout, because a timeout would end the stream.
        let request = Request::new(WatchEnrollmentsRequest { pod: None });
        let mut stream = client.watch_enrollments(request).await?.into_inner();
        let mut initial = Some(Statuses::new());
        while let Some(message) = stream.message().await? {
            if let Some(event) = message.event {
                self.handle(&mut initial, event);
            }
        }
        Ok(())
    }

    /// Handles an event. `initial` collects the initial state, and is `None` once the initial state is complete.
    fn handle(&self, initial: &mut Option<Statuses>, event: Event) {
        if matches!(event, Event::StateComplete(_)) && initial.is_some() {
            self.conditions.set(CONDITION, Ok(()));
            let statuses = initial.take().unwrap_or_default();
            self.enrollments
                .send_replace(Enrollments::Available(statuses));
        } else if let Some(statuses) = initial {
            apply(statuses, event);
        } else {
            self.enrollments.send_modify(|enrollments| {
                if let Enrollments::Available(statuses) = enrollments {
                    apply(statuses, event);
                }
            });
        }
    }
}

/// Applies an event. A pod with an invalid UID is skipped, because no pod of the API server has such a UID.
fn apply(statuses: &mut Statuses, event: Event) {
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
        let (sender, enrollments) = watch::channel(Enrollments::Unavailable(Absence::begin()));
        let subscriber = Subscriber {
            enrollments: sender,
            conditions: Readiness::default(),
        };
        let of = |uid: &str| enrollments.borrow().get(&uid.parse().unwrap());
        let mut initial = Some(Statuses::new());
        subscriber.handle(&mut initial, Event::InstanceId("run-1".to_owned()));
        subscriber.handle(&mut initial, message("a"));
        assert_eq!(of("a"), EnrollmentStatus::Unavailable);
        subscriber.handle(&mut initial, Event::StateComplete(StateComplete {}));
        assert!(matches!(of("a"), EnrollmentStatus::Desired(_)));
        assert_eq!(of("b"), EnrollmentStatus::UnknownPod);
        subscriber.handle(&mut initial, message("b"));
        subscriber.handle(&mut initial, Event::Gone(pod("a")));
        assert!(initial.is_none());
        assert_eq!(of("a"), EnrollmentStatus::UnknownPod);
        assert!(matches!(of("b"), EnrollmentStatus::Desired(_)));
    }

    #[test]
    fn an_absence_lasts_until_pod_events_answers() {
        let mut enrollments = Enrollments::Available(Statuses::new());
        assert_eq!(enrollments.absence(), None);
        enrollments.fail(false);
        let first = enrollments.absence();
        assert!(first.is_some());
        enrollments.fail(false);
        assert_eq!(enrollments.absence(), first);
        enrollments.fail(true);
        assert_ne!(enrollments.absence(), first, "a refusal is an answer");
    }
}
