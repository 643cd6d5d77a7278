use http::StatusCode;
use inpod_proto::{Class, class_of};
use inpod_types::{Failure, Reason};
use tonic::Status;

use super::{Request, Response};
use crate::{
    metrics::{self, Calls},
    peer::{Peer, UNKNOWN_PEER},
};

/// Returns the response to a caller without the right for the call's class, and logs and counts the rejection.
pub(super) fn refuse(calls: &Calls, call: &Request) -> Option<Response> {
    let peer = call.extensions().get::<Peer>().unwrap_or(&UNKNOWN_PEER);
    let path = call.uri().path();
    let Some(class) = class(path) else {
        let failure = Failure::new(Reason::InvalidField, format!("there is no call {path}"));
        let status = Status::unimplemented(failure.to_string());
        return Some(refusal(status, StatusCode::NOT_FOUND, call));
    };
    if let Err(status) = peer.require(class, path) {
        calls.refuse_call(name_of(class));
        return Some(refusal(status, StatusCode::FORBIDDEN, call));
    }
    if class == Class::Operator {
        tracing::info!(uid = peer.uid, pid = peer.pid, path, "An operator calls");
    }
    None
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
fn refusal(status: Status, plain: StatusCode, call: &Request) -> Response {
    let mut answer = status.into_http();
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
