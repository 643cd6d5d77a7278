mod health;
mod incoming;
mod layers;
mod log_service;
mod probes;
mod reflection;

pub(crate) use health::{LIVE, REASONS};

use std::{convert::Infallible, sync::Arc, time::Duration};

use anyhow::Context as _;
use inpod_proto::log::v1::log_service_server::LogServiceServer;
use tonic::{body::Body, server::NamedService, service::Routes};
use tonic_health::pb::health_server::HealthServer;
use tower::Service;

use crate::{Daemon, rlimit, uds};
use health::Health;
use incoming::{Connections, Incoming};
pub use layers::ConcurrencyGroup;
use log_service::LogService;
use probes::Probes;
use reflection::Reflection;

/// The time in which calls have to be answered and streams have to end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// The number of connections, and of streams per HTTP/2 connection, above `max_calls`: for watches and for calls that
/// the server refuses.
const SPARE_STREAMS: u16 = 256;

/// After a connection has been silent for the interval, its peer has to answer a ping of HTTP/2 within the timeout.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(60);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// The bytes of a request, and of all requests of a connection, that a client may send before the server reads them.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 256 << 10;

/// Serves health, reflection, metrics, the log's levels and the service's RPCs on one Unix socket, and authorizes every call by the class
/// of its RPC.
#[derive(Debug)]
pub struct Server {
    daemon: Daemon,
    groups: &'static [ConcurrencyGroup],
    routes: Routes,
    names: Vec<&'static str>,
}

impl Server {
    pub(crate) fn new(daemon: &Daemon) -> Self {
        Self {
            daemon: daemon.clone(),
            groups: &[],
            routes: Routes::default(),
            names: Vec::new(),
        }
    }

    /// Gives each group a concurrency limit of its own (`max_calls`), while all other methods share another limit.
    #[must_use]
    pub fn concurrency_groups(self, groups: &'static [ConcurrencyGroup]) -> Self {
        Self { groups, ..self }
    }

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

    /// Returns the number of streams, larger than the number of admitted calls: a call that had to wait for a stream
    /// would wait for calls of every group.
    fn max_streams(&self) -> u32 {
        let calls = self.daemon.max_calls.saturating_mul(self.groups.len() + 1);
        u32::from(SPARE_STREAMS).saturating_add(u32::try_from(calls).unwrap_or(u32::MAX))
    }

    /// Returns the maximum number of connections, which leaves half of the files that the process may open for work.
    fn max_connections(&self) -> usize {
        let wanted = self.daemon.max_calls.saturating_add(SPARE_STREAMS.into());
        wanted.min(rlimit::max_open_files() / 2)
    }

    /// Serves until shutdown, then drains. The health service, and HTTP probes at `health_address`, report the
    /// readiness.
    ///
    /// # Errors
    ///
    /// Fails if the socket cannot be bound.
    pub async fn serve(self) -> anyhow::Result<()> {
        let (max_connections, max_streams) = (self.max_connections(), self.max_streams());
        let daemon = self.daemon;
        let socket = crate::socket(&daemon.run_dir, daemon.service.name);
        let listener = uds::bind(&socket)?;
        if let Some(address) = daemon.health_address {
            let probes = Probes {
                readiness: daemon.readiness.clone(),
                shutdown: daemon.shutdown(),
            };
            tokio::spawn(probes.serve(address));
        }
        let incoming = Incoming {
            listener,
            policy: Arc::clone(&daemon.policy),
            calls: daemon.metrics.calls().clone(),
            connections: Connections::new(max_connections),
        };
        let log = LogServiceServer::new(LogService(Arc::clone(&daemon.log_levels)));
        let names = [self.names, vec![LogServiceServer::<LogService>::NAME]].concat();
        let names: Arc<[&'static str]> = names.into();
        let health = HealthServer::new(Health {
            readiness: daemon.readiness.clone(),
            shutdown: daemon.shutdown(),
            names: Arc::clone(&names),
        });
        let routes = self
            .routes
            .add_service(log)
            .add_service(health)
            .add_service(Reflection::<false>::new(&names))
            .add_service(Reflection::<true>::new(&names));
        tracing::info!(socket = %socket.display(), "Serving");
        let serving = tonic::transport::Server::builder()
            // HTTP/1.1 lets curl read the metrics without HTTP/2.
            .accept_http1(true)
            .max_concurrent_streams(max_streams)
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .layer(layers::stack(
                &daemon.metrics,
                daemon.max_calls,
                self.groups,
            ))
            .add_routes(routes)
            .serve_with_incoming_shutdown(incoming.accept_all(), daemon.shutdown().requested());
        let drained = async {
            daemon.shutdown().requested().await;
            tokio::time::sleep(DRAIN_TIMEOUT).await;
        };
        tokio::select! {
            result = serving => result.context("the server failed")?,
            () = drained => tracing::warn!("Aborted calls at the end of the drain"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
