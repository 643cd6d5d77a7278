use std::{sync::Arc, time::Duration};

use inpod_types::{Failure, Reason};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::{Next, Request, Response, Step, call_next, is_of_grpc};
use crate::metrics::Calls;

/// When a caller who was refused for the number of calls may come back.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Methods whose calls are counted apart from all others, as `/inpod.podevents.v1.PodEventsService/AddPod`: as many of
/// them may be under way as of the others, and neither takes a place from the other.
pub type ConcurrencyGroup = &'static [&'static str];

/// Refuses a call at once when as many of its lane as are allowed are under way.
///
/// A call is under way until its handler has answered. A stream that was opened is not: it waits for news and does
/// nothing, a watcher keeps it for as long as it lives, and how many there may be on one connection is limited by
/// HTTP/2 itself.
#[derive(Clone, Debug)]
pub(in crate::grpc) struct Limit {
    /// Those of the calls that no lane has, then each lane's.
    places: Arc<[Semaphore]>,
    groups: &'static [ConcurrencyGroup],
    max: usize,
    in_flight: Gauge,
}

impl Limit {
    pub(super) fn new(max: usize, groups: &'static [ConcurrencyGroup], calls: &Calls) -> Self {
        let places = || Semaphore::new(max.min(Semaphore::MAX_PERMITS));
        Self {
            places: (0..=groups.len()).map(|_| places()).collect(),
            groups,
            max,
            in_flight: calls.in_flight().clone(),
        }
    }

    /// A place in the lane of a method, if there is one.
    fn place(&self, path: &str) -> Option<SemaphorePermit<'_>> {
        let lane = self.groups.iter().position(|lane| lane.contains(&path));
        let places = self.places.get(lane.map_or(0, |lane| lane + 1))?;
        places.try_acquire().ok()
    }
}

impl Step for Limit {
    async fn handle<N: Next>(self, call: Request, next: N) -> Response {
        if is_of_grpc(&call) {
            return call_next(next, call).await;
        }
        let Some(_place) = self.place(call.uri().path()) else {
            let max = self.max;
            let message = format!("{max} calls are under way, as many as max_calls allows");
            let failure = Failure::new(Reason::Overloaded, message).retry_after(RETRY_AFTER);
            tracing::warn!(max, "Refused a call: too many at once");
            return inpod_proto::into_status(&failure).into_http();
        };
        let _counted = InFlightGuard::new(&self.in_flight);
        call_next(next, call).await
    }
}

/// One more, for as long as it lives.
struct InFlightGuard<'a>(&'a Gauge);

impl<'a> InFlightGuard<'a> {
    fn new(gauge: &'a Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}
