//! Tests the layers in order, in front of fake handlers; `grpc/tests.rs` uses a real socket.

use std::{sync::Arc, time::Duration};

use futures_util::StreamExt as _;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Bytes;
use inpod_proto::{Class, failure_of};
use inpod_types::Reason;
use tokio::sync::{Notify, oneshot};
use tonic::{Code, Status};
use tower::{ServiceBuilder, ServiceExt as _, service_fn};

use super::*;
use crate::{Readiness, Service as Description, peer::Policy};

const LOOK: &str = "/inpod.netconfig.v1.NetconfigService/ListClaims";
const CHANGE: &str = "/inpod.netconfig.v1.NetconfigService/ApplyRules";

fn metrics() -> Metrics {
    let service = Description {
        name: "netconfig",
        about: "",
        version: "0",
        keys: &[],
    };
    Metrics::new(&service, &Readiness::default())
}

fn call(path: &str) -> Request {
    let (left, _right) = std::os::unix::net::UnixStream::pair().unwrap();
    let peer = Policy::same_uid().identify(&left).unwrap();
    http::Request::post(path)
        .header("content-type", "application/grpc")
        .extension(peer)
        .body(Body::empty())
        .unwrap()
}

fn unproven(path: &str) -> Request {
    let mut call = call(path);
    call.extensions_mut().clear();
    call
}

fn hurried(path: &str, timeout: &'static str) -> Request {
    let mut call = call(path);
    let timeout = http::HeaderValue::from_static(timeout);
    call.headers_mut().insert("grpc-timeout", timeout);
    call
}

/// Returns a response with the status code in the trailers.
fn success() -> Response {
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
    let body = http_body_util::Full::from("answer").with_trailers(async { Some(Ok(trailers)) });
    Response::new(Body::new(body))
}

/// Returns a handler that waits for the notification, then succeeds.
fn waiting(go_on: &Arc<Notify>) -> impl Next {
    let go_on = Arc::clone(go_on);
    service_fn(move |_: Request| {
        let go_on = Arc::clone(&go_on);
        async move {
            go_on.notified().await;
            Ok::<_, Infallible>(success())
        }
    })
}

fn ready() -> impl Next {
    service_fn(|_: Request| async { Ok::<_, Infallible>(success()) })
}

async fn status(answer: Response) -> Status {
    if let Some(status) = Status::from_header_map(answer.headers()) {
        return status;
    }
    let collected = answer.into_body().collect().await.unwrap();
    Status::from_header_map(collected.trailers().unwrap()).unwrap()
}

fn counted(metrics: &Metrics, method: &str, code: &str) -> bool {
    let line = format!("grpc_requests_total{{method=\"{method}\",code=\"{code}\"}} 1\n");
    metrics.text().contains(&line)
}

#[tokio::test]
async fn success_is_counted_from_the_trailers_and_once_the_body_was_read() {
    let metrics = metrics();
    let server = ServiceBuilder::new()
        .layer(stack(&metrics, 9, &[]))
        .service(ready());
    let answer = server.oneshot(call(LOOK)).await.unwrap();
    assert!(!metrics.text().contains("requests_total{"), "not over yet");
    assert_eq!(status(answer).await.code(), Code::Ok);
    assert!(
        counted(&metrics, "NetconfigService/ListClaims", "OK"),
        "{}",
        metrics.text()
    );
    let observed =
        "grpc_request_duration_seconds_count{method=\"NetconfigService/ListClaims\"} 1\n";
    assert!(metrics.text().contains(observed), "{}", metrics.text());
}

#[tokio::test]
async fn an_error_is_counted_from_the_head() {
    let metrics = metrics();
    let fails =
        service_fn(|_: Request| async { Ok::<_, Infallible>(Status::not_found("no").into_http()) });
    let server = ServiceBuilder::new()
        .layer(stack(&metrics, 9, &[]))
        .service(fails);
    let answer = server.oneshot(call(CHANGE)).await.unwrap();
    assert_eq!(status(answer).await.code(), Code::NotFound);
    assert!(
        counted(&metrics, "NetconfigService/ApplyRules", "NOT_FOUND"),
        "{}",
        metrics.text()
    );
}

#[tokio::test]
async fn a_caller_who_goes_away_before_the_answer_or_within_it_is_counted_as_cancelled() {
    let metrics = metrics();
    let never = ServiceBuilder::new()
        .layer(stack(&metrics, 9, &[]))
        .service(waiting(&Arc::default()));
    let gone = tokio::time::timeout(Duration::from_millis(1), never.oneshot(call(CHANGE)));
    assert!(gone.await.is_err());
    assert!(counted(
        &metrics,
        "NetconfigService/ApplyRules",
        "CANCELLED"
    ));
    let server = ServiceBuilder::new()
        .layer(stack(&metrics, 9, &[]))
        .service(ready());
    drop(server.oneshot(call(LOOK)).await.unwrap());
    assert!(counted(
        &metrics,
        "NetconfigService/ListClaims",
        "CANCELLED"
    ));
}

