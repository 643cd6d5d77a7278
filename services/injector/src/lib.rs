//! Gives pods their sidecar: a mutating admission webhook.
//!
//! What becomes of a pod is decided by the crate `inject`, a function of the review, the path and the configuration; here
//! is how it is asked over HTTPS. [`review`] is what is said, [`server`] how it is heard, [`path`] what the path says of
//! the proxy's environment, [`reload`] how certificate and configuration are followed.
//!
//! It holds no credential and asks nobody.

pub mod certificate;
pub mod config;
mod connections;
pub mod metrics;
pub mod path;
pub mod reload;
pub mod review;
pub mod server;

use std::sync::Arc;

use inpod_service::{Daemon, Service};

use crate::{config::Config, metrics::Metrics, reload::Current, server::Server};

/// What this service is.
pub const SERVICE: Service = Service {
    name: "injector",
    about: "Gives pods their sidecar: a mutating admission webhook",
    version: env!("CARGO_PKG_VERSION"),
    keys: config::KEYS,
};

/// Serves the webhook until the process is to stop.
///
/// # Errors
///
/// When the address or the service's socket cannot be had.
pub async fn run(config: Config, daemon: Daemon) -> anyhow::Result<()> {
    daemon.readiness().require(reload::SERVING, "not read yet");
    let metrics = Metrics::default();
    daemon
        .metrics()
        .register(|registry| metrics.register(registry));
    let current = Arc::new(Current::default());
    let following = reload::follow(
        config.clone(),
        Arc::clone(&current),
        daemon.readiness().clone(),
        metrics.clone(),
    );
    tokio::spawn(inpod_service::vital("reload", following));
    if let Some(address) = config.metrics_address {
        let (conditions, text) = (daemon.readiness().clone(), Text(daemon.metrics().clone()));
        tokio::spawn(inpod_service::metrics::serve(address, conditions, text));
    }
    let server = Server::new(&config, current, metrics)?;
    let listener = server::listen(config.listen_address).await?;
    let served = server.serve(listener, daemon.shutdown());
    // The socket ends at once when the process is to stop, reviews go on for a while.
    let (own, ()) = tokio::join!(daemon.server().serve(), served);
    own
}

/// The metrics of this process, for a scrape.
#[derive(Clone, Debug)]
struct Text(inpod_service::Metrics);

impl inpod_service::metrics::AsyncText for Text {
    async fn text(&self) -> String {
        self.0.text()
    }
}
