use std::time::Duration;

use anyhow::{Context as _, bail};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::{Service, config::Common};

/// Asks the running service's own socket whether it is healthy: what an exec probe runs.
pub(crate) async fn check(service: &Service, common: &Common) -> anyhow::Result<()> {
    let socket = crate::socket(&common.run_dir, service.name);
    let mut client = HealthClient::new(crate::channel(&socket));
    let mut request = tonic::Request::new(HealthCheckRequest {
        service: String::new(),
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
        bail!("{} is not serving: {}", service.name, status.as_str_name());
    }
    Ok(())
}
