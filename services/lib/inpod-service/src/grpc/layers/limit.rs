use std::sync::Arc;

use http_body_util::BodyExt as _;
use inpod_types::{Failure, Reason};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{Semaphore, SemaphorePermit};
use tonic::{Status, body::Body};

use super::{RETRY_AFTER, Request, Response, is_from_service, is_operational};
use crate::{grpc::SPARE_STREAMS, metrics::Calls, throttle_log};

/// Methods such as `/inpod.podevents.v1.PodEventsService/AddPod` that share a limit; groups never share slots.
pub type ConcurrencyGroup = &'static [&'static str];

/// Rejects calls over the limit of their group.
///
/// A call is in flight until its handler has responded. Its response, which a slow client may receive later and which
/// may be a stream without an end, counts towards a limit of its own.
#[derive(Debug)]
pub(super) struct Limit {
    /// The slots of health, reflection and metrics, which operators need most during an overload.
    operational: Slots,
    services: Slots,
    others: Slots,
    groups: Vec<(ConcurrencyGroup, Slots)>,
    in_flight: Gauge,
}

/// The slots of a group. Between them, services and host processes never share slots.
#[derive(Debug)]
struct Slots {
    max_calls: usize,
    calls: Semaphore,
    max_responses: usize,
    responses: Arc<Semaphore>,
}

impl Slots {
    fn new(max_calls: usize, max_responses: usize) -> Self {
        let semaphore = |max: usize| Semaphore::new(max.min(Semaphore::MAX_PERMITS));
        Self {
            max_calls,
            calls: semaphore(max_calls),
            max_responses,
            responses: Arc::new(semaphore(max_responses)),
        }
    }
}

impl Limit {
    pub(super) fn new(max: usize, groups: &[ConcurrencyGroup], calls: &Calls) -> Self {
        let spare = usize::from(SPARE_STREAMS);
        let with_spare = || Slots::new(max, max.saturating_add(spare));
        Self {
            operational: Slots::new(spare, spare),
            services: with_spare(),
            // These responses are the largest: the lists of operators.
            others: Slots::new(max, spare),
            groups: groups.iter().map(|group| (*group, with_spare())).collect(),
            in_flight: calls.in_flight().clone(),
        }
    }

    fn slots(&self, call: &Request) -> &Slots {
        let path = call.uri().path();
        let mut groups = self.groups.iter();
        match groups.find(|(group, _)| group.contains(&path)) {
            Some((_, slots)) => slots,
            None if is_operational(path) => &self.operational,
            None if is_from_service(call) => &self.services,
            None => &self.others,
        }
    }

    /// Takes a slot, or fails with OVERLOADED if the group has none left.
    pub(super) fn acquire(&self, call: &Request) -> Result<Slot<'_>, Status> {
        let slots = self.slots(call);
        let Ok(in_flight) = slots.calls.try_acquire() else {
            let max = slots.max_calls;
            return Err(reject(format!(
                "{max} calls are in flight, as many as max_calls allows"
            )));
        };
        Ok(Slot {
            slots,
            _in_flight: in_flight,
            _counted: (!is_operational(call.uri().path()))
                .then(|| InFlightGuard::new(&self.in_flight)),
        })
    }
}

/// The slot of a call in flight.
pub(super) struct Slot<'a> {
    slots: &'a Slots,
    _in_flight: SemaphorePermit<'a>,
    _counted: Option<InFlightGuard<'a>>,
}

impl Slot<'_> {
    /// Exchanges the slot for a slot of the response, which the response's body holds.
    pub(super) fn release(self, answer: Response) -> Result<Response, Status> {
        let Ok(receiving) = Arc::clone(&self.slots.responses).try_acquire_owned() else {
            let max = self.slots.max_responses;
            return Err(reject(format!(
                "{max} callers are receiving responses, as many as the service keeps"
            )));
        };
        Ok(answer.map(|body| {
            Body::new(body.map_frame(move |frame| {
                // The closure holds the slot until the body is dropped.
                let _ = &receiving;
                frame
            }))
        }))
    }
}

fn reject(message: String) -> Status {
    if let Some(suppressed) = throttle_log("overload") {
        tracing::warn!(reason = message, suppressed, "Rejected a call");
    }
    let failure = Failure::new(Reason::Overloaded, message).retry_after(RETRY_AFTER);
    inpod_proto::into_status(&failure)
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
