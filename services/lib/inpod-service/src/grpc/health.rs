//! The service `grpc.health.v1`, which reports readiness and liveness of the process.

use std::{pin::Pin, sync::Arc};

use futures_util::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, metadata::MetadataValue};
use tonic_health::pb::{
    HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus, health_server,
};

use crate::{Readiness, Shutdown};

/// The name for liveness probes, serving while the process answers calls. A restart would not bring back a missing
/// dependency.
pub(crate) const LIVE: &str = "live";

/// The key of the response's metadata with the unmet conditions of readiness.
pub(crate) const REASONS: &str = "inpod-reasons-bin";

/// The health of the process (the empty name) and of each gRPC service: serving while ready and not draining.
#[derive(Debug)]
pub(super) struct Health {
    pub(super) readiness: Readiness,
    pub(super) shutdown: Shutdown,
    pub(super) names: Arc<[&'static str]>,
}

impl Health {
    fn check_known(&self, name: &str) -> Result<(), Status> {
        if name.is_empty() || name == LIVE || self.names.contains(&name) {
            return Ok(());
        }
        let known = self.names.join(", ");
        let message = format!("unknown service \"{name}\"; known are {known}, {LIVE} and \"\"");
        Err(Status::not_found(message))
    }
}

fn status(serving: bool) -> HealthCheckResponse {
    let status = if serving {
        ServingStatus::Serving
    } else {
        ServingStatus::NotServing
    };
    HealthCheckResponse {
        status: status.into(),
    }
}

#[tonic::async_trait]
impl health_server::Health for Health {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let name = request.into_inner().service;
        self.check_known(&name)?;
        let ready = self.readiness.is_ready() && !self.shutdown.is_requested();
        let mut response = Response::new(status(name == LIVE || ready));
        // The health service has no text for people.
        let reasons = MetadataValue::from_bytes(self.readiness.unmet().as_bytes());
        response.metadata_mut().insert_bin(REASONS, reasons);
        Ok(response)
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    /// Streams changes of the status, of which the drain is the last; [`LIVE`] does not change.
    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let name = request.into_inner().service;
        self.check_known(&name)?;
        let live = name == LIVE;
        let changes = tokio_stream::wrappers::WatchStream::new(self.readiness.changes());
        let serving = self
            .shutdown
            .end_stream(changes.map(move |ready| live || ready));
        let last = futures_util::stream::iter((!live).then_some(false));
        let stream = serving.chain(last).map(|serving| Ok(status(serving)));
        Ok(Response::new(Box::pin(stream)))
    }
}
