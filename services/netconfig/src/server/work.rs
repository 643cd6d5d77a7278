//! Runs work beyond the end of the starting gRPC call.

use std::future::Future;

use inpod_types::{Failure, Reason};
use tonic::Status;
use tracing::Instrument as _;

use crate::error::Failed;

/// Continues the work even if the client disconnects and tonic drops the handler.
pub(super) async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, Status>> + Send + 'static,
) -> Result<T, Status> {
    let task = tokio::spawn(work.in_current_span());
    task.await.unwrap_or_else(|error| Err(panic_status(&error)))
}

pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failed> + Send + 'static,
) -> Result<T, Status> {
    let span = tracing::Span::current();
    let task = tokio::task::spawn_blocking(move || span.in_scope(work));
    let result = task.await.map_err(|error| panic_status(&error))?;
    result.map_err(|error| {
        let failure = Failure::from(error);
        tracing::warn!(reason = %failure.reason, error = failure.message, "Request failed");
        inpod_proto::into_status(&failure)
    })
}

fn panic_status(error: &tokio::task::JoinError) -> Status {
    tracing::error!(%error, "A task failed");
    let failure = Failure::new(Reason::Internal, format!("netconfig failed: {error}"));
    inpod_proto::into_status(&failure)
}
