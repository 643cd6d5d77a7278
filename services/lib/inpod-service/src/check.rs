use std::time::Duration;

use anyhow::{Context as _, bail};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::{Service, config::Common, grpc::LIVE};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    /// Asks for readiness, on behalf of readiness probes and people.
    Ready,
    /// Asks for liveness, on behalf of the kubelet's liveness probes.
    Live,
}

/// Asks the running service for its health, over the gRPC socket.
pub(crate) async fn check(
    service: &Service,
    common: &Common,
    question: Question,
) -> anyhow::Result<()> {
    let socket = crate::socket(&common.run_dir, service.name);
    let mut client = HealthClient::new(crate::channel(&socket));
    let mut request = tonic::Request::new(HealthCheckRequest {
        service: match question {
            Question::Ready => String::new(),
            Question::Live => LIVE.to_owned(),
        },
    });
    request.set_timeout(Duration::from_secs(2));
    let answer = tokio::time::timeout(Duration::from_secs(3), client.check(request));
    let answer = answer.await.context("no answer within 3 s");
    let status = answer.and_then(|answer| answer.context("the call failed"));
    let status = status
        .with_context(|| format!("cannot ask {}", socket.display()))?
        .into_inner()
        .status();
    if status != ServingStatus::Serving {
        let name = service.name;
        bail!(
            "{name} is not ready: {}; see GetStatus of pod-events, or {name}'s /metrics",
            status.as_str_name()
        );
    }
    Ok(())
}
