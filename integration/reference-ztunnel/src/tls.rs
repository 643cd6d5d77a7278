//! Configures mutual TLS between workloads. rustls compares no URI names, so the verifiers in this module do.

use std::sync::Arc;

use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, OtherError,
    PeerMisbehaved, ServerConfig, SignatureScheme,
};
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert};

use crate::identity::Identity;

const HTTP2: &[u8] = b"h2";

/// Returns the configuration for calls to a peer that must have the given name.
pub(crate) fn client(own: &Identity, peer: &str) -> Result<ClientConfig, Error> {
    let verifier = Verifier::new(own, Some(peer.into()));
    let config = ClientConfig::builder_with_provider(verifier.provider());
    let config = config.with_protocol_versions(&[&TLS13])?;
    let config = config
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let chain = vec![own.certificate.clone()];
    let mut config = config.with_client_auth_cert(chain, own.key.clone_key())?;
    config.alpn_protocols = vec![HTTP2.to_vec()];
    Ok(config)
}

/// Returns the configuration for calls from any workload of the CA.
pub(crate) fn server(own: &Identity) -> Result<ServerConfig, Error> {
    let verifier = Verifier::new(own, None);
    let config = ServerConfig::builder_with_provider(verifier.provider());
    let config = config.with_protocol_versions(&[&TLS13])?;
    let config = config.with_client_cert_verifier(Arc::new(verifier));
    let chain = vec![own.certificate.clone()];
    let mut config = config.with_single_cert(chain, own.key.clone_key())?;
    config.alpn_protocols = vec![HTTP2.to_vec()];
    Ok(config)
}

/// Returns the URI name in a certificate, if there is exactly one.
pub(crate) fn name_in(certificate: &CertificateDer<'_>) -> Option<String> {
    let certificate = EndEntityCert::try_from(certificate).ok()?;
    let mut names = certificate.valid_uri_names();
    let name = names.next()?.to_owned();
    names.next().is_none().then_some(name)
}

#[derive(Debug)]
struct Verifier {
    root: CertificateDer<'static>,
    provider: Arc<CryptoProvider>,
    expected: Option<Arc<str>>,
}

impl Verifier {
    fn new(own: &Identity, expected: Option<Arc<str>>) -> Self {
        Self {
            root: own.root.clone(),
            provider: Arc::new(ring::default_provider()),
            expected,
        }
    }

    fn provider(&self) -> Arc<CryptoProvider> {
        Arc::clone(&self.provider)
    }

    fn check(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
        usage: KeyUsage,
    ) -> Result<(), Error> {
        let invalid = |error: webpki::Error| {
            let error = OtherError(Arc::new(error));
            Error::InvalidCertificate(CertificateError::Other(error))
        };
        let anchors = [anchor_from_trusted_cert(&self.root).map_err(invalid)?];
        let algorithms = self.provider.signature_verification_algorithms.all;
        EndEntityCert::try_from(certificate)
            .and_then(|end| {
                end.verify_for_usage(algorithms, &anchors, intermediates, now, usage, None, None)
                    .map(drop)
            })
            .map_err(invalid)?;
        let name = name_in(certificate);
        let is_expected = |name: &String| {
            let expected = self.expected.as_deref();
            expected.is_none_or(|expected| expected == name)
        };
        if name.as_ref().is_some_and(is_expected) {
            Ok(())
        } else {
            Err(Error::InvalidCertificate(CertificateError::NotValidForName))
        }
    }

    fn check_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        let algorithms = self.provider.signature_verification_algorithms;
        algorithms.supported_schemes()
    }
}

/// Returns the error for TLS 1.2, which this ztunnel never offers.
const fn too_old() -> Error {
    Error::PeerMisbehaved(PeerMisbehaved::SelectedUnofferedCipherSuite)
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let usage = KeyUsage::server_auth();
        self.check(end_entity, intermediates, now, usage)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(too_old())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let usage = KeyUsage::client_auth();
        self.check(end_entity, intermediates, now, usage)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(too_old())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

#[cfg(test)]
mod tests {
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;
    use crate::identity::tests::identities;

    /// Returns whether both ends accept each other when the client calls a peer by name.
    async fn agree(caller: &Identity, callee: &Identity, expected: &str) -> bool {
        let connector = TlsConnector::from(Arc::new(client(caller, expected).expect("a config")));
        let acceptor = TlsAcceptor::from(Arc::new(server(callee).expect("a config")));
        let (near, far) = tokio::io::duplex(16 * 1024);
        let name = ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into());
        let (called, accepted) = tokio::join!(connector.connect(name, near), acceptor.accept(far));
        called.is_ok() && accepted.is_ok()
    }

    #[tokio::test]
    async fn only_the_wanted_workload_with_a_certificate_of_today_from_the_same_ca_is_accepted() {
        let [a, b, expired, foreign] = identities();
        assert!(agree(&a, &b, &b.name).await);
        assert!(!agree(&a, &b, &a.name).await, "another name");
        for bad in [&expired, &foreign] {
            assert!(!agree(&b, bad, &bad.name).await);
            assert!(!agree(bad, &b, &b.name).await);
        }
    }
}
