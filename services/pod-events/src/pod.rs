//! Pods and namespaces, reduced to the fields used.

mod capabilities;
mod condition;
mod ports;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use inpod_types::{
    InvalidIdentifier, NamespaceName, NodeName, PodName, PodRef, PodUid, ServiceAccountName, keys,
};
use k8s_openapi::api::core::v1 as k8s;

use crate::{
    injection::Injection,
    redirection::{Permissions, Requested},
};

pub use capabilities::MarkSetter;
pub use condition::ShownCondition;
pub use ports::{DeclaredPort, Protocol};

/// The namespace and name of a pod. Several pods may have the same key one after the other.
pub type PodKey = (NamespaceName, PodName);

pub type Labels = BTreeMap<String, String>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub pod: PodRef,
    /// The service account; `default` if the manifest names no account, as in Kubernetes.
    pub service_account: ServiceAccountName,
    pub node: Option<NodeName>,
    /// All labels, because labels decide whether the pod joins the mesh, and whether the pod is a ztunnel.
    pub labels: Labels,
    pub host_network: bool,
    /// `runtimeClassName`, the user's name of the runtime. A pod without a class runs in the node's default runtime.
    pub runtime_class: Option<Box<str>>,
    /// The injector's sidecar, shared between snapshots.
    pub injection: Option<Arc<Injection>>,
    /// Phase Succeeded or Failed: the pod's containers have terminated for good.
    pub terminal: bool,
    /// The UID known to kubelet and the runtime if different from the API server's: the hash of a static pod.
    pub runtime_uid: Option<PodUid>,
    pub requested: Requested,
    pub ports: Vec<DeclaredPort>,
    /// The containers that may set ztunnel's mark.
    pub mark_setters: Vec<MarkSetter>,
    /// The addresses in the pod's status. A pod with addresses has a network.
    pub addresses: Vec<IpAddr>,
    /// The annotation `ambient.istio.io/redirection`, from any writer.
    pub redirection: Option<String>,
    /// The condition `inpod.io/InMesh`, from any writer.
    pub in_mesh: Option<ShownCondition>,
    /// Set if the pod is Ready only while the condition `inpod.io/InMesh` is true.
    pub is_gated: bool,
    pub is_ready: bool,
    /// Set once the deletion is requested. The pod may continue to serve for long.
    pub is_terminating: bool,
}

impl Pod {
    /// Returns whether the pod has the UID, at the API server or the runtime.
    pub fn has_uid(&self, uid: &PodUid) -> bool {
        self.pod.uid == *uid || self.runtime_uid.as_ref() == Some(uid)
    }

    /// Returns whether inpod or another agent marked the pod as redirected.
    pub fn is_redirected(&self) -> bool {
        self.redirection.as_deref() == Some(keys::REDIRECTION_ENABLED)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    pub name: NamespaceName,
    pub labels: Labels,
    /// The value of the annotation `inpod.io/on-unknown`.
    pub on_unknown: Option<String>,
    /// The permissions granted to the namespace's pods by `inpod.io/allow`.
    pub allows: Permissions,
}

impl Namespace {
    pub fn unlabeled(name: NamespaceName) -> Self {
        Self {
            name,
            labels: Labels::new(),
            on_unknown: None,
            allows: Permissions::default(),
        }
    }

    /// Returns the kept labels, and the API server's label with the namespace's name.
    pub fn all_labels(&self) -> Labels {
        let mut labels = self.labels.clone();
        labels.insert(keys::NAMESPACE_NAME.to_owned(), self.name.to_string());
        labels
    }

