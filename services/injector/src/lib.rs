//! The mutating admission webhook that injects sidecars into pods.
//!
//! `inpod_injection` computes the patch from the review, the path and the configuration. In this crate, [`server`]
//! serves HTTPS, [`review`] translates reviews, [`path`] parses the proxy environment, and [`reload`] reloads files.
//!
//! The injector has no Kubernetes credential and calls no other service.

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

pub const SERVICE: Service = Service {
    name: "injector",
    about: "Mutating admission webhook that injects sidecars into pods",
    version: inpod_service::VERSION,
    keys: config::KEYS,
};

/// Serves the webhook until shutdown.
///
/// # Errors
///
/// Fails if the address or the socket is not available.
pub async fn run(config: Config, daemon: Daemon) -> anyhow::Result<()> {
    daemon.readiness().require(reload::SERVING, "not read yet");
    let metrics = daemon.metrics().register(Metrics::register);
    let current = Arc::new(Current::default());
    let polling = reload::poll(
        config.clone(),
        Arc::clone(&current),
        daemon.readiness().clone(),
        metrics.clone(),
    );
    tokio::spawn(inpod_service::abort_on_panic("reload", polling));
    if let Some(address) = config.metrics_address {
        let (conditions, text) = (daemon.readiness().clone(), Text(daemon.metrics().clone()));
        tokio::spawn(inpod_service::metrics::serve(address, conditions, text));
    }
    let server = Server::new(&config, current, metrics)?;
    let listener = server::listen(config.listen_address).await?;
    let served = server.serve(listener, daemon.shutdown());
    // The webhook serves reviews for `SHUTDOWN_DELAY` longer than the socket.
    let (own, ()) = tokio::join!(daemon.server().serve(), served);
    own
}

#[derive(Clone, Debug)]
struct Text(inpod_service::Metrics);

impl inpod_service::metrics::RenderMetrics for Text {
    async fn text(&self) -> String {
        self.0.text()
    }
}
