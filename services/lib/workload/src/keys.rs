//! The labels and annotations that inpod reads or writes. Names and values are Istio's.

/// Label on a pod or a namespace: `ambient` enrolls, `none` on a pod opts out.
pub const DATAPLANE_MODE: &str = "istio.io/dataplane-mode";

/// The value of [`DATAPLANE_MODE`] that enrolls.
pub const DATAPLANE_MODE_AMBIENT: &str = "ambient";

/// The value of [`DATAPLANE_MODE`] that keeps a pod out of an enrolled namespace.
pub const DATAPLANE_MODE_NONE: &str = "none";

/// Annotation on a pod, written by a sidecar injector: the pod has a proxy of its own and is never ambient.
pub const SIDECAR_STATUS: &str = "sidecar.istio.io/status";

/// Annotation on a pod, written by inpod and read by istiod: the pod's traffic is redirected.
pub const REDIRECTION: &str = "ambient.istio.io/redirection";

/// The value of [`REDIRECTION`] of an enrolled pod.
pub const REDIRECTION_ENABLED: &str = "enabled";
