//! Labels and annotations of Istio for pods with a sidecar: the injector writes most of them, the node reads them.

use super::{Access, INJECTOR, Key, Location, POD_EVENTS, row};

pub(super) const SIDECAR: &[Key] = &[
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_STATUS,
        Location::PodAnnotation,
        "any",
        "says that a sidecar was injected: the pod is never ambient, and is redirected to its sidecar",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_INJECT,
        Location::PodLabel,
        "`false`",
        "leaves a pod with a sidecar alone; beats the annotation of the same name",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_INJECT,
        Location::PodAnnotation,
        "`false`",
        "leaves a pod with a sidecar alone",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        INTERCEPTION_MODE,
        Location::PodAnnotation,
        "`REDIRECT`, `TPROXY`, `NONE`",
        "how inbound TCP is led to the sidecar; `NONE` leaves the pod alone",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_INCLUDE_NETWORKS,
        Location::PodAnnotation,
        "`*`, or networks as address/length, with commas between them",
        "which networks are reached through the sidecar: all by default, none where it is empty",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_EXCLUDE_NETWORKS,
        Location::PodAnnotation,
        "networks as address/length, with commas between them",
        "which networks are not reached through the sidecar",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_EXCLUDE_INBOUND_PORTS,
        Location::PodAnnotation,
        "ports, with commas between them",
        "which ports of the pod are not led to the sidecar, besides 15020, 15021 and 15090",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_INCLUDE_INBOUND_PORTS,
        Location::PodAnnotation,
        "`*`, or ports, with commas between them",
        "which ports of the pod are led to the sidecar: all by default, none where it is empty",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_EXCLUDE_OUTBOUND_PORTS,
        Location::PodAnnotation,
        "ports, with commas between them",
        "which ports are not reached through the sidecar: 15020 by default",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_INCLUDE_OUTBOUND_PORTS,
        Location::PodAnnotation,
        "ports, with commas between them",
        "which ports are reached through the sidecar whatever their network",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_EXCLUDE_INTERFACES,
        Location::PodAnnotation,
        "interface names, with commas between them",
        "by which interfaces nothing is led to the sidecar",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_KUBEVIRT_INTERFACES,
        Location::PodAnnotation,
        "interface names, with commas between them",
        "as istio.io/reroute-virtual-interfaces, where that is missing; for pods with a sidecar alone",
    ),
    row(
        INJECTOR,
        Access::Read,
        SIDECAR_INJECT,
        Location::PodLabel,
        "`true`, `false`",
        "whether the pod is given a sidecar; beats the annotation of the same name, any other value says nothing",
    ),
    row(
        INJECTOR,
        Access::Read,
        SIDECAR_INJECT,
        Location::PodAnnotation,
        "`true`, `false`",
        "whether the pod is given a sidecar",
    ),
    row(
        INJECTOR,
        Access::Written,
        SIDECAR_STATUS,
        Location::PodAnnotation,
        "JSON",
        "tells what was injected, by name; a pod that has it is injected again without a change",
    ),
    row(
        INJECTOR,
        Access::Written,
        INTERCEPTION_MODE,
        Location::PodAnnotation,
        "`REDIRECT`, `TPROXY`, `NONE`",
        "how inbound TCP is led to the sidecar, for the node; a pod's own word stays",
    ),
    row(
        INJECTOR,
        Access::Written,
        SIDECAR_INCLUDE_NETWORKS,
        Location::PodAnnotation,
        "`*`, or networks as address/length, with commas between them",
        "which networks are reached through the sidecar; a pod's own word stays",
    ),
    row(
        INJECTOR,
        Access::Read,
        SIDECAR_EXCLUDE_NETWORKS,
        Location::PodAnnotation,
        "networks as address/length, with commas between them",
        "is checked, for the node",
    ),
    row(
        INJECTOR,
        Access::Written,
        SIDECAR_INCLUDE_INBOUND_PORTS,
        Location::PodAnnotation,
        "`*`, or ports, with commas between them",
        "which ports of the pod are led to the sidecar; a pod's own word stays",
    ),
    row(
        INJECTOR,
        Access::Written,
        SIDECAR_EXCLUDE_INBOUND_PORTS,
        Location::PodAnnotation,
        "ports, with commas between them",
        "which ports of the pod are not: the pod's own and the agent's",
    ),
    row(
        INJECTOR,
        Access::Read,
        SIDECAR_EXCLUDE_OUTBOUND_PORTS,
        Location::PodAnnotation,
        "ports, with commas between them",
        "is checked, for the node",
    ),
    row(
        INJECTOR,
        Access::Read,
        SIDECAR_INCLUDE_OUTBOUND_PORTS,
        Location::PodAnnotation,
        "ports, with commas between them",
        "is checked, for the node",
    ),
    row(
        INJECTOR,
        Access::Read,
        SIDECAR_EXCLUDE_INTERFACES,
        Location::PodAnnotation,
        "interface names, with commas between them",
        "is checked, for the node",
    ),
    row(
        INJECTOR,
        Access::Read,
        SIDECAR_KUBEVIRT_INTERFACES,
        Location::PodAnnotation,
        "interface names, with commas between them",
        "is checked, for the node",
    ),
];