#[tokio::test]
async fn who_may_not_call_is_refused_before_the_handler_and_counted_by_class() {
    let metrics = metrics();
    let server = ServiceBuilder::new()
        .layer(stack(&metrics, 9, &[]))
        .service(ready());
    let refused = status(server.clone().oneshot(unproven(CHANGE)).await.unwrap()).await;
    assert_eq!(failure_of(&refused).reason, Reason::CallerRefused);
    assert_eq!(refused.code(), Code::PermissionDenied);
    let text = metrics.text();
    assert!(
        text.contains("refused_calls_total{class=\"service\"} 1\n"),
        "{text}"
    );
    assert!(counted(
        &metrics,
        "NetconfigService/ApplyRules",
        "PERMISSION_DENIED"
    ));

    let mut plain = unproven(crate::metrics::PATH);
    plain.headers_mut().clear();
    let refused = server.oneshot(plain).await.unwrap();
    assert_eq!(refused.status(), http::StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn a_call_over_the_limit_is_refused_with_details_and_those_of_grpc_and_metrics_are_not() {
    let (metrics, go_on) = (metrics(), Arc::default());
    let server = ServiceBuilder::new()
        .layer(stack(&metrics, 1, &[]))
        .service(waiting(&go_on));
    let (responded, first) = oneshot::channel();
    let held = server.clone();
    tokio::spawn(
        async move { responded.send(status(held.oneshot(call(LOOK)).await.unwrap()).await) },
    );
    while !metrics.text().contains("grpc_in_flight 1\n") {
        tokio::task::yield_now().await;
    }
    let refused = status(server.clone().oneshot(call(LOOK)).await.unwrap()).await;
    assert_eq!(refused.code(), Code::ResourceExhausted);
    let failure = failure_of(&refused);
    assert_eq!(failure.reason, Reason::Overloaded);
    assert_eq!(failure.retry_after, Some(Duration::from_secs(1)));

    let mut scrape = call(crate::metrics::PATH);
    *scrape.method_mut() = http::Method::GET;
    let scraped = server.clone().oneshot(scrape).await.unwrap();
    assert_eq!(scraped.status(), http::StatusCode::OK);
    let check = server.clone().oneshot(call("/grpc.health.v1.Health/Check"));
    go_on.notify_waiters();
    go_on.notify_one();
    assert_eq!(status(check.await.unwrap()).await.code(), Code::Ok);
    assert_eq!(first.await.unwrap().code(), Code::Ok);
    go_on.notify_one();
    let again = status(server.oneshot(call(LOOK)).await.unwrap()).await;
    assert_eq!(again.code(), Code::Ok, "the place is free again");
}

#[tokio::test]
async fn a_lane_that_is_full_takes_no_place_from_the_calls_beside_it() {
    let (metrics, go_on) = (metrics(), Arc::default());
    let server = ServiceBuilder::new()
        .layer(stack(&metrics, 1, &[&[CHANGE]]))
        .service(waiting(&go_on));
    let held = [CHANGE, LOOK].map(|path| tokio::spawn(server.clone().oneshot(call(path))));
    while !metrics.text().contains("grpc_in_flight 2\n") {
        tokio::task::yield_now().await;
    }
    for path in [CHANGE, LOOK] {
        let refused = status(server.clone().oneshot(call(path)).await.unwrap()).await;
        assert_eq!(refused.code(), Code::ResourceExhausted, "{path}");
    }
    go_on.notify_waiters();
    for answer in held {
        let answer = answer.await.unwrap().unwrap();
        assert_eq!(status(answer).await.code(), Code::Ok);
    }
}

/// Returns a call of which only a part of the request ever arrives.
fn incomplete(path: &str) -> Request {
    let begun = futures_util::stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from("part")))]);
    let body = StreamBody::new(begun.chain(futures_util::stream::pending()));
    call(path).map(|_| Body::new(body))
}

#[tokio::test(start_paused = true)]
async fn an_incomplete_request_takes_no_slot_and_ends_after_30_s() {
    let server = ServiceBuilder::new()
        .layer(stack(&metrics(), 1, &[]))
        .service(ready());
    let began = tokio::time::Instant::now();
    let held = tokio::spawn(server.clone().oneshot(incomplete(LOOK)));
    tokio::task::yield_now().await;
    let answer = server.oneshot(call(LOOK)).await.unwrap();
    assert_eq!(status(answer).await.code(), Code::Ok);
    let ended = status(held.await.unwrap().unwrap()).await;
    assert_eq!(began.elapsed(), Duration::from_secs(30));
    assert_eq!(failure_of(&ended).reason, Reason::DeadlineExceeded);
}

