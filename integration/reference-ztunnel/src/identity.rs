//! Issues SPIFFE identities from a certificate authority (CA), in a file that several processes can share.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use rcgen::string::Ia5String;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use zds_client::WorkloadInfo;

/// The default trust domain of stock ztunnel.
const TRUST_DOMAIN: &str = "cluster.local";

const FILE: &str = "ca.pem";

/// The CA, which issues the certificates of workloads.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
}

/// The name of a workload, with the certificate that proves the name.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) name: Arc<str>,
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) key: Arc<PrivateKeyDer<'static>>,
    /// The certificate of the CA, which signs the certificates of all peers.
    pub(crate) root: CertificateDer<'static>,
}

impl Authority {
    /// Reads the CA from a directory. If there is none, creates a CA, unless another process does so at the same time.
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        let path = directory.join(FILE);
        if !path.exists() {
            create(directory, &path)?;
        }
        Self::read(&fs::read(path)?).map_err(io::Error::other)
    }

    fn read(pem: &[u8]) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let text = std::str::from_utf8(pem)?;
        let key = KeyPair::from_pem(text)?;
        Ok(Self {
            certificate: CertificateDer::from_pem_slice(pem)?,
            issuer: Issuer::new(authority(), key),
        })
    }

    pub(crate) fn issue(&self, workload: &WorkloadInfo) -> io::Result<Identity> {
        let name = name_of(workload);
        self.sign(&name, CertificateParams::default())
            .map_err(io::Error::other)
    }

    fn sign(&self, name: &str, mut params: CertificateParams) -> Result<Identity, rcgen::Error> {
        let key = KeyPair::generate()?;
        params.subject_alt_names = vec![SanType::URI(Ia5String::try_from(name)?)];
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(Identity {
            name: name.into(),
            certificate: certificate.into(),
            key: Arc::new(key.into()),
            root: self.certificate.clone(),
        })
    }
}

fn name_of(workload: &WorkloadInfo) -> String {
    let (namespace, account) = (&workload.namespace, &workload.service_account);
    format!("spiffe://{TRUST_DOMAIN}/ns/{namespace}/sa/{account}")
}

fn authority() -> CertificateParams {
    let mut params = CertificateParams::default();
    let subject = "reference-ztunnel, for tests";
    params.distinguished_name.push(DnType::CommonName, subject);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params
}

/// Creates the file of the CA, which appears as a whole, and only if there is none.
fn create(directory: &Path, path: &Path) -> io::Result<()> {
    let key = KeyPair::generate().map_err(io::Error::other)?;
    let certificate = authority().self_signed(&key).map_err(io::Error::other)?;
    let temporary = directory.join(format!("{FILE}.{}", std::process::id()));
    let mut file = fs::File::create(&temporary)?;
    write!(file, "{}{}", key.serialize_pem(), certificate.pem())?;
    let linked = fs::hard_link(&temporary, path);
    fs::remove_file(&temporary)?;
    match linked {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn workload(name: &str) -> WorkloadInfo {
        WorkloadInfo {
            name: name.to_owned(),
            namespace: "shop".to_owned(),
            service_account: format!("{name}-account"),
        }
    }

    /// Returns identities of workloads a and b, an expired identity of a, and an identity of a by another CA.
    pub(crate) fn identities() -> [Identity; 4] {
        let own = tempfile::tempdir().expect("tempdir");
        let other = tempfile::tempdir().expect("tempdir");
        let authority = Authority::open(own.path()).expect("a CA");
        // Another process would find the same CA.
        let same = Authority::open(own.path()).expect("the CA");
        let other = Authority::open(other.path()).expect("another CA");
        let mut past = CertificateParams::default();
        past.not_after = rcgen::date_time_ymd(2020, 1, 1);
        let a = name_of(&workload("a"));
        [
            authority.issue(&workload("a")).expect("a"),
            same.issue(&workload("b")).expect("b"),
            authority.sign(&a, past).expect("expired"),
            other.issue(&workload("a")).expect("foreign"),
        ]
    }

    #[test]
    fn a_workload_is_named_after_namespace_and_service_account() {
        assert_eq!(
            name_of(&workload("web")),
            "spiffe://cluster.local/ns/shop/sa/web-account"
        );
    }
}
