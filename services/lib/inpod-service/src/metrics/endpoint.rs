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

/// As many scrapes are answered at once; further ones wait to be accepted.
const SCRAPES: usize = 4;

/// How long a client may take to ask.
const ASK: Duration = Duration::from_secs(2);

/// How long a connection may last: one question and its answer.
const LAST: Duration = Duration::from_secs(10);

/// How soon a port that is taken is tried again.
const AGAIN: Duration = Duration::from_secs(5);

/// The condition that tells whether the port is served.
const CONDITION: &str = "metrics-address";

/// Answers `GET /metrics` with what `text` gives, for ever.
///
/// A port that cannot be had is told by the condition `metrics-address` and tried again: metrics are no reason not to
/// start pods.
pub async fn serve<F>(address: SocketAddr, readiness: Readiness, text: F) -> Infallible
where
    F: RenderMetrics,
{
    let listener = listen(address, &readiness).await;
    tracing::info!(%address, "Serving metrics");
    let places = Arc::new(Semaphore::new(SCRAPES));
    loop {
        // Never closed, hence never an error.
        let place = Arc::clone(&places).acquire_owned().await;
        match listener.accept().await {
            Ok((stream, _)) => {
                let text = text.clone();
                tokio::spawn(async move {
                    // A client that hangs or breaks off is its own affair.
                    drop(timeout(LAST, answer(stream, text)).await);
                    drop(place);
                });
            }
            Err(error) => {
                tracing::error!(%error, "Cannot accept a scrape");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Makes the text of a scrape.
pub trait RenderMetrics: Clone + Send + Sync + 'static {
    /// The text, in the OpenMetrics format.
    fn text(&self) -> impl Future<Output = String> + Send;
}

async fn listen(address: SocketAddr, readiness: &Readiness) -> TcpListener {
    let mut told = false;
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
                if !std::mem::replace(&mut told, true) {
                    tracing::error!(error = message, "Metrics are not served; trying again");
                }
                readiness.set(CONDITION, Err(message));
                sleep(AGAIN).await;
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
        .header_read_timeout(ASK)
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
