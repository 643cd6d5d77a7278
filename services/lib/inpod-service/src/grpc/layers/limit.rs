use std::sync::Arc;

use http_body_util::BodyExt as _;
use inpod_types::{Failure, Reason};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Semaphore;
use tonic::body::Body;

use super::{
    Next, RETRY_AFTER, Request, Response, Step, call_next, is_from_service, is_operational,
};
use crate::{grpc::SPARE_STREAMS, metrics::Calls, throttle_log};

/// Methods such as `/inpod.podevents.v1.PodEventsService/AddPod` that share a limit; groups never share slots.
pub type ConcurrencyGroup = &'static [&'static str];

/// A layer that rejects calls over the limit of their group.
///
/// A call is in flight until its handler has responded. Its response, which a slow client may receive later and which
/// may be a stream without an end, counts towards a limit of its own.
#[derive(Clone, Debug)]
pub(in crate::grpc) struct Limit {
    slots: Arc<[Slots]>,
    groups: &'static [ConcurrencyGroup],
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

/// The slots of health, reflection and metrics, which operators need most during an overload.
const OPERATIONAL: usize = 0;
const SERVICES: usize = 1;
const OTHERS: usize = 2;

impl Limit {
    pub(super) fn new(max: usize, groups: &'static [ConcurrencyGroup], calls: &Calls) -> Self {
        let spare = usize::from(SPARE_STREAMS);
        let with_spare = max.saturating_add(spare);
        let mut slots = vec![
            Slots::new(spare, spare),
            Slots::new(max, with_spare),
            // These responses are the largest: the lists of operators.
            Slots::new(max, spare),
        ];
        slots.extend(groups.iter().map(|_| Slots::new(max, with_spare)));
        Self {
            slots: slots.into(),
            groups,
            in_flight: calls.in_flight().clone(),
        }
    }

    fn slots(&self, call: &Request) -> Option<&Slots> {
        let path = call.uri().path();
        let group = self.groups.iter().position(|group| group.contains(&path));
        let index = match group {
            Some(group) => OTHERS + 1 + group,
            None if is_operational(path) => OPERATIONAL,
            None if is_from_service(call) => SERVICES,
            None => OTHERS,
        };
        self.slots.get(index)
    }
}

impl Step for Limit {
    async fn handle<N: Next>(self, call: Request, next: N) -> Response {
        let Some(slots) = self.slots(&call) else {
            return call_next(next, call).await;
        };
        let Ok(_in_flight) = slots.calls.try_acquire() else {
            let max = slots.max_calls;
            return reject(format!(
                "{max} calls are in flight, as many as max_calls allows"
            ));
        };
        let _counted =
            (!is_operational(call.uri().path())).then(|| InFlightGuard::new(&self.in_flight));
        let answer = call_next(next, call).await;
        let Ok(receiving) = Arc::clone(&slots.responses).try_acquire_owned() else {
            let max = slots.max_responses;
            return reject(format!(
                "{max} callers are receiving responses, as many as the service keeps"
            ));
        };
        answer.map(|body| {
            Body::new(body.map_frame(move |frame| {
                // The closure holds the slot until the body is dropped.
                let _ = &receiving;
                frame
            }))
        })
    }
}

fn reject(message: String) -> Response {
    if let Some(suppressed) = throttle_log("overload") {
        tracing::warn!(reason = message, suppressed, "Rejected a call");
    }
    let failure = Failure::new(Reason::Overloaded, message).retry_after(RETRY_AFTER);
    inpod_proto::into_status(&failure).into_http()
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
