//! Idle connections do not lock out an API server.

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use serde_json::json;
use tokio_rustls::rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};

use crate::kube::injector::{
    ENABLED, containers,
    webhook::{Webhook, pod},
};

/// The limit of the injector.
const MAX_CONNECTIONS: usize = 512;

/// An API server's shortest timeout, far below a connection's idle time.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);

type Connection = StreamOwned<ClientConnection, TcpStream>;

fn trust(webhook: &Webhook) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let authority = webhook.dir.path().join("ca.crt");
    for certificate in CertificateDer::pem_file_iter(authority).unwrap() {
        roots.add(certificate.unwrap()).unwrap();
    }
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_no_client_auth();
    Arc::new(config)
}

fn connected(webhook: &Webhook, trust: &Arc<ClientConfig>) -> Connection {
    let url = webhook.url("");
    let address: SocketAddr = url.strip_prefix("https://").unwrap().parse().unwrap();
    let stream = webhook
        .server
        .netns()
        .within(|| TcpStream::connect(address));
    let stream = stream.unwrap().unwrap();
    stream.set_read_timeout(Some(CLIENT_TIMEOUT)).unwrap();
    let name = ServerName::IpAddress(address.ip().into());
    let connection = ClientConnection::new(Arc::clone(trust), name).unwrap();
    let mut connection = StreamOwned::new(connection, stream);
    while connection.conn.is_handshaking() {
        connection.conn.complete_io(&mut connection.sock).unwrap();
    }
    connection
}

/// Idle in three ways: after an answered request, without one, and with half a header.
fn idle(webhook: &Webhook, trust: &Arc<ClientConfig>, number: usize) -> Connection {
    let mut connection = connected(webhook, trust);
    match number % 3 {
        0 => {
            connection
                .write_all(b"GET / HTTP/1.1\r\nHost: injector\r\n\r\n")
                .unwrap();
            let mut start = [0; 12];
            connection.read_exact(&mut start).unwrap();
            assert_eq!(&start, b"HTTP/1.1 404");
        }
        1 => {}
        _ => connection
            .write_all(b"POST /inject HTTP/1.1\r\nHo")
            .unwrap(),
    }
    connection
}

#[test]
fn idle_connections_on_all_places_keep_no_review_waiting() {
    let webhook = Webhook::start("idle");
    let inside = webhook.namespace("in", Some(ENABLED));
    webhook.register(&json!([webhook.hook("namespace", "/inject", "Fail")]));
    webhook.until_injected(&inside);
    let trust = trust(&webhook);
    let held: Vec<_> = (0..MAX_CONNECTIONS)
        .map(|number| idle(&webhook, &trust, number))
        .collect();
    // The API server's connection was idle longest and closed: it must reconnect.
    assert!(webhook.evictions() > 0);
    for _ in 0..3 {
        let made = webhook.dry_run(&inside, &pod("web")).unwrap();
        assert_eq!(containers(&made), ["app", "istio-proxy"]);
        // A new client connects as well.
        webhook
            .curl(&["-o", "/dev/null", &webhook.url("/")])
            .unwrap();
    }
    // Only as many were closed as needed.
    let closed = held.into_iter().filter_map(is_closed).count();
    assert!((1..20).contains(&closed), "{closed}");
    let log = fs::read_to_string(webhook.dir.path().join("log")).unwrap();
    assert!(!log.contains("ERROR"), "{log}");
}

/// Something is returned if the injector closed it.
fn is_closed(mut connection: Connection) -> Option<()> {
    connection.sock.set_nonblocking(true).unwrap();
    let ended = connection.read_to_end(&mut Vec::new());
    let is_open = ended.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
    (!is_open).then_some(())
}
