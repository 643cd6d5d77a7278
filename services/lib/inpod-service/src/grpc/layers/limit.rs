use std::{sync::Arc, time::Duration};

use inpod_types::{Failure, Reason};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::{Next, Request, Response, Step, call_next, is_of_grpc};
use crate::metrics::Calls;

/// The delay after which a rejected caller is advised to retry.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Methods such as `/inpod.podevents.v1.PodEventsService/AddPod` that share a limit; groups never share slots.
pub type ConcurrencyGroup = &'static [&'static str];

/// A layer that rejects calls over the limit of their group.
///
/// A call is in flight until its handler has responded. Open streams do not count, because a stream idles until an
/// event and lives as long as its watcher; HTTP/2 limits the number of streams.
#[derive(Clone, Debug)]
pub(in crate::grpc) struct Limit {
    /// The slots of methods without a group, followed by the slots of each group.
    permits: Arc<[Semaphore]>,
    groups: &'static [ConcurrencyGroup],
    max: usize,
    in_flight: Gauge,
}

impl Limit {
    pub(super) fn new(max: usize, groups: &'static [ConcurrencyGroup], calls: &Calls) -> Self {
        let permits = || Semaphore::new(max.min(Semaphore::MAX_PERMITS));
        Self {
            permits: (0..=groups.len()).map(|_| permits()).collect(),
            groups,
            max,
            in_flight: calls.in_flight().clone(),
        }
    }

    /// Takes a slot of the method's group, or returns `None` if no slot is free.
    fn acquire(&self, path: &str) -> Option<SemaphorePermit<'_>> {
        let lane = self.groups.iter().position(|lane| lane.contains(&path));
        let permits = self.permits.get(lane.map_or(0, |lane| lane + 1))?;
        permits.try_acquire().ok()
    }
}

impl Step for Limit {
    async fn handle<N: Next>(self, call: Request, next: N) -> Response {
        if is_of_grpc(&call) {
            return call_next(next, call).await;
        }
        let Some(_permit) = self.acquire(call.uri().path()) else {
            let max = self.max;
            let message = format!("{max} calls are in flight, as many as max_calls allows");
            let failure = Failure::new(Reason::Overloaded, message).retry_after(RETRY_AFTER);
            tracing::warn!(max, "Rejected a call: too many in flight");
            return inpod_proto::into_status(&failure).into_http();
        };
        let _counted = InFlightGuard::new(&self.in_flight);
        call_next(next, call).await
    }
}

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
