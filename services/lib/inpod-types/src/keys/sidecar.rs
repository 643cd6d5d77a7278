//! Istio's keys for pods with sidecars, most of which the injector writes and the node reads.

use super::{Access, INJECTOR, Key, Location, POD_EVENTS, row};

pub(super) const SIDECAR: &[Key] = &[
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_STATUS,
        Location::PodAnnotation,
        "any",
        "marks a pod with an injected sidecar: it is never ambient, and its traffic is redirected to the sidecar",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_INJECT,
        Location::PodLabel,
        "`false`",
        "does not redirect a pod with a sidecar; overrides the annotation of the same name",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_INJECT,
        Location::PodAnnotation,
        "`false`",
        "does not redirect a pod with a sidecar",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        INTERCEPTION_MODE,
        Location::PodAnnotation,
        "`REDIRECT`, `TPROXY`, `NONE`",
        "how inbound TCP is redirected to the sidecar; `NONE` redirects nothing",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_INCLUDE_NETWORKS,
        Location::PodAnnotation,
        "`*`, or comma-separated networks (address/length)",
        "networks to which connections go through the sidecar: all by default, none if empty",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_EXCLUDE_NETWORKS,
        Location::PodAnnotation,
        "comma-separated networks (address/length)",
        "networks to which connections bypass the sidecar",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_EXCLUDE_INBOUND_PORTS,
        Location::PodAnnotation,
        "comma-separated ports",
        "ports of the pod on which connections bypass the sidecar, in addition to 15020, 15021 and 15090",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_INCLUDE_INBOUND_PORTS,
        Location::PodAnnotation,
        "`*`, or comma-separated ports",
        "ports of the pod on which connections go through the sidecar: all by default, none if empty",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_EXCLUDE_OUTBOUND_PORTS,
        Location::PodAnnotation,
        "comma-separated ports",
        "ports to which connections bypass the sidecar: 15020 by default",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_INCLUDE_OUTBOUND_PORTS,
        Location::PodAnnotation,
        "comma-separated ports",
        "ports to which connections go through the sidecar, whatever the network",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_EXCLUDE_INTERFACES,
        Location::PodAnnotation,
        "comma-separated interface names",
        "interfaces on which nothing is redirected to the sidecar",
    ),
    row(
        POD_EVENTS,
        Access::Read,
        SIDECAR_KUBEVIRT_INTERFACES,
        Location::PodAnnotation,
        "comma-separated interface names",
        "same as istio.io/reroute-virtual-interfaces, if that is missing; only for pods with a sidecar",
    ),
    row(
        INJECTOR,
        Access::Read,
        SIDECAR_INJECT,
        Location::PodLabel,
        "`true`, `false`",
        "whether a sidecar is injected; overrides the annotation of the same name, other values are ignored",
    ),
    row(
        INJECTOR,
        Access::Read,
        SIDECAR_INJECT,
        Location::PodAnnotation,
        "`true`, `false`",
        "whether a sidecar is injected",
    ),
    row(
        INJECTOR,
        Access::Written,
        SIDECAR_STATUS,
        Location::PodAnnotation,
        "JSON",
        "lists what was injected; injecting a pod that has it again changes nothing",
    ),
    row(
        INJECTOR,
        Access::Written,
        INTERCEPTION_MODE,
        Location::PodAnnotation,
        "`REDIRECT`, `TPROXY`, `NONE`",
        "how inbound TCP is redirected to the sidecar, for the node; a value of the pod is kept",
    ),
    row(
        INJECTOR,
        Access::Written,
        SIDECAR_INCLUDE_NETWORKS,
        Location::PodAnnotation,
        "`*`, or comma-separated networks (address/length)",
        "networks to which connections go through the sidecar; a value of the pod is kept",
    ),
    row(
        INJECTOR,
        Access::Read,
        SIDECAR_EXCLUDE_NETWORKS,
        Location::PodAnnotation,
        "comma-separated networks (address/length)",
        "is validated for the node",
    ),
    row(
        INJECTOR,
        Access::Written,
        SIDECAR_INCLUDE_INBOUND_PORTS,
        Location::PodAnnotation,
        "`*`, or comma-separated ports",
        "ports of the pod on which connections go through the sidecar; a value of the pod is kept",
    ),
    row(
        INJECTOR,
        Access::Written,
        SIDECAR_EXCLUDE_INBOUND_PORTS,
        Location::PodAnnotation,
        "comma-separated ports",
        "ports of the pod on which connections bypass the sidecar: the pod's own value and the agent's ports",
    ),
    row(
        INJECTOR,
        Access::Read,
        SIDECAR_EXCLUDE_OUTBOUND_PORTS,
        Location::PodAnnotation,
        "comma-separated ports",
        "is validated for the node",
    ),
    row(
        INJECTOR,
        Access::Read,
        SIDECAR_INCLUDE_OUTBOUND_PORTS,
        Location::PodAnnotation,
        "comma-separated ports",
        "is validated for the node",
    ),
    row(
        INJECTOR,
        Access::Read,
        SIDECAR_EXCLUDE_INTERFACES,
        Location::PodAnnotation,
        "comma-separated interface names",
        "is validated for the node",
    ),
    row(
        INJECTOR,
        Access::Read,
        SIDECAR_KUBEVIRT_INTERFACES,
        Location::PodAnnotation,
        "comma-separated interface names",
        "is validated for the node",
    ),
];

