//! Serves readiness and liveness over HTTP for the kubelet, because a probe that runs a program costs over a hundred
//! times as much.

use std::{convert::Infallible, net::SocketAddr};

use http::{Response, StatusCode};
use http_body_util::Full;
use hyper::body::Bytes;

use crate::{
    Readiness, Shutdown,
    endpoint::{Endpoint, Handler, response},
};

/// Serves `/livez` and `/readyz`, with the meaning of [`super::LIVE`] and of the empty name.
#[derive(Clone, Debug)]
pub(super) struct Probes {
    pub(super) readiness: Readiness,
    pub(super) shutdown: Shutdown,
}

impl Probes {
    /// Serves until the process ends.
    pub(super) async fn serve(self, address: SocketAddr) -> Infallible {
        let endpoint = Endpoint {
            address,
            content: "health",
            condition: "health-address",
            remedy: "HTTP probes of this service fail: free the port, or change health_address \
                     (healthPort in the chart)",
        };
        endpoint.serve(&self.readiness.clone(), self).await
    }

    /// Returns a line for each reason, or an empty text if the service is ready.
    fn reasons(&self) -> String {
        let mut reasons = self.readiness.unmet();
        if self.shutdown.is_requested() {
            reasons.push_str("shutdown: draining\n");
        }
        reasons
    }
}

impl Handler for Probes {
    async fn get(&self, path: &str) -> Option<Response<Full<Bytes>>> {
        let reasons = match path {
            "/livez" => String::new(),
            "/readyz" => self.reasons(),
            _ => return None,
        };
        let (status, body) = if reasons.is_empty() {
            (StatusCode::OK, "ok\n".to_owned())
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, reasons)
        };
        Some(response(status, "text/plain; charset=utf-8", body))
    }
}
