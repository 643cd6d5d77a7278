//! Serves metrics on a TCP port, for Prometheus.

use std::{convert::Infallible, net::SocketAddr};

use http::{Response, StatusCode};
use http_body_util::Full;
use hyper::body::Bytes;

use super::{CONTENT_TYPE, PATH};
use crate::{
    Readiness,
    endpoint::{Endpoint, Handler, response},
};

/// Renders the metrics for each scrape.
pub trait RenderMetrics: Clone + Send + Sync + 'static {
    /// Returns all metrics as text in OpenMetrics format.
    fn text(&self) -> impl Future<Output = String> + Send;
}

/// Serves `GET /metrics` forever; the condition `metrics-address` reports a port that cannot be bound.
pub async fn serve<F>(address: SocketAddr, readiness: Readiness, text: F) -> Infallible
where
    F: RenderMetrics,
{
    let endpoint = Endpoint {
        address,
        content: "metrics",
        condition: "metrics-address",
        remedy: "free the port or change metrics_address",
    };
    endpoint.serve(&readiness, Scrapes(text)).await
}

#[derive(Clone)]
struct Scrapes<F>(F);

impl<F: RenderMetrics> Handler for Scrapes<F> {
    async fn get(&self, path: &str) -> Option<Response<Full<Bytes>>> {
        if path != PATH {
            return None;
        }
        Some(response(StatusCode::OK, CONTENT_TYPE, self.0.text().await))
    }
}
