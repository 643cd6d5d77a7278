//! Pods and namespaces, stripped to what is read.

mod ports;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use inpod_types::{
    InvalidIdentifier, NamespaceName, NodeName, PodRef, PodUid, ServiceAccountName, keys,
};
use k8s_openapi::api::core::v1 as k8s;

use crate::{
    decide::Labels,
    injection::Injection,
    redirection::{Permissions, Requested},
};

pub use ports::DeclaredPort;

/// A pod of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Which pod.
    pub pod: PodRef,
    /// Its service account; `default` where the manifest names none, as Kubernetes fills in.
    pub service_account: ServiceAccountName,
    /// The node it is bound to, if it says so.
    pub node: Option<NodeName>,
    /// All its labels, by which it joins the mesh and ztunnels are known.
    pub labels: Labels,
    /// Whether it shares the node's network.
    pub host_network: bool,
    /// What an injector has left in it. Shared by the views of one state of the node.
    pub injection: Option<Arc<Injection>>,
    /// Whether its containers have ended for good (phase Succeeded or Failed).
    pub terminal: bool,
    /// What kubelet and runtime call it, where that is not its UID: a static pod's hash.
    pub runtime_uid: Option<PodUid>,
    /// What it asks of its redirection.
    pub requested: Requested,
    /// The ports that its containers declare.
    pub ports: Vec<DeclaredPort>,
    /// Its addresses, as far as its status shows them: then it has a network.
    pub addresses: Vec<IpAddr>,
    /// The value of its annotation `ambient.istio.io/redirection`, whoever wrote it.
    pub redirection: Option<String>,
    /// Whether it is Ready: peers may call it.
    pub is_ready: bool,
    /// Whether its deletion was asked for. It may serve for long yet.
    pub is_terminating: bool,
}

impl Pod {
    /// Whether a runtime that names this UID means this pod.
    pub fn is_called(&self, uid: &PodUid) -> bool {
        self.pod.uid == *uid || self.runtime_uid.as_ref() == Some(uid)
    }

    /// Whether its annotation says that its traffic is redirected, whoever did it.
    pub fn is_redirected(&self) -> bool {
        self.redirection.as_deref() == Some(keys::REDIRECTION_ENABLED)
    }
}

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Its name.
    pub name: NamespaceName,
    /// Those of its labels that are read.
    pub labels: Labels,
    /// The value of its annotation `inpod.io/on-unknown`.
    pub on_unknown: Option<String>,
    /// What its annotation `inpod.io/allow` permits its pods.
    pub allows: Permissions,
}

impl Namespace {
    /// One of which nothing is known but its name.
    pub fn bare(name: NamespaceName) -> Self {
        Self {
            name,
            labels: Labels::new(),
            on_unknown: None,
            allows: Permissions::default(),
        }
    }

    /// The value of a label that is read. What the API server makes of the name needs no copy.
    pub fn label(&self, key: &str) -> Option<&str> {
        if key == keys::NAMESPACE_NAME {
            return Some(self.name.as_str());
        }
        self.labels.get(key).map(String::as_str)
    }

    /// From a manifest or what the API server says, of which only the labels `read` are kept: there may be ten thousand.
    ///
    /// # Errors
    ///
    /// When it has no usable name.
    pub fn of(namespace: k8s::Namespace, read: &BTreeSet<String>) -> Result<Self, Unusable> {
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

/// Why a manifest is not used.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// A field that must be there is not.
    #[error("{0} is required")]
    Missing(&'static str),
    /// A field is not what it should be.
    #[error("{field} is invalid")]
    Invalid {
        /// The field's path.
        field: &'static str,
        /// The rule it breaks.
        source: InvalidIdentifier,
    },
}

fn parse<T>(field: &'static str, text: Option<&str>) -> Result<T, Unusable>
where
    T: std::str::FromStr<Err = InvalidIdentifier>,
{
    let text = text.ok_or(Unusable::Missing(field))?;
    text.parse()
        .map_err(|source| Unusable::Invalid { field, source })
}

fn annotation<'a>(all: Option<&'a BTreeMap<String, String>>, name: &str) -> Option<&'a str> {
    all.and_then(|all| all.get(name)).map(String::as_str)
}

/// What is no address is as good as absent.
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
    type Error = Unusable;

    fn try_from(pod: k8s::Pod) -> Result<Self, Unusable> {
        let (meta, spec) = (pod.metadata, pod.spec.unwrap_or_default());
        let status = pod.status.unwrap_or_default();
        let addresses = addresses(&status);
        let ports = ports::declared(&spec);
        let is_ready = is_ready(&status);
        let phase = status.phase;
        let annotation = |name| annotation(meta.annotations.as_ref(), name);
        // Both are words of whoever made the pod: a hash that cannot be one is none, and keeps no pod from being seen.
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
                // As the API server does for `kubectl apply` without a namespace.
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
            injection: injection.map(Arc::new),
            terminal: matches!(phase.as_deref(), Some("Succeeded" | "Failed")),
            runtime_uid,
            requested: Requested::from_annotations(meta.annotations.as_ref()),
            ports,
            addresses,
            redirection: annotation(keys::REDIRECTION).map(str::to_owned),
            is_ready,
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
    fn a_static_pod_is_called_by_its_hash_and_by_its_uid() {
        let pod = with_annotations(&[(keys::STATIC_MIRROR, "h1"), (keys::STATIC_HASH, "h1")]);
        assert!(pod.is_called(&"h1".parse().unwrap()));
        assert!(pod.is_called(&"uid-of-web".parse().unwrap()));
        assert!(!pod.is_called(&"h2".parse().unwrap()));
    }

    #[test]
    fn a_hash_that_someone_wrote_into_an_ordinary_pod_is_no_uid() {
        let pod = with_annotations(&[(keys::STATIC_HASH, "h1")]);
        assert!(!pod.is_called(&"h1".parse().unwrap()));
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
        assert_eq!(namespace.label("mesh"), Some("on"));
        assert_eq!(namespace.label("team"), None);
        assert_eq!(namespace.label(keys::NAMESPACE_NAME), Some("shop"));
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
