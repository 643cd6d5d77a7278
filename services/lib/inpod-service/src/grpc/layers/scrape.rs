use http::{Method, StatusCode};
use tonic::body::Body;

use super::{Request, Response};
use crate::{
    endpoint::response,
    metrics::{CONTENT_TYPE, Metrics},
};

/// Answers `GET /metrics`.
pub(super) fn answer(call: &Request, metrics: &Metrics) -> Response {
    if call.method() == Method::GET {
        return response(StatusCode::OK, CONTENT_TYPE, metrics.text()).map(Body::new);
    }
    let mut answer = Response::new(Body::empty());
    *answer.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
    answer
}
