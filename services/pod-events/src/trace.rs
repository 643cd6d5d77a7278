//! On whose behalf something is done: the trace of a verb follows it from its handler into the pod's task, and from
//! there to the services that the task asks.

use inpod_service::{TRACEPARENT, Trace};
use tonic::metadata::MetadataMap;

tokio::task_local! {
    static CURRENT: Trace;
}

/// Runs something on behalf of a trace.
pub(crate) async fn on_behalf_of<F: Future>(trace: Trace, work: F) -> F::Output {
    CURRENT.scope(trace, work).await
}

/// On whose behalf this runs; none for what the task does of its own accord.
pub(crate) fn current() -> Trace {
    CURRENT.try_with(Clone::clone).unwrap_or_default()
}

/// Names the trace to whoever is asked.
pub(crate) fn pass_on(metadata: &mut MetadataMap) {
    let trace = current().here();
    let value = trace.header().and_then(|header| header.parse().ok());
    if let Some(value) = value {
        metadata.insert(TRACEPARENT, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_trace_is_passed_on_by_what_runs_on_its_behalf_and_by_nothing_else() {
        let header = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let mut told = MetadataMap::new();
        told.insert(TRACEPARENT, header.parse().unwrap());
        let passed = |()| {
            let mut onwards = MetadataMap::new();
            pass_on(&mut onwards);
            onwards
        };
        let trace = Trace::of(told.as_ref());
        let onwards = on_behalf_of(trace, async { passed(()) }).await;
        assert_eq!(onwards.get(TRACEPARENT).unwrap(), header);
        assert!(passed(()).is_empty());
    }
}
