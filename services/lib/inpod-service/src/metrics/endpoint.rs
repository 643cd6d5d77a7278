//! Metrics on a TCP port, for Prometheus.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{
    body::{Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};

use super::{CONTENT_TYPE, PATH};
use crate::Readiness;

/// The limit, beyond which connections wait.
const MAX_CONCURRENT_SCRAPES: usize = 4;

/// The time for a client to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// The lifetime: one request and its response.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

const BIND_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The condition for a served port.
const CONDITION: &str = "metrics-address";

/// Serves `GET /metrics` forever.
///
/// If the port cannot be bound, the condition `metrics-address` reports it and the bind is retried: missing metrics
/// must not keep pods from starting.
pub async fn serve<F>(address: SocketAddr, readiness: Readiness, text: F) -> Infallible
where
    F: RenderMetrics,
{
    let listener = listen(address, &readiness).await;
    tracing::info!(%address, "Serving metrics");
    let permits = Arc::new(Semaphore::new(MAX_CONCURRENT_SCRAPES));
    loop {
        // The semaphore is never closed.
        let permit = Arc::clone(&permits).acquire_owned().await;
        match listener.accept().await {
            Ok((stream, _)) => {
                let text = text.clone();
                tokio::spawn(async move {
                    // A client that hangs affects only itself.
                    drop(timeout(CONNECTION_TIMEOUT, answer(stream, text)).await);
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::error!(%error, "Cannot accept a scrape");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Renders the text of scrapes.
pub trait RenderMetrics: Clone + Send + Sync + 'static {
    /// Returns text in OpenMetrics format.
    fn text(&self) -> impl Future<Output = String> + Send;
}

async fn listen(address: SocketAddr, readiness: &Readiness) -> TcpListener {
    let mut logged = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                readiness.set(CONDITION, Ok(()));
                return listener;
            }
            Err(error) => {
                let message = format!(
                    "cannot serve metrics on {address}: {error}; free the port or change metrics_address"
                );
                if !std::mem::replace(&mut logged, true) {
                    tracing::error!(error = message, "Cannot serve metrics; retrying");
                }
                readiness.set(CONDITION, Err(message));
                sleep(BIND_RETRY_INTERVAL).await;
            }
        }
    }
}

async fn answer(stream: TcpStream, text: impl RenderMetrics) -> Result<(), hyper::Error> {
    let service = service_fn(move |request: Request<Incoming>| {
        let text = text.clone();
        async move { Ok::<_, Infallible>(respond(&request, &text).await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIMEOUT)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

async fn respond(request: &Request<Incoming>, text: &impl RenderMetrics) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::default());
    if request.uri().path() != PATH {
        *response.status_mut() = StatusCode::NOT_FOUND;
    } else if request.method() != Method::GET {
        *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
    } else {
        *response.body_mut() = Full::from(text.text().await);
        let media_type = HeaderValue::from_static(CONTENT_TYPE);
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, media_type);
    }
    response
}
