//! The webhook's certificate, as it is shown at the next handshake.

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

/// Why a certificate is not used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// Its path.
        path: String,
        /// The cause.
        source: std::io::Error,
    },
    /// A file holds no PEM of what it should.
    #[error("{0} holds no {1} in PEM")]
    Pem(&'static str, &'static str),
    /// Key and certificate do not belong together, or are of a kind that is not known.
    #[error("tls.crt and tls.key cannot be used together: {0}")]
    Unfit(#[from] rustls::Error),
    /// It cannot be told how long a certificate is valid.
    #[error("tls.crt holds what is no certificate: {0}")]
    Unreadable(#[from] der::Error),
}

/// What the files hold.
#[derive(Clone, PartialEq, Eq)]
pub struct Files {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl fmt::Debug for Files {
    /// The key is nobody's to see.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Files").finish_non_exhaustive()
    }
}

impl Files {
    /// Reads both files of a directory.
    ///
    /// The kubelet changes a mounted Secret by one rename of the link `..data`: both are read behind one look at it.
    ///
    /// # Errors
    ///
    /// When one cannot be read.
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
        // Refuses a key that is another certificate's.
        Ok(CertifiedKey::from_der(
            chain,
            key,
            &ring::default_provider(),
        )?)
    }
}

/// When the first of a chain's certificates ends, in seconds since 1970 (`notAfter`, RFC 5280, section 4.1.2.5).
fn earliest_expiry(chain: &[CertificateDer<'_>]) -> Result<u64, CertificateError> {
    let end = |certificate: &CertificateDer<'_>| {
        let certificate = Certificate::from_der(certificate)?;
        let validity = certificate.tbs_certificate().validity();
        Ok(validity.not_after.to_unix_duration().as_secs())
    };
    let ends: Result<Vec<_>, der::Error> = chain.iter().map(end).collect();
    Ok(ends?.into_iter().min().unwrap_or_default())
}

/// The certificate that is shown; none at first.
#[derive(Debug, Default)]
pub struct CurrentCertificate(RwLock<Option<Arc<CertifiedKey>>>);

impl CurrentCertificate {
    /// Whether there is one.
    pub fn is_loaded(&self) -> bool {
        let certificate = self.0.read();
        certificate
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    /// Shows another one from the next handshake on, and says when it ends, in seconds since 1970. Connections that are
    /// there stay. One that has ended is shown like any other: who asks refuses it, and says why.
    ///
    /// # Errors
    ///
    /// When it cannot be used; the one before stays.
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
