//! Pods and namespaces, stripped to what is read.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as k8s;
use workload::{InvalidIdentifier, NamespaceName, NodeName, PodRef, ServiceAccountName, keys};

/// A pod of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Which pod.
    pub pod: PodRef,
    /// Its service account; `default` where the manifest names none, as Kubernetes fills in.
    pub service_account: ServiceAccountName,
    /// The node it is bound to, if it says so.
    pub node: Option<NodeName>,
    /// The value of its label `istio.io/dataplane-mode`.
    pub dataplane_mode: Option<String>,
    /// Whether it shares the node's network.
    pub host_network: bool,
    /// Whether a sidecar was injected.
    pub has_sidecar: bool,
    /// Whether its containers have ended for good (phase Succeeded or Failed).
    pub terminal: bool,
}

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Its name.
    pub name: NamespaceName,
    /// The value of its label `istio.io/dataplane-mode`.
    pub dataplane_mode: Option<String>,
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

fn dataplane_mode(labels: Option<&BTreeMap<String, String>>) -> Option<String> {
    labels
        .and_then(|labels| labels.get(keys::DATAPLANE_MODE))
        .cloned()
}

impl TryFrom<k8s::Pod> for Pod {
    type Error = Unusable;

    fn try_from(pod: k8s::Pod) -> Result<Self, Unusable> {
        let (meta, spec) = (pod.metadata, pod.spec.unwrap_or_default());
        let phase = pod.status.and_then(|status| status.phase);
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
            dataplane_mode: dataplane_mode(meta.labels.as_ref()),
            host_network: spec.host_network == Some(true),
            has_sidecar: meta
                .annotations
                .is_some_and(|all| all.contains_key(keys::SIDECAR_STATUS)),
            terminal: matches!(phase.as_deref(), Some("Succeeded" | "Failed")),
        })
    }
}

impl TryFrom<k8s::Namespace> for Namespace {
    type Error = Unusable;

    fn try_from(namespace: k8s::Namespace) -> Result<Self, Unusable> {
        Ok(Self {
            name: parse("metadata.name", namespace.metadata.name.as_deref())?,
            dataplane_mode: dataplane_mode(namespace.metadata.labels.as_ref()),
        })
    }
}
