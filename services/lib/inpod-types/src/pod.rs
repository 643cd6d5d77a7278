use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    NetnsId, Revision, SandboxRef,
    identifier::{identifier, is_cni_name, is_dns_label, is_dns_subdomain},
};

identifier! {
    /// The UID of a pod, an opaque text, because a static pod's UID is not a UUID but 32 hex digits.
    PodUid, "pod UID", "expected 1 to 128 letters, digits, '-', '_' or '.'",
    |text| text.len() <= 128 && is_cni_name(text)
}
identifier! {
    /// The name of a pod.
    PodName, "pod name", "expected a DNS subdomain (RFC 1123)", is_dns_subdomain
}
identifier! {
    /// The name of a Kubernetes namespace.
    NamespaceName, "namespace", "expected a DNS label (RFC 1123)", is_dns_label
}
identifier! {
    /// The name of a service account.
    ServiceAccountName, "service account", "expected a DNS subdomain (RFC 1123)", is_dns_subdomain
}
identifier! {
    /// The name of a Service.
    ServiceName, "service", "expected a DNS label (RFC 1123)", is_dns_label
}
identifier! {
    /// The name of a node.
    NodeName, "node name", "expected a DNS subdomain (RFC 1123)", is_dns_subdomain
}

/// Identifies a pod beyond the reuse of its name, and is displayed as `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodRef {
    /// The namespace of the pod.
    pub namespace: NamespaceName,
    /// The name of the pod.
    pub name: PodName,
    /// The UID, which distinguishes pods of the same name.
    pub uid: PodUid,
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The identity of a workload for ztunnel. All fields must match the values from ztunnel's control plane.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WorkloadInfo {
    /// The name of the pod.
    pub name: PodName,
    /// The namespace of the pod.
    pub namespace: NamespaceName,
    /// The service account of the pod.
    pub service_account: ServiceAccountName,
}

/// A pod in the form in which ztunnel receives pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// The sandbox, whose network namespace is handed to ztunnel.
    pub sandbox: SandboxRef,
    /// The UID of the pod, by which ztunnel identifies a workload.
    pub uid: PodUid,
    /// The identity of the workload.
    pub info: WorkloadInfo,
    /// The verified identity of the namespace. While the identity is `None` (unknown), ztunnel is asked to keep the pod
    /// as it is.
    pub netns: Option<NetnsId>,
    /// The revision, which orders changes of the same sandbox.
    pub revision: Revision,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_static_pods_hash_is_a_uid() {
        assert!("0123456789abcdef0123456789abcdef".parse::<PodUid>().is_ok());
    }

    #[test]
    fn a_namespace_with_a_slash_is_refused() {
        assert!("shop/web".parse::<NamespaceName>().is_err());
    }

    #[test]
    fn empty_names_are_refused() {
        assert!("".parse::<PodName>().is_err());
        assert!("".parse::<PodUid>().is_err());
        assert!("a..b".parse::<PodName>().is_err());
    }

    #[test]
    fn an_error_quotes_at_most_eighty_escaped_characters() {
        let error = "\n".repeat(5000).parse::<PodName>().unwrap_err();
        assert!(error.to_string().len() < 300, "{error}");
        assert!(!error.to_string().contains('\n'));
    }
}
