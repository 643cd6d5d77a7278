//! The one server that every service of inpod has.

mod health;
mod incoming;
mod layers;
mod reflection;

pub(crate) use health::LIVE;

use std::{convert::Infallible, path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context as _;
use tonic::{body::Body, server::NamedService, service::Routes};
use tonic_health::pb::health_server::HealthServer;
use tower::Service;

use crate::{Daemon, Metrics, Readiness, Shutdown, peer::Policy, uds};
use health::Health;
pub use layers::ConcurrencyGroup;
use reflection::{Reflection, V1, V1alpha};

/// How long a drain may take: calls that are under way are answered, watchers are cut.
const DRAIN: Duration = Duration::from_secs(5);

/// More calls than this on one connection at once are refused by HTTP/2 itself.
const STREAMS: u32 = 256;

/// Health, reflection, metrics and the service's own calls on one Unix socket, each call checked against its class.
#[derive(Debug)]
pub struct Server {
    socket: PathBuf,
    policy: Arc<Policy>,
    shutdown: Shutdown,
    readiness: Readiness,
    metrics: Metrics,
    max_calls: usize,
    groups: &'static [ConcurrencyGroup],
    routes: Routes,
    names: Vec<&'static str>,
}

impl Server {
    pub(crate) fn new(daemon: &Daemon) -> Self {
        Self {
            socket: crate::socket(&daemon.run_dir, daemon.service.name),
            policy: Arc::clone(&daemon.policy),
            shutdown: daemon.shutdown(),
            readiness: daemon.readiness.clone(),
            metrics: daemon.metrics.clone(),
            max_calls: daemon.max_calls,
            groups: &[],
            routes: Routes::default(),
            names: Vec::new(),
        }
    }

    /// Gives methods a limit of their own, each lane as many calls as the setting allows. A method of no lane shares
    /// one limit with all others of that kind.
    #[must_use]
    pub fn concurrency_groups(self, groups: &'static [ConcurrencyGroup]) -> Self {
        Self { groups, ..self }
    }

    /// Serves a service's calls as well.
    #[must_use]
    pub fn add_service<S>(mut self, service: S) -> Self
    where
        S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send + 'static,
    {
        self.names.push(S::NAME);
        self.routes = self.routes.add_service(service);
        self
    }

    /// Serves until the process is to stop, then drains. Health tells whether the service is ready meanwhile.
    ///
    /// # Errors
    ///
    /// When the socket cannot be had.
    pub async fn serve(self) -> anyhow::Result<()> {
        let listener = uds::bind(&self.socket)?;
        let names: Arc<[&'static str]> = self.names.into();
        let health = HealthServer::new(Health {
            readiness: self.readiness,
            shutdown: self.shutdown.clone(),
            names: Arc::clone(&names),
        });
        let routes = self
            .routes
            .add_service(health)
            .add_service(Reflection::<V1>::new(&names))
            .add_service(Reflection::<V1alpha>::new(&names));
        tracing::info!(socket = %self.socket.display(), "Serving");
        let connections = incoming::incoming(listener, self.policy, self.metrics.calls().clone());
        let serving = tonic::transport::Server::builder()
            // For curl, that metrics can be read without a client of HTTP/2.
            .accept_http1(true)
            .max_concurrent_streams(STREAMS)
            .layer(layers::stack(&self.metrics, self.max_calls, self.groups))
            .add_routes(routes)
            .serve_with_incoming_shutdown(connections, self.shutdown.clone().requested());
        let drained = async {
            self.shutdown.requested().await;
            tokio::time::sleep(DRAIN).await;
        };
        tokio::select! {
            result = serving => result.context("the server failed")?,
            () = drained => tracing::warn!("Calls were cut at the end of the drain"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
