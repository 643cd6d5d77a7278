//! Keys of Istio and Kubernetes that concern ambient pods.

use super::{Access, Key, Location, POD_EVENTS, row};

pub(super) const AMBIENT: &[Key] = &[
    row(
        POD_EVENTS,
        Access::Read,
        DATAPLANE_MODE,
        Location::PodLabel,
        "`ambient`, `none`",
        "`ambient` enrolls the pod, `none` keeps it out of an enrolled namespace; through the setting enablement_selectors",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        DATAPLANE_MODE,
        Location::NamespaceLabel,
        "`ambient`",
        "enrolls the namespace's pods; through the setting enablement_selectors",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        NAMESPACE_NAME,
        Location::NamespaceLabel,
        "the namespace's name",
        "lets enablement_selectors name namespaces, even those about which nothing else is known",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        DNS_CAPTURE,
        Location::PodAnnotation,
        "boolean",
        "whether ztunnel captures DNS queries; overrides the setting dns_capture",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        BYPASS_INBOUND_CAPTURE,
        Location::PodAnnotation,
        "boolean",
        "does not capture inbound TCP (\"ingress mode\")",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        REROUTE_VIRTUAL_INTERFACES,
        Location::PodAnnotation,
        "comma-separated interface names",
        "treats TCP connections that arrive on them as outbound",
    ),
    row(
        POD_EVENTS,
        Access::Written,
        REDIRECTION,
        Location::PodAnnotation,
        "`enabled`, `pending`",
        "announces to istiod that the pod's traffic is redirected; that of another agent is how its pods are found",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        STATIC_MIRROR,
        Location::PodAnnotation,
        "any",
        "marks a mirror of a static pod",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        STATIC_HASH,
        Location::PodAnnotation,
        "the UID of a static pod",
        "the UID of the static pod for kubelet and runtime",
    ),
];

/// Pod or namespace label: `ambient` enrolls pods, and `none` on a pod keeps the pod out.
pub const DATAPLANE_MODE: &str = "istio.io/dataplane-mode";

/// The value of [`DATAPLANE_MODE`] that enrolls a pod or all pods of a namespace.
pub const DATAPLANE_MODE_AMBIENT: &str = "ambient";

/// The value of [`DATAPLANE_MODE`] that keeps a pod out of an enrolled namespace.
pub const DATAPLANE_MODE_NONE: &str = "none";

/// The default of the setting `enablement_selectors`, from Istio's chart (`AMBIENT_ENABLEMENT_SELECTOR`).
pub const ISTIO_SELECTORS: &str = r#"[{"podSelector":{"matchLabels":{"istio.io/dataplane-mode":"ambient"}}},{"podSelector":{"matchExpressions":[{"key":"istio.io/dataplane-mode","operator":"NotIn","values":["none"]}]},"namespaceSelector":{"matchLabels":{"istio.io/dataplane-mode":"ambient"}}}]"#;

/// Namespace label with the namespace's name, set by the API server (Kubernetes, "Automatic labelling").
pub const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// Pod annotation set by the kubelet, which marks the mirror of a static pod.
pub const STATIC_MIRROR: &str = "kubernetes.io/config.mirror";

/// Pod annotation: the UID under which kubelet and runtime know a mirrored static pod.
pub const STATIC_HASH: &str = "kubernetes.io/config.hash";

/// Pod annotation, a boolean: whether ztunnel captures DNS queries. The annotation overrides the node's setting.
pub const DNS_CAPTURE: &str = "ambient.istio.io/dns-capture";

/// Pod annotation, a boolean: inbound TCP traffic is not captured ("ingress mode").
pub const BYPASS_INBOUND_CAPTURE: &str = "ambient.istio.io/bypass-inbound-capture";

/// Pod annotation: names of interfaces whose incoming TCP connections count as outbound.
pub const REROUTE_VIRTUAL_INTERFACES: &str = "istio.io/reroute-virtual-interfaces";

/// Pod annotation written by inpod, which announces to istiod that the pod's traffic is redirected.
pub const REDIRECTION: &str = "ambient.istio.io/redirection";

/// The value of [`REDIRECTION`] for an enrolled pod that a ztunnel has acknowledged.
pub const REDIRECTION_ENABLED: &str = "enabled";

/// The value of [`REDIRECTION`] before a ztunnel has acknowledged the pod.
pub const REDIRECTION_PENDING: &str = "pending";