/// Pod annotation written by a sidecar injector, which keeps the pod from ever being ambient.
pub const SIDECAR_STATUS: &str = "sidecar.istio.io/status";

/// Pod label or annotation: whether the injector adds a sidecar to the pod.
pub const SIDECAR_INJECT: &str = "sidecar.istio.io/inject";

/// The only value of [`SIDECAR_INJECT`] that the node reads, to leave the pod without redirection.
pub const SIDECAR_INJECT_FALSE: &str = "false";

/// Pod annotation: the way in which inbound TCP connections are redirected to the sidecar.
pub const INTERCEPTION_MODE: &str = "sidecar.istio.io/interceptionMode";

/// The value of [`INTERCEPTION_MODE`] that redirects by destination NAT.
pub const INTERCEPTION_REDIRECT: &str = "REDIRECT";

/// The value of [`INTERCEPTION_MODE`] that preserves the addresses of clients.
pub const INTERCEPTION_TPROXY: &str = "TPROXY";

/// The value of [`INTERCEPTION_MODE`] that redirects no traffic.
pub const INTERCEPTION_NONE: &str = "NONE";

/// Pod annotation: networks to which outbound connections go through the sidecar.
pub const SIDECAR_INCLUDE_NETWORKS: &str = "traffic.sidecar.istio.io/includeOutboundIPRanges";

/// Pod annotation: networks to which outbound connections bypass the sidecar.
pub const SIDECAR_EXCLUDE_NETWORKS: &str = "traffic.sidecar.istio.io/excludeOutboundIPRanges";

/// Pod annotation: the pod's own ports on which connections go through the sidecar.
pub const SIDECAR_INCLUDE_INBOUND_PORTS: &str = "traffic.sidecar.istio.io/includeInboundPorts";

/// Pod annotation: the pod's own ports on which connections bypass the sidecar.
pub const SIDECAR_EXCLUDE_INBOUND_PORTS: &str = "traffic.sidecar.istio.io/excludeInboundPorts";

/// Pod annotation: ports to which outbound connections go through the sidecar, in any network.
pub const SIDECAR_INCLUDE_OUTBOUND_PORTS: &str = "traffic.sidecar.istio.io/includeOutboundPorts";

/// Pod annotation: ports to which outbound connections bypass the sidecar.
pub const SIDECAR_EXCLUDE_OUTBOUND_PORTS: &str = "traffic.sidecar.istio.io/excludeOutboundPorts";

/// Pod annotation: interfaces on which no traffic is redirected to the sidecar.
pub const SIDECAR_EXCLUDE_INTERFACES: &str = "traffic.sidecar.istio.io/excludeInterfaces";

/// Pod annotation: the former name of [`super::REROUTE_VIRTUAL_INTERFACES`], for pods with a sidecar.
pub const SIDECAR_KUBEVIRT_INTERFACES: &str = "traffic.sidecar.istio.io/kubevirtInterfaces";
