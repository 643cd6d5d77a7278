use http::{HeaderValue, Method, StatusCode, header};
use tonic::body::Body;

use super::{Answer, Call, Next, Step, pass};
use crate::metrics::{self, Metrics};

/// Answers `GET /metrics`.
#[derive(Clone, Debug)]
pub(in crate::grpc) struct Scrape(pub(super) Metrics);

impl Step for Scrape {
    async fn take<N: Next>(self, call: Call, next: N) -> Answer {
        if call.uri().path() != metrics::PATH {
            return pass(next, call).await;
        }
        if call.method() != Method::GET {
            let mut answer = Answer::new(Body::empty());
            *answer.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
            return answer;
        }
        let mut answer = Answer::new(Body::new(http_body_util::Full::from(self.0.text())));
        let media_type = HeaderValue::from_static(metrics::CONTENT_TYPE);
        answer
            .headers_mut()
            .insert(header::CONTENT_TYPE, media_type);
        answer
    }
}
