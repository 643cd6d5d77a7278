//! The labels and annotations that inpod reads or writes. Names and values are Istio's,
//! Kubernetes' own, or, below `inpod.io`, ours. [`TABLE`] says what each is for; nobody else spells them.

/// A label or an annotation that inpod reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Its name.
    pub name: &'static str,
    /// What it stands on.
    pub on: On,
    /// What inpod does with it.
    pub access: Access,
    /// The component that does it.
    pub by: &'static str,
    /// What it may hold, for people.
    pub values: &'static str,
    /// What it does, for people: half a sentence.
    pub does: &'static str,
}

/// What a key stands on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// A label of a pod.
    PodLabel,
    /// An annotation of a pod.
    PodAnnotation,
    /// A label of a namespace.
    NamespaceLabel,
    /// An annotation of a namespace.
    NamespaceAnnotation,
    /// An annotation of the ConfigMap `inpod-leave`.
    LeaveAnnotation,
}

impl On {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Self::PodLabel => "pod, label",
            Self::PodAnnotation => "pod, annotation",
            Self::NamespaceLabel => "namespace, label",
            Self::NamespaceAnnotation => "namespace, annotation",
            Self::LeaveAnnotation => "ConfigMap `inpod-leave`, annotation",
        }
    }
}

/// What inpod does with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads what others wrote.
    Read,
    /// Writes it, and reads it to see what it says now.
    Written,
}

impl Access {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Written => "written",
        }
    }
}

const fn read(name: &'static str, on: On, values: &'static str, does: &'static str) -> Key {
    Key {
        name,
        on,
        access: Access::Read,
        by: POD_EVENTS,
        values,
        does,
    }
}

/// The only component with an API credential on a node.
const POD_EVENTS: &str = "pod-events";

