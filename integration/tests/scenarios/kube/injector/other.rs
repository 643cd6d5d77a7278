//! Another owner's webhook that changes pods after the injector.

use std::{
    io::{Read, Write as _},
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::Context as _;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use tokio_rustls::rustls::{
    ServerConfig, ServerConnection, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};

use crate::kube::injector::webhook::Webhook;

pub(crate) type Change = fn(&Value) -> Value;

/// Answers reviews as long as the test lives.
#[derive(Debug)]
pub(crate) struct Other {
    port: u16,
    asked: Arc<AtomicUsize>,
}

impl Other {
    /// Starts it with a certificate by the injector's authority.
    pub(crate) fn start(webhook: &Webhook, change: Change) -> Self {
        let tls = webhook.dir.path().join("tls");
        let chain = CertificateDer::pem_file_iter(tls.join("tls.crt")).unwrap();
        let chain = chain.collect::<Result<_, _>>().unwrap();
        let key = PrivateKeyDer::from_pem_file(tls.join("tls.key")).unwrap();
        let provider = Arc::new(ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key);
        let config = Arc::new(config.unwrap());
        let address = (webhook.server.address(), 0);
        let listener = webhook.server.netns().within(|| TcpListener::bind(address));
        let listener = listener.unwrap().unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let connection = ServerConnection::new(Arc::clone(&config)).unwrap();
                // A server may check the connection and close it.
                if answer(StreamOwned::new(connection, stream.unwrap()), change).is_ok() {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        Self { port, asked }
    }

    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    pub(crate) fn hook(&self, webhook: &Webhook) -> Value {
        let mut hook = webhook.hook("other", "/", "Fail");
        let url = format!("https://{}:{}/", webhook.server.address(), self.port);
        hook["clientConfig"]["url"] = url.into();
        hook
    }
}

fn answer(
    mut stream: StreamOwned<ServerConnection, std::net::TcpStream>,
    change: Change,
) -> anyhow::Result<()> {
    let review: Value = serde_json::from_slice(&body(&mut stream)?)?;
    let request = review.get("request").context("no request")?;
    let patch = change(request.get("object").context("no pod")?).to_string();
    let answer = json!({
        "apiVersion": review["apiVersion"],
        "kind": "AdmissionReview",
        "response": {"uid": request["uid"], "allowed": true, "patchType": "JSONPatch", "patch": STANDARD.encode(patch)},
    });
    let answer = answer.to_string();
    let length = answer.len();
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{answer}"
    )?;
    stream.flush()?;
    stream.conn.send_close_notify();
    Ok(stream.flush()?)
}

fn body(stream: &mut impl Read) -> anyhow::Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.extend(byte);
    }
    let head = String::from_utf8(head)?.to_lowercase();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.context("no length")?.parse()?];
    stream.read_exact(&mut body)?;
    Ok(body)
}
