//! The layers of every call, from the outside in:
//!
//! 1. [`start_span`] adds the call to every log line that follows.
//! 2. [`metrics`] counts every response, those of the layers below included.
//! 3. [`authorize`] rejects callers before they take up a concurrency slot.
//! 4. [`Receive`] waits until the request is complete, before the call takes up a concurrency slot.
//! 5. [`Limit`] rejects calls over the limit before any work.
//! 6. [`scrape`] answers metrics.
//! 7. [`deadline`] is innermost: a call that times out releases its slot at once.
//!
//! [`Layers::handle`] applies 1 to 3, and [`Layers::handle_authorized`] applies the others.

mod authorize;
mod deadline;
mod limit;
mod metrics;
mod receive;
mod scrape;

use std::{convert::Infallible, sync::Arc, time::Duration};

use inpod_proto::Class;
use tonic::{Status, body::Body};
use tower::{Layer, Service, layer::layer_fn, service_fn};
use tracing::{Instrument as _, Span};

use crate::{Metrics, Trace, peer::Peer};
pub use limit::ConcurrencyGroup;
use limit::Limit;
use receive::Receive;

/// The delay after which a rejected caller is advised to retry.
const RETRY_AFTER: Duration = Duration::from_secs(1);

type Request = http::Request<Body>;
type Response = http::Response<Body>;

/// The service below the layers, which is always ready and reports failures only as responses.
pub(super) trait Next:
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

#[derive(Debug)]
struct Layers {
    metrics: Metrics,
    receive: Receive,
    limit: Limit,
}

impl Layers {
    async fn handle(&self, call: Request, next: impl Next) -> Response {
        let span = start_span(&call);
        let handled = async {
            let open = metrics::begin(self.metrics.calls(), &call);
            let answer = match authorize::refuse(self.metrics.calls(), &call) {
                Some(refusal) => refusal,
                None => self
                    .handle_authorized(call, next)
                    .await
                    .unwrap_or_else(Status::into_http),
            };
            let answer = metrics::count(open, answer);
            tracing::debug!("Answered");
            answer
        };
        handled.instrument(span).await
    }

    async fn handle_authorized(&self, call: Request, next: impl Next) -> Result<Response, Status> {
        let call = self.receive.complete(call).await?;
        let slot = self.limit.acquire(&call)?;
        let answer = match call.uri().path() {
            crate::metrics::PATH => scrape::answer(&call, &self.metrics),
            _ => deadline::call_next(call, next).await,
        };
        slot.release(answer)
    }
}

/// Builds the layers of this module's list.
pub(super) fn stack<S: Next>(
    metrics: &Metrics,
    max_calls: usize,
    groups: &'static [ConcurrencyGroup],
) -> impl Layer<S, Service = impl Next + use<S>> + Clone + use<S> {
    let layers = Arc::new(Layers {
        metrics: metrics.clone(),
        receive: Receive::default(),
        limit: Limit::new(max_calls, groups, metrics.calls()),
    });
    layer_fn(move |next: S| {
        let layers = Arc::clone(&layers);
        service_fn(move |call| {
            let (layers, next) = (Arc::clone(&layers), next.clone());
            async move { Ok(layers.handle(call, next).await) }
        })
    })
}

/// Starts a span with the method and the caller's trace id.
fn start_span(call: &Request) -> Span {
    let trace = Trace::from_headers(call.headers());
    tracing::info_span!("call", method = call.uri().path(), trace_id = trace.id())
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