/// Every label and annotation, Istio's and Kubernetes' first. What `enablement_selectors` and `ztunnel_pods` name
/// besides is the operator's own.
pub const TABLE: &[Key] = &[
    read(
        DATAPLANE_MODE,
        On::PodLabel,
        "`ambient`, `none`",
        "`ambient` enrolls the pod, `none` keeps it out of an enrolled namespace; read through the setting enablement_selectors",
    ),
    read(
        DATAPLANE_MODE,
        On::NamespaceLabel,
        "`ambient`",
        "enrolls the namespace's pods; read through the setting enablement_selectors",
    ),
    read(
        NAMESPACE_NAME,
        On::NamespaceLabel,
        "the namespace's name",
        "lets enablement_selectors name namespaces; known also where nothing else is known of a namespace",
    ),
    read(
        SIDECAR_STATUS,
        On::PodAnnotation,
        "any",
        "says that a sidecar was injected: the pod is never ambient, and is redirected to its sidecar",
    ),
    read(
        SIDECAR_INJECT,
        On::PodLabel,
        "`false`",
        "leaves a pod with a sidecar alone; beats the annotation of the same name",
    ),
    read(
        SIDECAR_INJECT,
        On::PodAnnotation,
        "`false`",
        "leaves a pod with a sidecar alone",
    ),
    read(
        INTERCEPTION_MODE,
        On::PodAnnotation,
        "`REDIRECT`, `TPROXY`, `NONE`",
        "how inbound TCP is led to the sidecar; `NONE` leaves the pod alone",
    ),
    read(
        SIDECAR_INCLUDE_NETWORKS,
        On::PodAnnotation,
        "`*`, or networks as address/length, with commas between them",
        "which networks are reached through the sidecar: all by default, none where it is empty",
    ),
    read(
        SIDECAR_EXCLUDE_NETWORKS,
        On::PodAnnotation,
        "networks as address/length, with commas between them",
        "which networks are not reached through the sidecar",
    ),
    read(
        SIDECAR_EXCLUDE_INBOUND_PORTS,
        On::PodAnnotation,
        "ports, with commas between them",
        "which ports of the pod are not led to the sidecar, besides 15020, 15021 and 15090",
    ),
    read(
        SIDECAR_INCLUDE_INBOUND_PORTS,
        On::PodAnnotation,
        "`*`, or ports, with commas between them",
        "which ports of the pod are led to the sidecar: all by default, none where it is empty",
    ),
    read(
        SIDECAR_EXCLUDE_OUTBOUND_PORTS,
        On::PodAnnotation,
        "ports, with commas between them",
        "which ports are not reached through the sidecar: 15020 by default",
    ),
    read(
        SIDECAR_INCLUDE_OUTBOUND_PORTS,
        On::PodAnnotation,
        "ports, with commas between them",
        "which ports are reached through the sidecar whatever their network",
    ),
    read(
        SIDECAR_EXCLUDE_INTERFACES,
        On::PodAnnotation,
        "interface names, with commas between them",
        "by which interfaces nothing is led to the sidecar",
    ),
    read(
        SIDECAR_KUBEVIRT_INTERFACES,
        On::PodAnnotation,
        "interface names, with commas between them",
        "as istio.io/reroute-virtual-interfaces, where that is missing; for pods with a sidecar alone",
    ),
    read(
        DNS_CAPTURE,
        On::PodAnnotation,
        "truth value",
        "whether name resolution goes to ztunnel, whatever the setting dns_capture says",
    ),
    read(
        BYPASS_INBOUND_CAPTURE,
        On::PodAnnotation,
        "truth value",
        "leaves inbound TCP alone (\"ingress mode\")",
    ),
    read(
        REROUTE_VIRTUAL_INTERFACES,
        On::PodAnnotation,
        "interface names, with commas between them",
        "takes TCP that arrives on them for outbound",
    ),
    Key {
        name: REDIRECTION,
        on: On::PodAnnotation,
        access: Access::Written,
        by: POD_EVENTS,
        values: "`enabled`, `pending`",
        does: "tells istiod whether the pod's traffic is redirected; what another agent wrote is how its pods are found",
    },
    read(
        STATIC_MIRROR,
        On::PodAnnotation,
        "any",
        "says that the pod only shows a static pod of the kubelet",
    ),
    read(
        STATIC_HASH,
        On::PodAnnotation,
        "the UID of a static pod",
        "what kubelet and runtime call a static pod",
    ),
    read(
        ON_UNKNOWN,
        On::NamespaceAnnotation,
        "`open`, `closed`",
        "whether pods start while it is not known whether they are to be in the mesh",
    ),
    read(
        ALLOW,
        On::NamespaceAnnotation,
        "`exclude`, `keep-existing`, with commas between them",
        "what pods of the namespace may ask for, besides what the setting pods_may says",
    ),
    read(
        EXCLUDE_OUTBOUND_PORTS,
        On::PodAnnotation,
        "TCP ports, with commas between them",
        "leaves connections to these ports alone; needs the permission `exclude`",
    ),
    read(
        EXCLUDE_OUTBOUND_CIDRS,
        On::PodAnnotation,
        "networks as address/length, with commas between them",
        "leaves connections to these networks alone; needs the permission `exclude`",
    ),
    read(
        EXCLUDE_INBOUND_PORTS,
        On::PodAnnotation,
        "TCP ports, with commas between them",
        "leaves connections to these ports of the pod alone; needs the permission `exclude`",
    ),
    read(
        EXCLUDE_INBOUND_CIDRS,
        On::PodAnnotation,
        "networks as address/length, with commas between them",
        "leaves connections from these networks alone; needs the permission `exclude`",
    ),
    read(
        KEEP_EXISTING_CONNECTIONS,
        On::PodAnnotation,
        "truth value",
        "lets connections from before the enrolment go on past ztunnel; needs the permission `keep-existing`",
    ),
    Key {
        name: DEFAULT_ENDPOINTS,
        on: On::PodAnnotation,
        access: Access::Read,
        by: "injector",
        values: "PORT=ENDPOINT, with commas between them; an endpoint is 127.0.0.1:PORT, [::1]:PORT, 0.0.0.0:PORT (the pod's own address) or unix:///PATH",
        does: "where the Envoy of the template `standalone` leads connections to these ports of the pod: to where they were going by default",
    },
    Key {
        name: UNINITIALIZED,
        on: On::PodLabel,
        access: Access::Written,
        by: "repair",
        values: "`true`",
        does: "says that the pod started without redirection and is not repaired; only with the setting label_pods, whose name and value broken_pod_label_key and broken_pod_label_value change",
    },
    Key {
        name: LEAVE_SINCE,
        on: On::LeaveAnnotation,
        access: Access::Written,
        by: "inpod",
        values: "seconds since 1970",
        does: "says since when nodes are to be left: receipts from before do not count",
    },
];

