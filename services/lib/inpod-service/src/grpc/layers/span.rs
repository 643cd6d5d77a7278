use tracing::Instrument as _;

use super::{Next, Request, Response, Step, call_next};
use crate::{Trace, otlp};

/// A layer that adds a span with the method and the caller's trace id.
#[derive(Clone, Copy, Debug)]
pub(in crate::grpc) struct Span;

impl Step for Span {
    fn handle<N: Next>(self, call: Request, next: N) -> impl Future<Output = Response> + Send {
        let trace = Trace::from_headers(call.headers());
        let span = tracing::info_span!("call", method = call.uri().path(), trace_id = trace.id());
        otlp::serve(&span, &trace, call.uri().path());
        let answered = async {
            let answer = call_next(next, call).await;
            tracing::debug!("Answered");
            answer
        };
        answered.instrument(span)
    }
}
