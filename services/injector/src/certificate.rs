//! Holds the TLS certificate of the webhook. A new certificate is used from the next handshake on.

use std::{
    fmt,
    path::Path,
    sync::{Arc, PoisonError, RwLock},
};

use inpod_service::read_bounded;
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

/// The limit of a file's size: the API server stores no larger Secret and no larger ConfigMap.
pub(crate) const MAX_FILE_BYTES: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error("cannot read {path}: {source}")]
    Read {
        path: String,
        source: std::io::Error,
    },
    /// A PEM block of the required kind is missing.
    #[error("{0} contains no {1} in PEM")]
    Pem(&'static str, &'static str),
    /// The certificate and the key do not match, or are of an unsupported kind.
    #[error("tls.crt and tls.key cannot be used together: {0}")]
    Unfit(#[from] rustls::Error),
    /// The certificate is invalid DER, so its expiry is unknown.
    #[error("tls.crt contains an invalid certificate: {0}")]
    Unreadable(#[from] der::Error),
}

#[derive(Clone, PartialEq, Eq)]
pub struct Files {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Files").finish_non_exhaustive()
    }
}

impl Files {
    /// Reads the certificate and the key from a directory.
    ///
    /// The kubelet updates a Secret by renaming the symlink `..data`; resolving it once yields two files
    /// of the same version.
    pub fn read(directory: &Path) -> Result<Self, CertificateError> {
        let data = directory.join("..data").canonicalize();
        let directory = data.unwrap_or_else(|_| directory.to_owned());
        let read = |name: &str| {
            let path = directory.join(name);
            read_bounded(&path, MAX_FILE_BYTES).map_err(|source| CertificateError::Read {
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
        // The call rejects a key that belongs to another certificate.
        Ok(CertifiedKey::from_der(
            chain,
            key,
            &ring::default_provider(),
        )?)
    }
}

/// Returns the earliest `notAfter` of the chain (RFC 5280, section 4.1.2.5), in seconds since 1970.
fn earliest_expiry(chain: &[CertificateDer<'_>]) -> Result<u64, CertificateError> {
    let end = |certificate: &CertificateDer<'_>| {
        let certificate = Certificate::from_der(certificate)?;
        let validity = certificate.tbs_certificate().validity();
        Ok(validity.not_after.to_unix_duration().as_secs())
    };
    let ends: Result<Vec<_>, der::Error> = chain.iter().map(end).collect();
    Ok(ends?.into_iter().min().unwrap_or_default())
}

/// The certificate that handshakes use; unset until the first one was read.
#[derive(Debug, Default)]
pub struct CurrentCertificate(RwLock<Option<Arc<CertifiedKey>>>);

impl CurrentCertificate {
    pub fn is_loaded(&self) -> bool {
        let certificate = self.0.read();
        certificate
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    /// Replaces the certificate, and returns its expiry in seconds since 1970. Open connections are unaffected. An
    /// expired certificate is presented, too, because the client's error then names the cause.
    ///
    /// # Errors
    ///
    /// The previous certificate stays in use after an error.
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
