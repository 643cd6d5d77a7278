//! The plugin's HTTP/2 against servers that answer in ways that tonic's does not.

use std::{io::Write as _, os::unix::net::UnixListener, thread};

use h2::{Reason, server::SendResponse};
use serde_json::json;
use tonic::codegen::{Bytes, http};

use crate::{
    fake_agent::{FakeAgent, Question, Script},
    node::{Node, Run, TIMEOUT},
    recorded::Recorded,
};

type Answer = SendResponse<Bytes>;

/// Runs a CHECK against a server that answers it with `handle`.
fn check(handle: impl FnOnce(Answer) + Send + 'static) -> Run {
    let node = Node::new();
    let listener = UnixListener::bind(node.socket()).unwrap();
    let serving = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .unwrap();
        runtime.block_on(async {
            let stream = tokio::net::UnixStream::from_std(stream).unwrap();
            let mut connection = h2::server::handshake(stream).await.unwrap();
            let (_, answer) = connection.accept().await.unwrap().unwrap();
            handle(answer);
            // Until the plugin closes the connection.
            while let Some(Ok(_)) = connection.accept().await {}
        });
    });
    let run = node.run(&Recorded::number("24"));
    serving.join().unwrap();
    run
}

fn head(status: u16) -> http::Response<()> {
    let head = http::Response::builder().status(status);
    head.header("content-type", "application/grpc")
        .body(())
        .unwrap()
}

fn trailers(status: &'static str) -> http::HeaderMap {
    let status = http::HeaderValue::from_static(status);
    http::HeaderMap::from_iter([(http::HeaderName::from_static("grpc-status"), status)])
}

#[test]
fn a_message_in_several_frames_is_read_whole() {
    check(|mut answer| {
        let mut stream = answer.send_response(head(200), false).unwrap();
        // A message of a newer agent: field 15, two bytes.
        for part in [&b"\0\0"[..], b"\0\0\x04", b"\x7a\x02", b"ok"] {
            stream.send_data(Bytes::from_static(part), false).unwrap();
        }
        stream.send_trailers(trailers("0")).unwrap();
    })
    .printed("");
}

#[test]
fn a_status_after_a_message_counts() {
    let run = check(|mut answer| {
        let mut stream = answer.send_response(head(200), false).unwrap();
        let message = Bytes::from_static(b"\0\0\0\0\0");
        stream.send_data(message, false).unwrap();
        stream.send_trailers(trailers("9")).unwrap();
    });
    assert_eq!(run.error_code(), 100);
}

#[test]
fn a_message_that_ends_early_is_an_error() {
    let run = check(|mut answer| {
        let mut stream = answer.send_response(head(200), false).unwrap();
        let message = Bytes::from_static(b"\0\0\0\0\x04ab");
        stream.send_data(message, false).unwrap();
        stream.send_trailers(trailers("0")).unwrap();
    });
    assert_eq!(run.error_code(), 100);
}

#[test]
fn an_answer_of_no_grpc_server_is_11() {
    let run = check(|mut answer| {
        answer.send_response(head(503), true).unwrap();
    });
    assert_eq!(run.error_code(), 11);
}

#[test]
fn a_reset_stream_is_11() {
    let run = check(|mut answer| answer.send_reset(Reason::REFUSED_STREAM));
    assert_eq!(run.error_code(), 11);
}

#[test]
fn a_server_that_goes_away_is_11() {
    let node = Node::new();
    let listener = UnixListener::bind(node.socket()).unwrap();
    let serving = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // SETTINGS, and GOAWAY that has seen no stream.
        let frames = b"\0\0\0\x04\0\0\0\0\0\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\0";
        stream.write_all(frames).unwrap();
        stream
    });
    let run = node.run(&Recorded::number("24"));
    drop(serving.join().unwrap());
    assert_eq!(run.error_code(), 11);
    let error = run.error();
    assert!(
        error["msg"]
            .as_str()
            .unwrap()
            .contains("closed the connection"),
        "{error}"
    );
}

/// Returns a GC whose request fills the windows of HTTP/2 and the socket's buffer several times.
fn large_gc() -> Recorded {
    let valid: Vec<_> = (0..15_000)
        .map(|n| json!({"containerID": format!("container-{n}"), "ifname": "eth0"}))
        .collect();
    let stdin = json!({
        "cniVersion": "1.1.0",
        "name": "net",
        "type": "inpod-cni",
        "cni.dev/valid-attachments": valid,
    });
    Recorded {
        stdin: stdin.to_string(),
        ..Recorded::number("24")
    }
    .with_var("CNI_COMMAND", "GC")
}

#[test]
fn a_request_larger_than_every_buffer_arrives_whole() {
    let node = Node::new();
    let agent = FakeAgent::on(&node, Script::Accept);
    node.run(&large_gc()).printed("");
    let (Question::Collect(request), _) = agent.only() else {
        panic!("another question");
    };
    assert_eq!(request.valid_attachments.len(), 15_000);
}

#[test]
fn a_server_that_never_reads_is_11_within_the_deadline() {
    let node = Node::new().with(r#""timeoutSeconds":1"#);
    let _listener = UnixListener::bind(node.socket()).unwrap();
    for call in [Recorded::number("24"), large_gc()] {
        let run = node.run(&call);
        assert_eq!(run.error_code(), 11);
        assert!(run.took < TIMEOUT, "{run:?}");
    }
}