#[tokio::test(start_paused = true)]
async fn the_oldest_incomplete_request_gives_way_to_its_own_kind() {
    let server = ServiceBuilder::new()
        .layer(stack(&metrics(), 1, &[]))
        .service(ready());
    let start = |path| tokio::spawn(server.clone().oneshot(incomplete(path)));
    let of_service = start(CHANGE);
    // 16 MiB in requests of 64 KiB.
    let mut held: Vec<_> = (0..256).map(|_| start(LOOK)).collect();
    tokio::task::yield_now().await;
    assert!(held.iter().all(|call| !call.is_finished()));
    held.push(start(LOOK));
    let oldest = status(held.remove(0).await.unwrap().unwrap()).await;
    assert_eq!(failure_of(&oldest).reason, Reason::Overloaded);
    assert!(held.iter().all(|call| !call.is_finished()));
    assert!(!of_service.is_finished());
}

#[tokio::test]
async fn a_request_above_the_maximum_is_refused() {
    let server = ServiceBuilder::new()
        .layer(stack(&metrics(), 1, &[]))
        .service(ready());
    let sized = |bytes| call(LOOK).map(|_| Body::new(http_body_util::Full::from(vec![0; bytes])));
    let answer = server.clone().oneshot(sized(64 << 10)).await.unwrap();
    assert_eq!(status(answer).await.code(), Code::Ok);
    let refused = status(server.oneshot(sized((64 << 10) + 1)).await.unwrap()).await;
    assert_eq!(refused.code(), Code::OutOfRange);
    assert!(refused.message().contains("65536"), "{refused}");
}

#[tokio::test]
async fn unread_responses_are_limited_apart_from_services() {
    let server = ServiceBuilder::new()
        .layer(stack(&metrics(), 1000, &[]))
        .service(ready());
    let call = async |path| server.clone().oneshot(call(path)).await.unwrap();
    let mut unread = Vec::new();
    for _ in 0..256 {
        unread.push(call(LOOK).await);
    }
    let refused = status(call(LOOK).await).await;
    assert_eq!(failure_of(&refused).reason, Reason::Overloaded);
    for path in [CHANGE, "/grpc.health.v1.Health/Check"] {
        assert_eq!(status(call(path).await).await.code(), Code::Ok, "{path}");
    }
    drop(unread.pop());
    assert_eq!(status(call(LOOK).await).await.code(), Code::Ok);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_is_late_is_answered_for_with_details_before_the_callers_time_is_over() {
    let metrics = metrics();
    let server = ServiceBuilder::new()
        .layer(stack(&metrics, 1, &[]))
        .service(waiting(&Arc::default()));
    let began = tokio::time::Instant::now();
    let late = status(server.oneshot(hurried(CHANGE, "2S")).await.unwrap()).await;
    assert_eq!(began.elapsed(), Duration::from_millis(1900));
    assert_eq!(late.code(), Code::DeadlineExceeded);
    let failure = failure_of(&late);
    assert_eq!(failure.reason, Reason::DeadlineExceeded);
    assert!(failure.message.contains("2s"), "{}", failure.message);
    assert!(counted(
        &metrics,
        "NetconfigService/ApplyRules",
        "DEADLINE_EXCEEDED"
    ));
    assert!(
        metrics.text().contains("grpc_in_flight 0\n"),
        "its place is free"
    );
}

#[tokio::test]
async fn a_path_that_nobody_declared_is_told_so_in_the_callers_own_protocol() {
    let metrics = metrics();
    let server = ServiceBuilder::new()
        .layer(stack(&metrics, 9, &[]))
        .service(ready());
    let unknown = server
        .clone()
        .oneshot(call("/evil.Service/Do"))
        .await
        .unwrap();
    assert_eq!(unknown.status(), http::StatusCode::OK);
    assert_eq!(status(unknown).await.code(), Code::Unimplemented);
    let mut plain = call("/index.html");
    plain.headers_mut().clear();
    let unknown = server.oneshot(plain).await.unwrap();
    assert_eq!(unknown.status(), http::StatusCode::NOT_FOUND);
    let text = metrics.text();
    let line = "requests_total{method=\"other\",code=\"UNIMPLEMENTED\"} 2\n";
    assert!(text.contains(line), "{text}");
}

#[test]
fn metrics_are_of_the_class_of_looks() {
    assert_eq!(authorize::class(crate::metrics::PATH), Some(Class::Read));
}