    /// Converts a manifest or API object, keeping only the labels in `read`: there may be ten thousand namespaces.
    ///
    /// # Errors
    ///
    /// If the namespace has no valid name.
    pub fn of(namespace: k8s::Namespace, read: &BTreeSet<String>) -> Result<Self, InvalidManifest> {
        let meta = namespace.metadata;
        let annotation = |name| annotation(meta.annotations.as_ref(), name);
        let all = meta.labels.unwrap_or_default().into_iter();
        let is_read = |key: &String| read.contains(key) && key != keys::NAMESPACE_NAME;
        Ok(Self {
            name: parse("metadata.name", meta.name.as_deref())?,
            labels: all.filter(|(key, _)| is_read(key)).collect(),
            on_unknown: annotation(keys::ON_UNKNOWN).map(str::to_owned),
            allows: annotation(keys::ALLOW)
                .map(Permissions::parse)
                .unwrap_or_default(),
        })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum InvalidManifest {
    #[error("{0} is required")]
    Missing(&'static str),
    #[error("{field} is invalid")]
    Invalid {
        field: &'static str,
        source: InvalidIdentifier,
    },
}

fn parse<T>(field: &'static str, text: Option<&str>) -> Result<T, InvalidManifest>
where
    T: std::str::FromStr<Err = InvalidIdentifier>,
{
    let text = text.ok_or(InvalidManifest::Missing(field))?;
    text.parse()
        .map_err(|source| InvalidManifest::Invalid { field, source })
}

fn annotation<'a>(all: Option<&'a BTreeMap<String, String>>, name: &str) -> Option<&'a str> {
    all.and_then(|all| all.get(name)).map(String::as_str)
}

/// Returns the addresses of the status, without invalid addresses.
fn addresses(status: &k8s::PodStatus) -> Vec<IpAddr> {
    let all = status.pod_ips.iter().flatten();
    let all = all.filter_map(|address| address.ip.parse().ok());
    let mut addresses: Vec<_> = all.collect();
    if addresses.is_empty() {
        let only = status.pod_ip.as_deref();
        addresses.extend(only.and_then(|ip| ip.parse::<IpAddr>().ok()));
    }
    addresses
}

fn is_ready(status: &k8s::PodStatus) -> bool {
    let mut conditions = status.conditions.iter().flatten();
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

impl TryFrom<k8s::Pod> for Pod {
    type Error = InvalidManifest;

    fn try_from(pod: k8s::Pod) -> Result<Self, InvalidManifest> {
        let (meta, spec) = (pod.metadata, pod.spec.unwrap_or_default());
        let status = pod.status.unwrap_or_default();
        let annotation = |name| annotation(meta.annotations.as_ref(), name);
        // Users can write both annotations: an invalid hash must not hide the pod.
        let hash = annotation(keys::STATIC_MIRROR).and_then(|_| annotation(keys::STATIC_HASH));
        let runtime_uid = hash.and_then(|hash| hash.parse().ok());
        let injection = Injection::detect(meta.labels.as_ref(), meta.annotations.as_ref(), &spec);
        let node = spec
            .node_name
            .as_deref()
            .map(|name| parse("spec.nodeName", Some(name)))
            .transpose()?;
        Ok(Self {
            pod: PodRef {
                // The default is the same as for `kubectl apply` without a namespace.
                namespace: parse(
                    "metadata.namespace",
                    meta.namespace.as_deref().or(Some("default")),
                )?,
                name: parse("metadata.name", meta.name.as_deref())?,
                uid: parse("metadata.uid", meta.uid.as_deref())?,
            },
            service_account: parse(
                "spec.serviceAccountName",
                spec.service_account_name
                    .as_deref()
                    .filter(|name| !name.is_empty())
                    .or(Some("default")),
            )?,
            node,
            labels: meta.labels.clone().unwrap_or_default(),
            host_network: spec.host_network == Some(true),
            runtime_class: spec
                .runtime_class_name
                .as_deref()
                .filter(|class| !class.is_empty())
                .map(Into::into),
            injection: injection.map(Arc::new),
            terminal: matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")),
            runtime_uid,
            requested: Requested::from_annotations(meta.annotations.as_ref())
                .with_probe_ports(ports::probed(&spec)),
            ports: ports::declared(&spec),
            mark_setters: capabilities::find_mark_setters(&spec),
            addresses: addresses(&status),
            redirection: annotation(keys::REDIRECTION).map(str::to_owned),
            in_mesh: ShownCondition::of(&status),
            is_gated: condition::is_gated(&spec),
            is_ready: is_ready(&status),
            is_terminating: meta.deletion_timestamp.is_some(),
        })
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;

    fn with_annotations(all: &[(&str, &str)]) -> Pod {
        let text = |text: &str| text.to_owned();
        let metadata = ObjectMeta {
            name: Some(text("web")),
            uid: Some(text("uid-of-web")),
            annotations: Some(all.iter().map(|(k, v)| (text(k), text(v))).collect()),
            ..ObjectMeta::default()
        };
        Pod::try_from(k8s::Pod {
            metadata,
            ..k8s::Pod::default()
        })
        .unwrap()
    }

    #[test]
    fn a_static_pod_has_its_hash_and_its_uid() {
        let pod = with_annotations(&[(keys::STATIC_MIRROR, "h1"), (keys::STATIC_HASH, "h1")]);
        assert!(pod.has_uid(&"h1".parse().unwrap()));
        assert!(pod.has_uid(&"uid-of-web".parse().unwrap()));
        assert!(!pod.has_uid(&"h2".parse().unwrap()));
    }

    #[test]
    fn a_hash_that_someone_wrote_into_an_ordinary_pod_is_no_uid() {
        let pod = with_annotations(&[(keys::STATIC_HASH, "h1")]);
        assert!(!pod.has_uid(&"h1".parse().unwrap()));
    }

    #[test]
    fn only_the_one_value_of_the_annotation_says_that_a_pod_is_redirected() {
        for (value, redirected) in [(keys::REDIRECTION_ENABLED, true), ("disabled", false)] {
            let pod = with_annotations(&[(keys::REDIRECTION, value)]);
            assert_eq!(pod.is_redirected(), redirected, "{value}");
        }
        assert!(!with_annotations(&[]).is_redirected());
    }

    #[test]
    fn of_a_namespaces_labels_those_that_are_read_are_kept() {
        let labels = [
            ("mesh", "on"),
            ("team", "a"),
            (keys::NAMESPACE_NAME, "shop"),
        ];
        let metadata = ObjectMeta {
            name: Some("shop".to_owned()),
            labels: Some(labels.map(|(k, v)| (k.to_owned(), v.to_owned())).into()),
            annotations: Some([(keys::ALLOW.to_owned(), "exclude".to_owned())].into()),
            ..ObjectMeta::default()
        };
        let shown = k8s::Namespace {
            metadata,
            ..k8s::Namespace::default()
        };
        let read = ["mesh", keys::NAMESPACE_NAME].map(str::to_owned).into();
        let namespace = Namespace::of(shown, &read).unwrap();
        assert_eq!(namespace.labels.len(), 1);
        let keys = [keys::NAMESPACE_NAME, "mesh"];
        assert!(namespace.all_labels().keys().eq(keys));
        assert_eq!(namespace.allows, Permissions::parse("exclude"));
    }

    #[test]
    fn a_status_shows_all_addresses_or_the_one() {
        let ip = |ip: &str| k8s::PodIP { ip: ip.to_owned() };
        let shown = |one: &str, all: &[&str]| {
            addresses(&k8s::PodStatus {
                pod_ip: Some(one.to_owned()),
                pod_ips: Some(all.iter().map(|it| ip(it)).collect()),
                ..k8s::PodStatus::default()
            })
        };
        let [v4, v6] = ["10.0.0.1", "fd00::1"].map(|it| it.parse::<IpAddr>().unwrap());
        assert_eq!(shown("10.0.0.1", &["10.0.0.1", "fd00::1"]), [v4, v6]);
        assert_eq!(shown("10.0.0.1", &[]), [v4]);
        assert!(shown("none", &["neither"]).is_empty());
    }
}
