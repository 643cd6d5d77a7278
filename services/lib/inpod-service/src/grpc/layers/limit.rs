use std::{sync::Arc, time::Duration};

use inpod_types::{Failure, Reason};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::{Answer, Call, Next, Step, is_of_grpc, pass};
use crate::metrics::Calls;

/// When a caller who was refused for the number of calls may come back.
const COME_BACK: Duration = Duration::from_secs(1);

/// Methods whose calls are counted apart from all others, as `/inpod.podevents.v1.PodEventsService/AddPod`: as many of
/// them may be under way as of the others, and neither takes a place from the other.
pub type Lane = &'static [&'static str];

/// Refuses a call at once when as many of its lane as are allowed are under way.
///
/// A call is under way until its handler has answered. A stream that was opened is not: it waits for news and does
/// nothing, a watcher keeps it for as long as it lives, and how many there may be on one connection is limited by
/// HTTP/2 itself.
#[derive(Clone, Debug)]
pub(in crate::grpc) struct Limit {
    /// Those of the calls that no lane has, then each lane's.
    places: Arc<[Semaphore]>,
    lanes: &'static [Lane],
    max: usize,
    in_flight: Gauge,
}

impl Limit {
    pub(super) fn new(max: usize, lanes: &'static [Lane], calls: &Calls) -> Self {
        let places = || Semaphore::new(max.min(Semaphore::MAX_PERMITS));
        Self {
            places: (0..=lanes.len()).map(|_| places()).collect(),
            lanes,
            max,
            in_flight: calls.in_flight().clone(),
        }
    }

    /// A place in the lane of a method, if there is one.
    fn place(&self, path: &str) -> Option<SemaphorePermit<'_>> {
        let lane = self.lanes.iter().position(|lane| lane.contains(&path));
        let places = self.places.get(lane.map_or(0, |lane| lane + 1))?;
        places.try_acquire().ok()
    }
}

impl Step for Limit {
    async fn take<N: Next>(self, call: Call, next: N) -> Answer {
        if is_of_grpc(&call) {
            return pass(next, call).await;
        }
        let Some(_place) = self.place(call.uri().path()) else {
            let max = self.max;
            let message = format!("{max} calls are under way, as many as max_calls allows");
            let failure = Failure::new(Reason::Overloaded, message).retry_after(COME_BACK);
            tracing::warn!(max, "Refused a call: too many at once");
            return inpod_proto::into_status(&failure).into_http();
        };
        let _counted = Counted::new(&self.in_flight);
        pass(next, call).await
    }
}

/// One more, for as long as it lives.
struct Counted<'a>(&'a Gauge);

impl<'a> Counted<'a> {
    fn new(gauge: &'a Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}