/// Label on a pod or a namespace: `ambient` enrolls, `none` on a pod opts out.
pub const DATAPLANE_MODE: &str = "istio.io/dataplane-mode";

/// The value of [`DATAPLANE_MODE`] that enrolls.
pub const DATAPLANE_MODE_AMBIENT: &str = "ambient";

/// The value of [`DATAPLANE_MODE`] that keeps a pod out of an enrolled namespace.
pub const DATAPLANE_MODE_NONE: &str = "none";

/// Who joins where nothing else is set: the two selectors of Istio's chart (`AMBIENT_ENABLEMENT_SELECTOR`).
pub const ISTIO_SELECTORS: &str = r#"[{"podSelector":{"matchLabels":{"istio.io/dataplane-mode":"ambient"}}},{"podSelector":{"matchExpressions":[{"key":"istio.io/dataplane-mode","operator":"NotIn","values":["none"]}]},"namespaceSelector":{"matchLabels":{"istio.io/dataplane-mode":"ambient"}}}]"#;

/// Label on every namespace, kept by the API server: its name (Kubernetes, "Automatic labelling").
pub const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// Annotation on a pod, written by a sidecar injector: the pod has a proxy of its own and is never ambient.
pub const SIDECAR_STATUS: &str = "sidecar.istio.io/status";

/// Label on a pod, written by `repair` where it may (Istio's `REPAIR_BROKEN_POD_LABEL_KEY`): the pod started without
/// redirection, and has none.
pub const UNINITIALIZED: &str = "cni.istio.io/uninitialized";

/// The value of [`UNINITIALIZED`].
pub const UNINITIALIZED_TRUE: &str = "true";

/// Label or annotation on a pod: whether a sidecar is injected.
pub const SIDECAR_INJECT: &str = "sidecar.istio.io/inject";

/// The one value of [`SIDECAR_INJECT`] that is read.
pub const SIDECAR_INJECT_FALSE: &str = "false";

/// Annotation on a pod: how inbound TCP is led to its sidecar.
pub const INTERCEPTION_MODE: &str = "sidecar.istio.io/interceptionMode";

/// The value of [`INTERCEPTION_MODE`] by which inbound TCP is led by destination NAT.
pub const INTERCEPTION_REDIRECT: &str = "REDIRECT";

/// The value of [`INTERCEPTION_MODE`] by which inbound TCP keeps the client's address.
pub const INTERCEPTION_TPROXY: &str = "TPROXY";

/// The value of [`INTERCEPTION_MODE`] by which nothing is redirected.
pub const INTERCEPTION_NONE: &str = "NONE";

/// Annotation on a pod: networks that are reached through its sidecar.
pub const SIDECAR_INCLUDE_NETWORKS: &str = "traffic.sidecar.istio.io/includeOutboundIPRanges";

/// Annotation on a pod: networks that are not reached through its sidecar.
pub const SIDECAR_EXCLUDE_NETWORKS: &str = "traffic.sidecar.istio.io/excludeOutboundIPRanges";

/// Annotation on a pod: ports of its own that are led to its sidecar.
pub const SIDECAR_INCLUDE_INBOUND_PORTS: &str = "traffic.sidecar.istio.io/includeInboundPorts";

/// Annotation on a pod: ports of its own that are not led to its sidecar.
pub const SIDECAR_EXCLUDE_INBOUND_PORTS: &str = "traffic.sidecar.istio.io/excludeInboundPorts";

/// Annotation on a pod: ports that are reached through its sidecar whatever their network.
pub const SIDECAR_INCLUDE_OUTBOUND_PORTS: &str = "traffic.sidecar.istio.io/includeOutboundPorts";

/// Annotation on a pod: ports that are not reached through its sidecar.
pub const SIDECAR_EXCLUDE_OUTBOUND_PORTS: &str = "traffic.sidecar.istio.io/excludeOutboundPorts";

