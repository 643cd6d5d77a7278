use std::{net::SocketAddr, path::PathBuf, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    sync::watch,
    task::JoinHandle,
    time::timeout,
};
use tonic::{Code, Status};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use super::{incoming::PREFACE_TIMEOUT, *};
use crate::{
    Metrics, Readiness, Service as Description, Shutdown,
    endpoint::tests::{own_address, send},
    log,
    peer::Policy,
};

struct Running {
    dir: tempfile::TempDir,
    daemon: Daemon,
    stop: watch::Sender<bool>,
    served: JoinHandle<anyhow::Result<()>>,
}

const NAME: &str = "netconfig";

async fn start() -> Running {
    start_with(None, 4).await
}

async fn start_with(health_address: Option<SocketAddr>, max_calls: usize) -> Running {
    let dir = tempfile::tempdir().unwrap();
    let (stop, shutdown) = Shutdown::manual();
    let service = Description {
        name: NAME,
        about: "",
        version: "1.2.3",
        keys: &[],
    };
    let readiness = Readiness::default();
    readiness.require("kernel", "not looked at yet");
    let daemon = Daemon {
        stop: watch::Sender::default(),
        service,
        instance_id: "run-1".into(),
        run_dir: dir.path().to_owned(),
        policy: Arc::new(Policy::same_uid()),
        shutdown,
        metrics: Metrics::new(&service, &readiness),
        readiness,
        log_levels: log::Levels::new(tracing::Level::INFO).0,
        max_calls,
        health_address,
        removes_state: Arc::default(),
        _instance_lock: Arc::new(uds::lock_instance(dir.path()).unwrap()),
    };
    let served = tokio::spawn(daemon.server().serve());
    let socket = crate::socket(dir.path(), NAME);
    for _ in 0..500 {
        if UnixStream::connect(&socket).await.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Running {
        dir,
        daemon,
        stop,
        served,
    }
}

impl Running {
    fn socket(&self) -> PathBuf {
        crate::socket(self.dir.path(), NAME)
    }

    async fn health(&self, service: &str) -> Result<ServingStatus, Status> {
        let mut client = HealthClient::new(self.daemon.channel(NAME));
        let service = service.to_owned();
        let answer = client.check(HealthCheckRequest { service }).await?;
        Ok(answer.into_inner().status())
    }

    async fn plain(&self, question: &str) -> String {
        let mut stream = UnixStream::connect(self.socket()).await.unwrap();
        stream.write_all(question.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }
}

#[tokio::test]
async fn health_follows_readiness_and_liveness_does_not() {
    let running = start().await;
    assert_eq!(running.health("").await.unwrap(), ServingStatus::NotServing);
    assert_eq!(running.health(LIVE).await.unwrap(), ServingStatus::Serving);
    running.daemon.readiness().set("kernel", Ok(()));
    assert_eq!(running.health("").await.unwrap(), ServingStatus::Serving);
    running.daemon.readiness().set("kernel", Err("gone".into()));
    assert_eq!(running.health("").await.unwrap(), ServingStatus::NotServing);
    let unknown = running.health("nobody").await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
}

async fn until_reported(conditions: &Readiness) {
    while !conditions.all().contains_key("health-address") {
        tokio::task::yield_now().await;
    }
}

/// Sends a probe and returns the HTTP status and the body.
async fn probe(address: SocketAddr, path: &str) -> (u16, String) {
    let answer = send(address, &format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

#[tokio::test]
async fn a_probe_by_http_is_answered_like_the_health_service_with_the_reasons() {
    let address = own_address(10);
    let running = start_with(Some(address), 4).await;
    let (conditions, ok) = (running.daemon.readiness(), (200, "ok\n".to_owned()));
    until_reported(conditions).await;
    let reasons = "kernel: not looked at yet\n".to_owned();
    assert_eq!(probe(address, "/readyz").await, (503, reasons));
    assert_eq!(probe(address, "/livez").await, ok);
    conditions.set("kernel", Ok(()));
    conditions.set("ztunnel", Err("not required".to_owned()));
    assert_eq!(probe(address, "/readyz").await, ok);
    assert_eq!(probe(address, "/metrics").await.0, 404);

    running.stop.send_replace(true);
    let reasons = "shutdown: draining\n".to_owned();
    assert_eq!(probe(address, "/readyz").await, (503, reasons));
    assert_eq!(
        probe(address, "/livez").await,
        ok,
        "a drain is no reason to kill"
    );
}

#[tokio::test]
async fn a_health_port_that_is_taken_keeps_no_call_from_being_answered() {
    let address = own_address(11);
    let _squatter = std::net::TcpListener::bind(address).unwrap();
    let running = start_with(Some(address), 4).await;
    let conditions = running.daemon.readiness();
    until_reported(conditions).await;
    let condition = conditions.all()["health-address"].clone();
    for part in [&address.to_string(), "health_address", "healthPort"] {
        assert!(condition.message.contains(part), "{}", condition.message);
    }
    conditions.set("kernel", Ok(()));
    assert_eq!(running.health("").await.unwrap(), ServingStatus::Serving);
}

#[tokio::test]
async fn a_watcher_of_health_sees_the_drain_and_does_not_hold_it_up() {
    let running = start().await;
    running.daemon.readiness().set("kernel", Ok(()));
    let mut client = HealthClient::new(running.daemon.channel(NAME));
    let request = HealthCheckRequest::default();
    let mut stream = client.watch(request).await.unwrap().into_inner();
    let first = stream.message().await.unwrap().unwrap();
    assert_eq!(first.status(), ServingStatus::Serving);
    running.stop.send_replace(true);
    let last = stream.message().await.unwrap().unwrap();
    assert_eq!(last.status(), ServingStatus::NotServing);
    assert!(stream.message().await.unwrap().is_none());
    drop(client);
    let drained = timeout(DRAIN_TIMEOUT / 2, running.served).await;
    drained.unwrap().unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_connection_without_a_complete_preface_is_closed() {
    let running = start().await;
    let mut client = HealthClient::new(running.daemon.channel(NAME));
    let request = HealthCheckRequest::default();
    let mut watch = client.watch(request).await.unwrap().into_inner();
    let first = watch.message().await.unwrap().unwrap();
    assert_eq!(first.status(), ServingStatus::NotServing);
    for sent in ["", "PRI * HTTP/2.0\r\n", "GET /metrics HTTP/1.1\r\n"] {
        let mut stream = UnixStream::connect(running.socket()).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        let end = timeout(2 * PREFACE_TIMEOUT, stream.read(&mut [0])).await;
        assert!(matches!(end, Ok(Ok(0) | Err(_))), "{sent:?}: {end:?}");
    }
    // The connection of the watch has sent the preface, and has been silent for longer than the others.
    running.daemon.readiness().set("kernel", Ok(()));
    let next = watch.message().await.unwrap().unwrap();
    assert_eq!(next.status(), ServingStatus::Serving);
}

#[tokio::test]
async fn a_call_waits_for_no_others_of_its_connection_while_they_are_within_the_limit() {
    // hyper allows 200 streams by default.
    let max_calls = 250;
    let running = start_with(None, max_calls).await;
    let client = HealthClient::new(running.daemon.channel(NAME));
    let mut open = Vec::new();
    for _ in 0..max_calls {
        let request = HealthCheckRequest::default();
        let watch = async { client.clone().watch(request).await.unwrap() };
        open.push(
            timeout(Duration::from_secs(20), watch)
                .await
                .expect("it waits"),
        );
    }
    let request = HealthCheckRequest::default();
    let answer = async { client.clone().check(request).await.unwrap() };
    timeout(Duration::from_secs(20), answer)
        .await
        .expect("it waits");
}

#[tokio::test]
async fn metrics_are_read_in_plain_http_and_over_http_2() {
    let running = start().await;
    let request = "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let plain = running.plain(request).await;
    assert!(plain.starts_with("HTTP/1.1 200 OK\r\n"), "{plain}");
    assert!(
        plain.contains("content-type: application/openmetrics-text"),
        "{plain}"
    );
    assert!(
        plain.contains("inpod_netconfig_build_info{version=\"1.2.3\"} 1"),
        "{plain}"
    );
    let fetched = crate::metrics::fetch(&running.socket()).await.unwrap();
    assert!(fetched.ends_with("# EOF\n"), "{fetched}");
    assert!(!fetched.contains("/metrics"), "a scrape is no gRPC call");
}

#[tokio::test]
async fn what_else_is_asked_in_plain_http_is_refused() {
    let running = start().await;
    let end = "HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    let unknown = running.plain(&format!("GET /index.html {end}")).await;
    assert!(unknown.starts_with("HTTP/1.1 404 "), "{unknown}");
    let posted = running.plain(&format!("POST /metrics {end}")).await;
    assert!(posted.starts_with("HTTP/1.1 405 "), "{posted}");
}

#[tokio::test]
async fn a_service_that_is_away_is_an_error_of_the_fetch_with_its_socket() {
    let dir = tempfile::tempdir().unwrap();
    let socket = crate::socket(dir.path(), NAME);
    let error = crate::metrics::fetch(&socket).await.unwrap_err();
    assert!(error.contains("grpc.sock"), "{error}");
}
