//! The one server that every service of inpod has.

use std::{
    convert::Infallible,
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use anyhow::Context as _;
use futures_util::Stream;
use inpod_proto::class_of;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{UnixListener, UnixStream},
};
use tonic::{body::Body, server::NamedService, service::Routes, transport::server::Connected};
use tower::{Layer, Service};
use tracing::Instrument as _;
use workload::{Failure, Reason};

use crate::{
    Daemon, Shutdown,
    peer::{NOBODY, Peer, Policy},
    uds,
};

/// How long a drain may take: calls that are under way are answered, watchers are cut.
const DRAIN: Duration = Duration::from_secs(5);

/// More calls than this on one connection at once are refused by HTTP/2 itself.
const STREAMS: u32 = 256;

/// Health, reflection and the service's own calls on one Unix socket, each call checked against its class.
#[derive(Debug)]
pub struct Server {
    socket: PathBuf,
    policy: Arc<Policy>,
    shutdown: Shutdown,
    routes: Routes,
    names: Vec<&'static str>,
}

impl Server {
    pub(crate) fn new(daemon: &Daemon) -> Self {
        Self {
            socket: crate::socket(&daemon.run_dir, daemon.service.name),
            policy: Arc::clone(&daemon.policy),
            shutdown: daemon.shutdown(),
            routes: Routes::default(),
            names: Vec::new(),
        }
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

    /// Serves until the process is to stop, then drains.
    ///
    /// # Errors
    ///
    /// When the socket cannot be had.
    pub async fn serve(mut self) -> anyhow::Result<()> {
        let listener = uds::bind(&self.socket)?;
        let (health, health_service) = tonic_health::server::health_reporter();
        for name in &self.names {
            health
                .set_service_status(*name, tonic_health::ServingStatus::Serving)
                .await;
        }
        self.routes = self.routes.add_service(health_service);
        self.routes = reflect(self.routes, &self.names)?;
        tracing::info!(socket = %self.socket.display(), "Serving");
        let serving = tonic::transport::Server::builder()
            .max_concurrent_streams(STREAMS)
            .layer(Gate)
            .add_routes(self.routes)
            .serve_with_incoming_shutdown(
                incoming(listener, self.policy),
                self.shutdown.clone().requested(),
            );
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

/// Both versions of reflection: clients of today ask v1, older ones v1alpha.
fn reflect(routes: Routes, names: &[&str]) -> anyhow::Result<Routes> {
    let always = [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    ];
    let builder = || {
        let names = names.iter().copied().chain(always);
        names.fold(
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(inpod_proto::DESCRIPTORS)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(
                    tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
                ),
            |builder, name| builder.with_service_name(name),
        )
    };
    Ok(routes
        .add_service(builder().build_v1()?)
        .add_service(builder().build_v1alpha()?))
}

/// Connections, each with what is known of its peer. A peer that cannot be seen is let go at once.
fn incoming(
    listener: UnixListener,
    policy: Arc<Policy>,
) -> impl Stream<Item = std::io::Result<Connection>> {
    futures_util::stream::unfold((listener, policy), |(listener, policy)| async move {
        loop {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of descriptors, most likely: some will come back.
                    tracing::error!(%error, "Cannot accept");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            match policy.identify(&stream) {
                Ok(peer) => return Some((Ok(Connection { stream, peer }), (listener, policy))),
                Err(refused) => tracing::warn!(error = %refused, "Refused a connection"),
            }
        }
    })
}

/// A connection whose peer is known.
#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    peer: Peer,
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Lets a call through to its handler if its peer may make it, in a span that names it.
#[derive(Clone, Copy, Debug)]
struct Gate;

impl<S> Layer<S> for Gate {
    type Service = Gated<S>;

    fn layer(&self, inner: S) -> Gated<S> {
        Gated(inner)
    }
}

#[derive(Clone, Debug)]
struct Gated<S>(S);

impl<S> Service<http::Request<Body>> for Gated<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let path = request.uri().path().to_owned();
        let peer = request
            .extensions()
            .get::<Peer>()
            .copied()
            .unwrap_or(NOBODY);
        let traceparent = request
            .headers()
            .get("traceparent")
            .and_then(|value| value.to_str().ok());
        let span = tracing::info_span!("call", method = path, traceparent);
        let admitted = span.in_scope(|| admit(peer, &path));
        match admitted {
            Ok(()) => Box::pin(self.0.call(request).instrument(span)),
            Err(status) => Box::pin(async move { Ok(status.into_http()) }),
        }
    }
}

fn admit(peer: Peer, path: &str) -> Result<(), tonic::Status> {
    match class_of(path) {
        Some(class) => peer.require(class),
        None => {
            let failure = Failure::new(Reason::InvalidField, format!("there is no call {path}"));
            Err(tonic::Status::unimplemented(failure.to_string()))
        }
    }
}
