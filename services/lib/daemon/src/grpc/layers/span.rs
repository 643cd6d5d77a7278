use tracing::Instrument as _;

use super::{Answer, Call, Next, Step, pass};

/// Puts a call in a span with its method, and the caller's trace where it says one.
#[derive(Clone, Copy, Debug)]
pub(in crate::grpc) struct Span;

impl Step for Span {
    fn take<N: Next>(self, call: Call, next: N) -> impl Future<Output = Answer> + Send {
        let traceparent = call
            .headers()
            .get("traceparent")
            .and_then(|value| value.to_str().ok());
        let span = tracing::info_span!("call", method = call.uri().path(), traceparent);
        pass(next, call).instrument(span)
    }
}
