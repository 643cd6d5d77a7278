use tracing::Instrument as _;

use super::{Answer, Call, Next, Step, pass};
use crate::{Trace, otlp};

/// Puts a call in a span with its method, and the id of the caller's trace where it says one.
#[derive(Clone, Copy, Debug)]
pub(in crate::grpc) struct Span;

impl Step for Span {
    fn take<N: Next>(self, call: Call, next: N) -> impl Future<Output = Answer> + Send {
        let trace = Trace::of(call.headers());
        let span = tracing::info_span!("call", method = call.uri().path(), trace_id = trace.id());
        otlp::serve(&span, &trace, call.uri().path());
        let answered = async {
            let answer = pass(next, call).await;
            tracing::debug!("Answered");
            answer
        };
        answered.instrument(span)
    }
}
