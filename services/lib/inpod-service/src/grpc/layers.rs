//! The layers of every call, from the outside in:
//!
//! 1. [`Span`] adds the call to every log line that follows.
//! 2. [`CallMetrics`] counts every response, those of the layers below included.
//! 3. [`Authorize`] rejects callers before they take up a concurrency slot.
//! 4. [`Receive`] waits until the request is complete, before the call takes up a concurrency slot.
//! 5. [`Limit`] rejects calls over the limit before any work.
//! 6. [`Scrape`] answers metrics.
//! 7. [`Deadline`] is innermost: a call that times out releases its slot at once.

mod authorize;
mod deadline;
mod limit;
mod metrics;
mod receive;
mod scrape;
mod span;

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use inpod_proto::Class;
use tonic::body::Body;
use tower::{Layer, Service, layer::util::Stack};

use crate::{Metrics, peer::Peer};
use authorize::Authorize;
use deadline::Deadline;
pub use limit::ConcurrencyGroup;
use limit::Limit;
use metrics::CallMetrics;
use receive::Receive;
use scrape::Scrape;
use span::Span;

/// The delay after which a rejected caller is advised to retry.
const RETRY_AFTER: Duration = Duration::from_secs(1);

type Request = http::Request<Body>;
type Response = http::Response<Body>;

trait Step: Clone + Send + 'static {
    /// Responds directly, or passes the call on and returns the response of `next`.
    fn handle<N: Next>(self, call: Request, next: N) -> impl Future<Output = Response> + Send;
}

/// The rest of the stack, which reports failures only as responses.
trait Next:
    Service<Request, Response = Response, Error = Infallible, Future: Send> + Clone + Send + 'static
{
}

impl<S> Next for S where
    S: Service<Request, Response = Response, Error = Infallible, Future: Send>
        + Clone
        + Send
        + 'static
{
}

async fn call_next(mut next: impl Next, call: Request) -> Response {
    match next.call(call).await {
        Ok(answer) => answer,
        Err(never) => match never {},
    }
}

#[derive(Clone, Debug)]
pub(super) struct StepLayer<T>(T);

impl<T: Clone, S> Layer<S> for StepLayer<T> {
    type Service = StepService<T, S>;

    fn layer(&self, next: S) -> Self::Service {
        StepService {
            step: self.0.clone(),
            next,
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct StepService<T, S> {
    step: T,
    next: S,
}

impl<T: Step, S: Next> Service<Request> for StepService<T, S> {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.next.poll_ready(cx)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        // The instance polled ready has to take the call, so a clone replaces this instance.
        let next = self.next.clone();
        let ready = std::mem::replace(&mut self.next, next);
        let answer = self.step.clone().handle(request, ready);
        Box::pin(async move { Ok(answer.await) })
    }
}

pub(super) type Inner = Stack<StepLayer<Deadline>, Stack<StepLayer<Scrape>, Middle>>;
pub(super) type Middle = Stack<StepLayer<Limit>, Stack<StepLayer<Receive>, Outer>>;
pub(super) type Outer = Stack<StepLayer<Authorize>, Stack<StepLayer<CallMetrics>, StepLayer<Span>>>;

/// Builds the stack of layers in the order of this module's list.
pub(super) fn stack(
    metrics: &Metrics,
    max_calls: usize,
    groups: &'static [ConcurrencyGroup],
) -> Inner {
    let calls = metrics.calls();
    let outer = Stack::new(StepLayer(CallMetrics(calls.clone())), StepLayer(Span));
    let outer = Stack::new(StepLayer(Authorize(calls.clone())), outer);
    let middle = Stack::new(StepLayer(Receive::default()), outer);
    let middle = Stack::new(StepLayer(Limit::new(max_calls, groups, calls)), middle);
    let inner = Stack::new(StepLayer(Scrape(metrics.clone())), middle);
    Stack::new(StepLayer(Deadline), inner)
}

/// Returns whether a path is of health, reflection or metrics.
fn is_operational(path: &str) -> bool {
    path.starts_with("/grpc.") || path == crate::metrics::PATH
}

/// Returns whether the caller is one of inpod's services, which no host process may keep from being served.
fn is_from_service(call: &Request) -> bool {
    let peer = call.extensions().get::<Peer>();
    authorize::class(call.uri().path()) == Some(Class::Service)
        || peer.is_some_and(Peer::is_only_service)
}

#[cfg(test)]
mod tests;
