//! The labels and annotations that inpod reads or writes. Names and values are Istio's,
//! Kubernetes' own, or, below `inpod.io`, ours.

/// Label on a pod or a namespace: `ambient` enrolls, `none` on a pod opts out.
pub const DATAPLANE_MODE: &str = "istio.io/dataplane-mode";

/// The value of [`DATAPLANE_MODE`] that enrolls.
pub const DATAPLANE_MODE_AMBIENT: &str = "ambient";

/// The value of [`DATAPLANE_MODE`] that keeps a pod out of an enrolled namespace.
pub const DATAPLANE_MODE_NONE: &str = "none";

/// Annotation on a pod, written by a sidecar injector: the pod has a proxy of its own and is never ambient.
pub const SIDECAR_STATUS: &str = "sidecar.istio.io/status";

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
