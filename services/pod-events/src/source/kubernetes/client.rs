//! The API server's client, with an observer for `Retry-After` and a limit for responses.

use std::{path::Path, time::Duration};

use inpod_kube::ClientError;
use kube::{Client, client::ClientBuilder};
use tower::{layer::layer_fn, util::MapResponseLayer};

use super::{response_limit::LimitResponses, retry_after::RetryAfter};

/// The time without received data after which a connection counts as dead, longer than a watch without events may last.
const READ_TIMEOUT: Duration = Duration::from_secs(240);

#[derive(Clone)]
pub(in crate::source) struct Connection {
    pub(super) client: Client,
    pub(super) retry_after: RetryAfter,
}

/// Creates a client without connecting.
pub(in crate::source) async fn client(
    kubeconfig: Option<&Path>,
) -> Result<Connection, ClientError> {
    let mut config = inpod_kube::client_config(kubeconfig).await?;
    config.read_timeout = Some(READ_TIMEOUT);
    let builder =
        ClientBuilder::try_from(config).map_err(ClientError::from_kubeconfig(kubeconfig))?;
    let retry_after = RetryAfter::default();
    let observer = retry_after.clone();
    let layer = MapResponseLayer::new(move |response: http::Response<_>| {
        observer.observe(&response);
        response
    });
    let builder = builder.with_layer(&layer);
    let client = builder.with_layer(&layer_fn(LimitResponses)).build();
    Ok(Connection {
        client,
        retry_after,
    })
}
