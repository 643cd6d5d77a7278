//! TLS certificate of the webhook, used from the next handshake on.

use std::{
    fmt,
    path::Path,
    sync::{Arc, PoisonError, RwLock},
};

use tokio_rustls::rustls::{
    self,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use x509_cert::{
    Certificate,
    der::{self, Decode as _},
};

/// Reason why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error("cannot read {path}: {source}")]
    Read {
        path: String,
        source: std::io::Error,
    },
    /// A file has no PEM block of the required kind.
    #[error("{0} contains no {1} in PEM")]
    Pem(&'static str, &'static str),
    /// Key and certificate do not match, or are of an unsupported kind.
    #[error("tls.crt and tls.key cannot be used together: {0}")]
    Unfit(#[from] rustls::Error),
    /// A certificate is not valid DER, so that its expiry is unknown.
    #[error("tls.crt contains an invalid certificate: {0}")]
    Unreadable(#[from] der::Error),
}

/// Contents of `tls.crt` and `tls.key`.
#[derive(Clone, PartialEq, Eq)]
pub struct Files {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl fmt::Debug for Files {
    /// The private key must not appear in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Files").finish_non_exhaustive()
    }
}

impl Files {
    /// Reads both files of a directory.
    ///
    /// The kubelet updates a mounted Secret by renaming the symlink `..data`; it is resolved once, so that both files
    /// are of the same version.
    ///
    /// # Errors
    ///
    /// If a file cannot be read.
    pub fn read(directory: &Path) -> Result<Self, CertificateError> {
        let data = directory.join("..data").canonicalize();
        let directory = data.unwrap_or_else(|_| directory.to_owned());
        let read = |name: &str| {
            let path = directory.join(name);
            std::fs::read(&path).map_err(|source| CertificateError::Read {
                path: path.display().to_string(),
                source,
            })
        };
        Ok(Self {
            certificate: read("tls.crt")?,
            key: read("tls.key")?,
        })
    }

    fn certified(&self) -> Result<CertifiedKey, CertificateError> {
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&self.certificate).collect();
        let chain = chain.ok().filter(|chain| !chain.is_empty());
        let chain = chain.ok_or(CertificateError::Pem("tls.crt", "certificate"))?;
        let key = PrivateKeyDer::from_pem_slice(&self.key);
        let key = key.map_err(|_| CertificateError::Pem("tls.key", "private key"))?;
        // Rejects a key that belongs to another certificate.
        Ok(CertifiedKey::from_der(
            chain,
            key,
            &ring::default_provider(),
        )?)
    }
}

/// Returns the earliest expiry in a chain, in seconds since 1970 (`notAfter`, RFC 5280, section 4.1.2.5).
fn earliest_expiry(chain: &[CertificateDer<'_>]) -> Result<u64, CertificateError> {
    let end = |certificate: &CertificateDer<'_>| {
        let certificate = Certificate::from_der(certificate)?;
        let validity = certificate.tbs_certificate().validity();
        Ok(validity.not_after.to_unix_duration().as_secs())
    };
    let ends: Result<Vec<_>, der::Error> = chain.iter().map(end).collect();
    Ok(ends?.into_iter().min().unwrap_or_default())
}

/// Certificate that handshakes present; none at first.
#[derive(Debug, Default)]
pub struct CurrentCertificate(RwLock<Option<Arc<CertifiedKey>>>);

impl CurrentCertificate {
    /// Returns whether a certificate is loaded.
    pub fn is_loaded(&self) -> bool {
        let certificate = self.0.read();
        certificate
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    /// Replaces the certificate from the next handshake on, and returns its expiry in seconds since 1970.
    /// Open connections are unaffected. An expired certificate is presented like any other: the client's
    /// error names the cause.
    ///
    /// # Errors
    ///
    /// If it cannot be used; the previous one remains.
    pub fn replace(&self, files: &Files) -> Result<u64, CertificateError> {
        let certified = Arc::new(files.certified()?);
        let ends = earliest_expiry(&certified.cert)?;
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(certified);
        Ok(ends)
    }
}

impl ResolvesServerCert for CurrentCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}
