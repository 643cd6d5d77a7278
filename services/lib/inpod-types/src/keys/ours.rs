//! Keys of inpod itself, of `repair` and of the uninstall.

use super::{Access, CLIENT, Key, Location, POD_EVENTS, REPAIR, row};

pub(super) const OURS: &[Key] = &[
    row(
        POD_EVENTS,
        Access::Read,
        ON_UNKNOWN,
        Location::NamespaceAnnotation,
        "`open`, `closed`",
        "whether pods start while it is unknown whether they belong to the mesh",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        ALLOW,
        Location::NamespaceAnnotation,
        "comma-separated `exclude`, `keep-existing`",
        "the ways in which its pods may bypass ztunnel, in addition to the setting pods_may",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        EXCLUDE_OUTBOUND_PORTS,
        Location::PodAnnotation,
        "comma-separated TCP ports",
        "does not capture connections to these ports; needs the permission `exclude`",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        EXCLUDE_OUTBOUND_CIDRS,
        Location::PodAnnotation,
        "comma-separated networks (address/length)",
        "does not capture connections to these networks; needs the permission `exclude`",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        EXCLUDE_INBOUND_PORTS,
        Location::PodAnnotation,
        "comma-separated TCP ports",
        "does not capture connections to these ports of the pod; needs the permission `exclude`",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        EXCLUDE_INBOUND_CIDRS,
        Location::PodAnnotation,
        "comma-separated networks (address/length)",
        "does not capture connections from these networks; needs the permission `exclude`",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        KEEP_EXISTING_CONNECTIONS,
        Location::PodAnnotation,
        "boolean",
        "lets connections from before the enrollment continue past ztunnel; needs the permission `keep-existing`",
    ),
    row(
        REPAIR,
        Access::Written,
        UNINITIALIZED,
        Location::PodLabel,
        "`true`",
        "marks a pod that started without redirection and is not repaired; only with the setting label_pods, name and value from broken_pod_label_key and broken_pod_label_value",
    ),
    row(
        CLIENT,
        Access::Written,
        LEAVE_SINCE,
        Location::LeaveAnnotation,
        "seconds since 1970",
        "the time of the request to remove inpod: earlier receipts do not count",
    ),
];

/// Pod label written by `repair`, if permitted (Istio's `REPAIR_BROKEN_POD_LABEL_KEY`), on a pod that started and is
/// still without redirection.
pub const UNINITIALIZED: &str = "cni.istio.io/uninitialized";

/// The default value of the label [`UNINITIALIZED`].
pub const UNINITIALIZED_TRUE: &str = "true";

/// Namespace annotation: whether pods start while their membership in the mesh is unknown.
pub const ON_UNKNOWN: &str = "inpod.io/on-unknown";

/// The value of [`ON_UNKNOWN`] that admits pods unenrolled.
pub const ON_UNKNOWN_OPEN: &str = "open";

/// The value of [`ON_UNKNOWN`] that keeps pods from starting.
pub const ON_UNKNOWN_CLOSED: &str = "closed";

/// Namespace annotation: the ways in which pods may bypass ztunnel, comma-separated.
pub const ALLOW: &str = "inpod.io/allow";

/// The value of [`ALLOW`] and of the setting `pods_may` that permits exclusions.
pub const ALLOW_EXCLUDE: &str = "exclude";

/// The value of [`ALLOW`] and of the setting `pods_may` that permits [`KEEP_EXISTING_CONNECTIONS`].
pub const ALLOW_KEEP_EXISTING: &str = "keep-existing";

/// Pod annotation: TCP ports to which outbound connections are not captured.
pub const EXCLUDE_OUTBOUND_PORTS: &str = "inpod.io/exclude-outbound-ports";

/// Pod annotation: networks to which outbound connections are not captured.
pub const EXCLUDE_OUTBOUND_CIDRS: &str = "inpod.io/exclude-outbound-cidrs";

/// Pod annotation: the pod's own TCP ports to which connections are not captured.
pub const EXCLUDE_INBOUND_PORTS: &str = "inpod.io/exclude-inbound-ports";

/// Pod annotation: networks from which inbound connections are not captured.
pub const EXCLUDE_INBOUND_CIDRS: &str = "inpod.io/exclude-inbound-cidrs";

/// Pod annotation, a boolean: connections from before the enrollment continue past ztunnel.
pub const KEEP_EXISTING_CONNECTIONS: &str = "inpod.io/keep-existing-connections";

/// Annotation of the ConfigMap `inpod-leave`: the time of the request, because earlier receipts do not count.
pub const LEAVE_SINCE: &str = "inpod.io/leave-since";