/// Annotation on a pod: interfaces by which nothing is led to its sidecar.
pub const SIDECAR_EXCLUDE_INTERFACES: &str = "traffic.sidecar.istio.io/excludeInterfaces";

/// Annotation on a pod: the name that [`REROUTE_VIRTUAL_INTERFACES`] had before.
pub const SIDECAR_KUBEVIRT_INTERFACES: &str = "traffic.sidecar.istio.io/kubevirtInterfaces";

/// Annotation on a pod, written by a kubelet: the pod only shows a static pod that the kubelet runs by itself.
pub const STATIC_MIRROR: &str = "kubernetes.io/config.mirror";

/// Annotation on a pod that shows a static one: the UID by which kubelet and runtime call it.
pub const STATIC_HASH: &str = "kubernetes.io/config.hash";

/// Annotation on a namespace: whether its pods start while it is not known whether they are to be in the mesh.
pub const ON_UNKNOWN: &str = "inpod.io/on-unknown";

/// The value of [`ON_UNKNOWN`] that lets pods through.
pub const ON_UNKNOWN_OPEN: &str = "open";

/// The value of [`ON_UNKNOWN`] that holds pods back.
pub const ON_UNKNOWN_CLOSED: &str = "closed";

/// Annotation on a namespace: what its pods may ask for that takes traffic past ztunnel. Words, with commas between
/// them.
pub const ALLOW: &str = "inpod.io/allow";

/// The word in [`ALLOW`] and in the setting `pods_may` that permits exclusions.
pub const ALLOW_EXCLUDE: &str = "exclude";

/// The word in [`ALLOW`] and in the setting `pods_may` that permits [`KEEP_EXISTING_CONNECTIONS`].
pub const ALLOW_KEEP_EXISTING: &str = "keep-existing";

/// Annotation on a pod: TCP ports, with commas between them. Connections to them are not captured.
pub const EXCLUDE_OUTBOUND_PORTS: &str = "inpod.io/exclude-outbound-ports";

/// Annotation on a pod: networks, with commas between them. Connections to them are not captured.
pub const EXCLUDE_OUTBOUND_CIDRS: &str = "inpod.io/exclude-outbound-cidrs";

/// Annotation on a pod: TCP ports of its own, with commas between them. Connections to them are not captured.
pub const EXCLUDE_INBOUND_PORTS: &str = "inpod.io/exclude-inbound-ports";

/// Annotation on a pod: networks, with commas between them. Connections from them are not captured.
pub const EXCLUDE_INBOUND_CIDRS: &str = "inpod.io/exclude-inbound-cidrs";

/// Annotation on a pod, a truth value: connections from before its enrolment go on as they are.
pub const KEEP_EXISTING_CONNECTIONS: &str = "inpod.io/keep-existing-connections";

/// Annotation on a pod: where the proxy that the injector's template `standalone` gives it leads inbound connections.
pub const DEFAULT_ENDPOINTS: &str = "inpod.io/default-endpoints";

/// On the ConfigMap by which nodes are left: when that was said.
pub const LEAVE_SINCE: &str = "inpod.io/leave-since";

/// Annotation on a pod, a truth value: whether its name resolution goes to ztunnel, whatever the node says.
pub const DNS_CAPTURE: &str = "ambient.istio.io/dns-capture";

/// Annotation on a pod, a truth value: its inbound traffic is not captured ("ingress mode").
pub const BYPASS_INBOUND_CAPTURE: &str = "ambient.istio.io/bypass-inbound-capture";

/// Annotation on a pod: interfaces, with commas between them, whose arriving TCP is taken for outbound.
pub const REROUTE_VIRTUAL_INTERFACES: &str = "istio.io/reroute-virtual-interfaces";

/// Annotation on a pod, written by inpod and read by istiod: the pod's traffic is redirected.
pub const REDIRECTION: &str = "ambient.istio.io/redirection";

/// The value of [`REDIRECTION`] of an enrolled pod.
pub const REDIRECTION_ENABLED: &str = "enabled";

/// The value of [`REDIRECTION`] of a pod that is to be in the mesh and that no ztunnel has acknowledged yet.
pub const REDIRECTION_PENDING: &str = "pending";

#[cfg(test)]
mod tests;
