use std::{
    collections::BTreeMap,
    future::poll_fn,
    pin::pin,
    sync::{Mutex, MutexGuard, PoisonError},
    task::Poll,
    time::Duration,
};

use http_body_util::{BodyExt as _, Collected, Full, Limited};
use hyper::body::Bytes;
use inpod_types::{Failure, Reason};
use tokio::{sync::oneshot, time::timeout};
use tonic::{Status, body::Body};

use super::{RETRY_AFTER, Request, is_from_service};

/// The time in which a request has to be complete, whatever deadline the caller sets.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(30);

/// The memory for incomplete requests of services, and the memory for those of all other callers.
const MAX_INCOMPLETE_BYTES: usize = 16 << 20;

/// Completes requests before they take a slot of [`Limit`].
///
/// Nearly every request is complete when its call arrives. Every incomplete request reserves the maximum size of its
/// RPC; if the memory is used up, the oldest incomplete request is rejected.
///
/// [`Limit`]: super::limit::Limit
#[derive(Debug, Default)]
pub(super) struct Receive {
    services: Mutex<Incomplete>,
    others: Mutex<Incomplete>,
}

impl Receive {
    /// Waits until the request is complete. Fails if the request is late, too large or rejected.
    pub(super) async fn complete(&self, call: Request) -> Result<Request, Status> {
        // Reflection receives a stream of requests.
        let Some(max_bytes) = inpod_proto::max_request_bytes(call.uri().path()) else {
            return Ok(call);
        };
        let incomplete = match is_from_service(&call) {
            true => &self.services,
            false => &self.others,
        };
        let (head, body) = call.into_parts();
        let body = receive(body, max_bytes, incomplete).await?;
        Ok(Request::from_parts(head, Body::new(Full::new(body))))
    }
}

async fn receive(
    body: Body,
    max_bytes: usize,
    incomplete: &Mutex<Incomplete>,
) -> Result<Bytes, Status> {
    let mut body = pin!(Limited::new(body, max_bytes).collect());
    let at_once = poll_fn(|cx| Poll::Ready(body.as_mut().poll(cx)));
    if let Poll::Ready(received) = at_once.await {
        return bytes(received, max_bytes);
    }
    let (reservation, rejected) = Reservation::new(incomplete, max_bytes);
    let received = tokio::select! {
        received = timeout(RECEIVE_TIMEOUT, body) => received,
        _ = rejected => {
            let message = "too many requests are incomplete, of which this is the oldest";
            let failure = Failure::new(Reason::Overloaded, message).retry_after(RETRY_AFTER);
            return Err(inpod_proto::into_status(&failure));
        }
    };
    drop(reservation);
    let late = |_| {
        let message = format!("the request was not complete within {RECEIVE_TIMEOUT:?}");
        inpod_proto::into_status(&Failure::new(Reason::DeadlineExceeded, message))
    };
    bytes(received.map_err(late)?, max_bytes)
}

fn bytes(
    received: Result<Collected<Bytes>, Box<dyn std::error::Error + Send + Sync>>,
    max_bytes: usize,
) -> Result<Bytes, Status> {
    match received {
        Ok(received) => Ok(received.to_bytes()),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => Err(Status::out_of_range(
            format!("the request has more than {max_bytes} bytes"),
        )),
        Err(error) => Err(Status::cancelled(format!(
            "cannot receive the request: {error}"
        ))),
    }
}

/// The incomplete requests in the order of their arrival.
#[derive(Debug, Default)]
struct Incomplete {
    last: u64,
    reserved: usize,
    requests: BTreeMap<u64, (usize, oneshot::Sender<()>)>,
}

impl Incomplete {
    /// Rejects the oldest requests until the reservations fit.
    fn insert(&mut self, bytes: usize, reject: oneshot::Sender<()>) -> u64 {
        self.reserved += bytes;
        while self.reserved > MAX_INCOMPLETE_BYTES
            && let Some((_, (bytes, reject))) = self.requests.pop_first()
        {
            self.reserved -= bytes;
            // The request may have become complete meanwhile.
            reject.send(()).unwrap_or_default();
        }
        self.last += 1;
        self.requests.insert(self.last, (bytes, reject));
        self.last
    }

    fn remove(&mut self, number: u64) {
        if let Some((bytes, _)) = self.requests.remove(&number) {
            self.reserved -= bytes;
        }
    }
}

/// The memory of an incomplete request, freed on drop.
struct Reservation<'a> {
    incomplete: &'a Mutex<Incomplete>,
    number: u64,
}

impl<'a> Reservation<'a> {
    /// Returns the reservation with a receiver that reports its rejection.
    fn new(incomplete: &'a Mutex<Incomplete>, bytes: usize) -> (Self, oneshot::Receiver<()>) {
        let (reject, rejected) = oneshot::channel();
        let number = lock(incomplete).insert(bytes, reject);
        (Self { incomplete, number }, rejected)
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        lock(self.incomplete).remove(self.number);
    }
}

fn lock(incomplete: &Mutex<Incomplete>) -> MutexGuard<'_, Incomplete> {
    incomplete.lock().unwrap_or_else(PoisonError::into_inner)
}