/// Annotation on a pod, written by a sidecar injector: the pod has a proxy of its own and is never ambient.
pub const SIDECAR_STATUS: &str = "sidecar.istio.io/status";

/// Label or annotation on a pod: whether a sidecar is injected.
pub const SIDECAR_INJECT: &str = "sidecar.istio.io/inject";

/// The only value of [`SIDECAR_INJECT`] that the node reads.
pub const SIDECAR_INJECT_FALSE: &str = "false";

/// Annotation on a pod: how inbound TCP is redirected to its sidecar.
pub const INTERCEPTION_MODE: &str = "sidecar.istio.io/interceptionMode";

/// The value of [`INTERCEPTION_MODE`] that redirects inbound TCP by destination NAT.
pub const INTERCEPTION_REDIRECT: &str = "REDIRECT";

/// The value of [`INTERCEPTION_MODE`] that keeps the client's address of inbound TCP.
pub const INTERCEPTION_TPROXY: &str = "TPROXY";

/// The value of [`INTERCEPTION_MODE`] that redirects nothing.
pub const INTERCEPTION_NONE: &str = "NONE";

/// Annotation on a pod: networks to which connections go through its sidecar.
pub const SIDECAR_INCLUDE_NETWORKS: &str = "traffic.sidecar.istio.io/includeOutboundIPRanges";

/// Annotation on a pod: networks to which connections bypass its sidecar.
pub const SIDECAR_EXCLUDE_NETWORKS: &str = "traffic.sidecar.istio.io/excludeOutboundIPRanges";

/// Annotation on a pod: its ports on which connections go through its sidecar.
pub const SIDECAR_INCLUDE_INBOUND_PORTS: &str = "traffic.sidecar.istio.io/includeInboundPorts";

/// Annotation on a pod: its ports on which connections bypass its sidecar.
pub const SIDECAR_EXCLUDE_INBOUND_PORTS: &str = "traffic.sidecar.istio.io/excludeInboundPorts";

/// Annotation on a pod: ports to which connections go through its sidecar, whatever their network.
pub const SIDECAR_INCLUDE_OUTBOUND_PORTS: &str = "traffic.sidecar.istio.io/includeOutboundPorts";

/// Annotation on a pod: ports to which connections bypass its sidecar.
pub const SIDECAR_EXCLUDE_OUTBOUND_PORTS: &str = "traffic.sidecar.istio.io/excludeOutboundPorts";

/// Annotation on a pod: interfaces on which nothing is redirected to its sidecar.
pub const SIDECAR_EXCLUDE_INTERFACES: &str = "traffic.sidecar.istio.io/excludeInterfaces";

/// Annotation on a pod: the former name of [`super::REROUTE_VIRTUAL_INTERFACES`].
pub const SIDECAR_KUBEVIRT_INTERFACES: &str = "traffic.sidecar.istio.io/kubevirtInterfaces";
