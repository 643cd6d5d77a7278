use std::fs;

use inpod_service::Readiness;
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::watch,
};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig, RootCertStore,
        pki_types::{CertificateDer, ServerName, pem::PemObject as _},
    },
};

use super::*;
use crate::reload;

const MAX_REVIEWS: usize = 4;

/// The slow clients could keep other reviews waiting until the deadline of the server.
const DEADLINE_SECONDS: u16 = 60;

/// The deadline of the reviews that must not wait.
const TIMEOUT_SECONDS: u16 = 25;

/// A server that runs until the end of the test.
struct Running {
    address: SocketAddr,
    connector: TlsConnector,
    _dir: tempfile::TempDir,
    _stop: watch::Sender<bool>,
}

async fn start() -> Running {
    let dir = tempfile::tempdir().unwrap();
    let key = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    fs::write(dir.path().join("tls.crt"), key.cert.pem()).unwrap();
    fs::write(dir.path().join("tls.key"), key.signing_key.serialize_pem()).unwrap();
    let config = json!({
        "listen_address": "127.0.0.1:0",
        "tls_dir": dir.path(),
        "config_file": dir.path().join("inject.yaml"),
        "deadline_seconds": DEADLINE_SECONDS,
        "max_reviews": MAX_REVIEWS,
        "metrics_address": "",
    });
    let config: Config = serde_json::from_value(config).unwrap();
    let metrics = Metrics::register(&mut Registry::default());
    let current = Arc::<Current>::default();
    tokio::spawn(reload::poll(
        config.clone(),
        Arc::clone(&current),
        Readiness::default(),
        metrics.clone(),
    ));
    while current.injector().is_none() || !current.certificate.is_loaded() {
        tokio::task::yield_now().await;
    }
    let server = Server::new(&config, current, metrics).unwrap();
    let listener = listen(config.listen_address).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, shutdown) = Shutdown::manual();
    tokio::spawn(server.serve(listener, shutdown));
    let mut roots = RootCertStore::empty();
    let pem = key.cert.pem();
    roots
        .add(CertificateDer::from_pem_slice(pem.as_bytes()).unwrap())
        .unwrap();
    let tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let tls = tls.with_safe_default_protocol_versions().unwrap();
    let tls = tls.with_root_certificates(roots).with_no_client_auth();
    Running {
        address,
        connector: TlsConnector::from(Arc::new(tls)),
        _dir: dir,
        _stop: stop,
    }
}

impl Running {
    /// Sends a request that announces a body, of which the request may contain only the start.
    async fn send(&self, path: &str, announced: usize, body: &[u8]) -> TlsStream<TcpStream> {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let mut stream = self.connector.connect(name, stream).await.unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             connection: close\r\ncontent-length: {announced}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(body).await.unwrap();
        stream.flush().await.unwrap();
        stream
    }

    /// Sends a review of 200 KB, and returns the response.
    async fn review_large_pod(&self) -> String {
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "web", "annotations": {"large": "x".repeat(200_000)}},
            "spec": {"containers": [{"name": "app", "image": "a"}]},
        });
        let body = json!({
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {"uid": "u-1", "resource": {"group": "", "version": "v1", "resource": "pods"}, "namespace": "shop", "operation": "CREATE", "object": pod},
        });
        let (body, path) = (
            body.to_string(),
            format!("/inject?timeout={TIMEOUT_SECONDS}s"),
        );
        let mut stream = self.send(&path, body.len(), body.as_bytes()).await;
        let mut response = Vec::new();
        // The server closes the connection without close_notify.
        drop(stream.read_to_end(&mut response).await);
        String::from_utf8(response).unwrap()
    }
}

fn assert_injected(response: &str) {
    let start: String = response.chars().take(300).collect();
    assert!(
        response.starts_with("HTTP/1.1 200 ") && response.contains("JSONPatch"),
        "{start}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn announced_large_bodies_do_not_delay_a_large_review() {
    let running = start().await;
    let mut slow = Vec::new();
    for _ in 0..400 {
        slow.push(running.send("/inject", 100_000, b"{").await);
    }
    for _ in 0..3 {
        assert_injected(&running.review_large_pod().await);
    }
    drop(slow);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_large_body_loses_its_place_to_the_next_review() {
    let running = start().await;
    let mut stalled = Vec::new();
    for _ in 0..MAX_REVIEWS {
        stalled.push(running.send("/inject", 100_000, &[b' '; 80_000]).await);
    }
    assert_injected(&running.review_large_pod().await);
    for mut stream in stalled {
        let mut response = Vec::new();
        drop(stream.read_to_end(&mut response).await);
        let response = String::from_utf8(response).unwrap();
        assert!(response.starts_with("HTTP/1.1 408 "), "{response}");
        assert!(response.ends_with("too slowly"), "{response}");
    }
}
