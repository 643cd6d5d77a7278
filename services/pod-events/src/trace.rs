//! The trace of a request, which follows the request from the handler into the pod's task, and on to the called
//! services.

use inpod_service::{TRACEPARENT, Trace};
use tonic::metadata::MetadataMap;

tokio::task_local! {
    static CURRENT: Trace;
}

pub(crate) async fn scope<F: Future>(trace: Trace, work: F) -> F::Output {
    CURRENT.scope(trace, work).await
}

/// Returns the trace of the current request; the trace is empty for work that a task starts without a request.
pub(crate) fn current() -> Trace {
    CURRENT.try_with(Clone::clone).unwrap_or_default()
}

pub(crate) fn inject(metadata: &mut MetadataMap) {
    let trace = current();
    let value = trace.header().and_then(|header| header.parse().ok());
    if let Some(value) = value {
        metadata.insert(TRACEPARENT, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_trace_is_injected_within_its_scope_and_nowhere_else() {
        let header = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let mut incoming = MetadataMap::new();
        incoming.insert(TRACEPARENT, header.parse().unwrap());
        let injected = |()| {
            let mut outgoing = MetadataMap::new();
            inject(&mut outgoing);
            outgoing
        };
        let trace = Trace::from_headers(incoming.as_ref());
        let outgoing = scope(trace, async { injected(()) }).await;
        assert_eq!(outgoing.get(TRACEPARENT).unwrap(), header);
        assert!(injected(()).is_empty());
    }
}
