use std::fmt;

use crate::{
    NetnsId, Revision, SandboxRef,
    identifier::{identifier, is_cni_name, is_dns_label, is_dns_subdomain},
};

identifier! {
    /// An opaque text: a static pod's UID is 32 hex digits, no UUID.
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

/// Identifies a pod beyond the reuse of its name; displayed as `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodRef {
    /// The namespace of the pod.
    pub namespace: NamespaceName,
    /// The name of the pod.
    pub name: PodName,
    /// Distinguishes pods of the same name.
    pub uid: PodUid,
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A workload's identity for ztunnel. All fields must match ztunnel's control plane.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WorkloadInfo {
    /// The name of the pod.
    pub name: PodName,
    /// The namespace of the pod.
    pub namespace: NamespaceName,
    /// The service account of the pod.
    pub service_account: ServiceAccountName,
}

/// A pod as it is sent to ztunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Its network namespace goes to ztunnel.
    pub sandbox: SandboxRef,
    /// The pod's UID, ztunnel's key.
    pub uid: PodUid,
    /// The identity of the workload.
    pub info: WorkloadInfo,
    /// Verified; while it is `None` (unknown), ztunnel is asked to keep what it has.
    pub netns: Option<NetnsId>,
    /// Orders changes of the same sandbox.
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
