use http::StatusCode;
use inpod_proto::{Class, class_of};
use inpod_types::{Failure, Reason};
use tonic::Status;

use super::{Next, Request, Response, Step, call_next};
use crate::{
    metrics::{self, Calls},
    peer::{Peer, UNKNOWN_PEER},
};

/// A layer that rejects callers without the right for a call's class, and logs and counts rejections.
#[derive(Clone, Debug)]
pub(in crate::grpc) struct Authorize(pub(super) Calls);

impl Step for Authorize {
    async fn handle<N: Next>(self, call: Request, next: N) -> Response {
        let peer = call.extensions().get::<Peer>().unwrap_or(&UNKNOWN_PEER);
        let path = call.uri().path();
        let Some(class) = class(path) else {
            let failure = Failure::new(Reason::InvalidField, format!("there is no call {path}"));
            let status = Status::unimplemented(failure.to_string());
            return refusal(&status, StatusCode::NOT_FOUND, &call);
        };
        if let Err(status) = peer.require(class, path) {
            self.0.refuse_call(name_of(class));
            return refusal(&status, StatusCode::FORBIDDEN, &call);
        }
        if class == Class::Operator {
            tracing::info!(uid = peer.uid, pid = peer.pid, path, "An operator calls");
        }
        call_next(next, call).await
    }
}

pub(super) fn class(path: &str) -> Option<Class> {
    if path == metrics::PATH {
        Some(Class::Read)
    } else {
        class_of(path)
    }
}

fn name_of(class: Class) -> &'static str {
    match class {
        Class::Read => "read",
        Class::Cni => "cni",
        Class::Operator => "operator",
        Class::Service => "service",
    }
}

/// Builds a rejection for both kinds of clients. gRPC clients read the status from its header and take any HTTP status
/// but 200 for a broken proxy, while plain HTTP clients read the HTTP status.
fn refusal(status: &Status, plain: StatusCode, call: &Request) -> Response {
    let mut answer = status.clone().into_http();
    let is_grpc = |value: &http::HeaderValue| value.as_bytes().starts_with(b"application/grpc");
    if !call
        .headers()
        .get(http::header::CONTENT_TYPE)
        .is_some_and(is_grpc)
    {
        *answer.status_mut() = plain;
    }
    answer
}
