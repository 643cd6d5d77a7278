//! What every call of every service passes, from the outside in:
//!
//! 1. [`Span`]: whatever is logged from here on names the call.
//! 2. [`CallMetrics`]: every answer is counted, also those of the layers below.
//! 3. [`Authorize`]: who may not make the call costs nothing more, and takes no place from those who may.
//! 4. [`Scrape`]: metrics are answered here, also while calls are refused for their number.
//! 5. [`Limit`]: a call over the limit is refused before work begins.
//! 6. [`Deadline`]: innermost, so that the place of a call that ran out of time is free again at once.

mod authorize;
mod deadline;
mod limit;
mod metrics;
mod scrape;
mod span;

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use tonic::body::Body;
use tower::{Layer, Service, layer::util::Stack};

use crate::Metrics;
use authorize::Authorize;
use deadline::Deadline;
pub use limit::ConcurrencyGroup;
use limit::Limit;
use metrics::CallMetrics;
use scrape::Scrape;
use span::Span;

type Request = http::Request<Body>;
type Response = http::Response<Body>;

/// One of the things that a call passes.
trait Step: Clone + Send + 'static {
    /// Answers a call, itself or by what comes next.
    fn handle<N: Next>(self, call: Request, next: N) -> impl Future<Output = Response> + Send;
}

/// What comes after a step. It cannot fail other than by an answer.
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

/// Lets a call pass to what comes next.
async fn call_next(mut next: impl Next, call: Request) -> Response {
    match next.call(call).await {
        Ok(answer) => answer,
        Err(never) => match never {},
    }
}

/// A step as a layer.
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

/// A service behind a step.
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

    fn call(&mut self, call: Request) -> Self::Future {
        // The one that was found ready is the one to use.
        let next = self.next.clone();
        let ready = std::mem::replace(&mut self.next, next);
        let answer = self.step.clone().handle(call, ready);
        Box::pin(async move { Ok(answer.await) })
    }
}

pub(super) type Inner =
    Stack<StepLayer<Deadline>, Stack<StepLayer<Limit>, Stack<StepLayer<Scrape>, Outer>>>;
pub(super) type Outer = Stack<StepLayer<Authorize>, Stack<StepLayer<CallMetrics>, StepLayer<Span>>>;

/// All of them in their order.
pub(super) fn stack(
    metrics: &Metrics,
    max_calls: usize,
    groups: &'static [ConcurrencyGroup],
) -> Inner {
    let calls = metrics.calls();
    let outer = Stack::new(StepLayer(CallMetrics(calls.clone())), StepLayer(Span));
    let outer = Stack::new(StepLayer(Authorize(calls.clone())), outer);
    let inner = Stack::new(StepLayer(Scrape(metrics.clone())), outer);
    let inner = Stack::new(StepLayer(Limit::new(max_calls, groups, calls)), inner);
    Stack::new(StepLayer(Deadline), inner)
}

/// Whether a call is of gRPC's own services: health and reflection, which an operator needs most when things are bad.
fn is_of_grpc(call: &Request) -> bool {
    call.uri().path().starts_with("/grpc.")
}

#[cfg(test)]
mod tests;
