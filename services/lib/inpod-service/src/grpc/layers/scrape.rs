use http::{HeaderValue, Method, StatusCode, header};
use tonic::body::Body;

use super::{Next, Request, Response, Step, call_next};
use crate::metrics::{self, Metrics};

/// A layer that answers `GET /metrics` before any limit applies.
#[derive(Clone, Debug)]
pub(in crate::grpc) struct Scrape(pub(super) Metrics);

impl Step for Scrape {
    async fn handle<N: Next>(self, call: Request, next: N) -> Response {
        if call.uri().path() != metrics::PATH {
            return call_next(next, call).await;
        }
        if call.method() != Method::GET {
            let mut answer = Response::new(Body::empty());
            *answer.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
            return answer;
        }
        let mut answer = Response::new(Body::new(http_body_util::Full::from(self.0.text())));
        let media_type = HeaderValue::from_static(metrics::CONTENT_TYPE);
        answer
            .headers_mut()
            .insert(header::CONTENT_TYPE, media_type);
        answer
    }
}
