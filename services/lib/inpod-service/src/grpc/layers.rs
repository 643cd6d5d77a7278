//! What every call of every service passes, from the outside in:
//!
//! 1. [`Span`]: whatever is logged from here on names the call.
//! 2. [`Measure`]: every answer is counted, also those of the layers below.
//! 3. [`Gate`]: who may not make the call costs nothing more, and takes no place from those who may.
//! 4. [`Scrape`]: metrics are answered here, also while calls are refused for their number.
//! 5. [`Limit`]: a call over the limit is refused before work begins.
//! 6. [`Deadline`]: innermost, so that the place of a call that ran out of time is free again at once.

mod deadline;
mod gate;
mod limit;
mod measure;
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
use deadline::Deadline;
use gate::Gate;
pub use limit::Lane;
use limit::Limit;
use measure::Measure;
use scrape::Scrape;
use span::Span;

type Call = http::Request<Body>;
type Answer = http::Response<Body>;

/// One of the things that a call passes.
trait Step: Clone + Send + 'static {
    /// Answers a call, itself or by what comes next.
    fn take<N: Next>(self, call: Call, next: N) -> impl Future<Output = Answer> + Send;
}

/// What comes after a step. It cannot fail other than by an answer.
trait Next:
    Service<Call, Response = Answer, Error = Infallible, Future: Send> + Clone + Send + 'static
{
}

impl<S> Next for S where
    S: Service<Call, Response = Answer, Error = Infallible, Future: Send> + Clone + Send + 'static
{
}

/// Lets a call pass to what comes next.
async fn pass(mut next: impl Next, call: Call) -> Answer {
    match next.call(call).await {
        Ok(answer) => answer,
        Err(never) => match never {},
    }
}

/// A step as a layer.
#[derive(Clone, Debug)]
pub(super) struct Through<T>(T);

impl<T: Clone, S> Layer<S> for Through<T> {
    type Service = Passed<T, S>;

    fn layer(&self, next: S) -> Self::Service {
        Passed {
            step: self.0.clone(),
            next,
        }
    }
}

/// A service behind a step.
#[derive(Clone, Debug)]
pub(super) struct Passed<T, S> {
    step: T,
    next: S,
}

impl<T: Step, S: Next> Service<Call> for Passed<T, S> {
    type Response = Answer;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Answer, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.next.poll_ready(cx)
    }

    fn call(&mut self, call: Call) -> Self::Future {
        // The one that was found ready is the one to use.
        let next = self.next.clone();
        let ready = std::mem::replace(&mut self.next, next);
        let answer = self.step.clone().take(call, ready);
        Box::pin(async move { Ok(answer.await) })
    }
}

pub(super) type Inner =
    Stack<Through<Deadline>, Stack<Through<Limit>, Stack<Through<Scrape>, Outer>>>;
pub(super) type Outer = Stack<Through<Gate>, Stack<Through<Measure>, Through<Span>>>;

/// All of them in their order.
pub(super) fn stack(metrics: &Metrics, max_calls: usize, lanes: &'static [Lane]) -> Inner {
    let calls = metrics.calls();
    let outer = Stack::new(Through(Measure(calls.clone())), Through(Span));
    let outer = Stack::new(Through(Gate(calls.clone())), outer);
    let inner = Stack::new(Through(Scrape(metrics.clone())), outer);
    let inner = Stack::new(Through(Limit::new(max_calls, lanes, calls)), inner);
    Stack::new(Through(Deadline), inner)
}

/// Whether a call is of gRPC's own services: health and reflection, which an operator needs most when things are bad.
fn is_of_grpc(call: &Call) -> bool {
    call.uri().path().starts_with("/grpc.")
}

#[cfg(test)]
mod tests;
