//! Connects to the real server by TLS, with the credentials of the client.

use std::{net::SocketAddr, sync::Arc};

use anyhow::Context as _;
use hyper::{Request, Response, body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::ring,
        pki_types::{CertificateDer, ServerName, pem::PemObject as _},
    },
};

#[derive(Clone)]
pub(super) struct Upstream {
    address: SocketAddr,
    tls: TlsConnector,
}

impl std::fmt::Debug for Upstream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Upstream").field(&self.address).finish()
    }
}

impl Upstream {
    pub(super) fn of(cluster: &Value) -> anyhow::Result<Self> {
        let text = |name: &str| cluster.get(name).and_then(Value::as_str);
        let server = text("server").and_then(|server| server.strip_prefix("https://"));
        let address = server.context("the server has an address")?.parse()?;
        let authority = text("certificate-authority").context("the server has an authority")?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(authority)? {
            roots.add(certificate?)?;
        }
        let provider = Arc::new(ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let tls = TlsConnector::from(Arc::new(config));
        Ok(Self { address, tls })
    }

    /// Forwards a request to the server, over a connection of its own.
    pub(super) async fn ask(
        &self,
        mut request: Request<Incoming>,
    ) -> anyhow::Result<Response<Incoming>> {
        let stream = TcpStream::connect(self.address).await?;
        let name = ServerName::IpAddress(self.address.ip().into());
        let stream = self.tls.connect(name, stream).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let host = self.address.to_string().parse()?;
        request.headers_mut().insert(http::header::HOST, host);
        Ok(sender.send_request(request).await?)
    }
}
