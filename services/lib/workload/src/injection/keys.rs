//! The labels and annotations of sidecar injection. Names and values are Istio's (istio-sidecar-install.md, 6);
//! [`TABLE`] says what each is for, nobody else spells them. What a custom template writes is the operator's own.

use crate::keys::{Access, Key, On};

/// The component that injects.
const INJECTOR: &str = "injector";

const fn key(
    name: &'static str,
    on: On,
    access: Access,
    values: &'static str,
    does: &'static str,
) -> Key {
    Key {
        name,
        on,
        access,
        by: INJECTOR,
        values,
        does,
    }
}

/// Every label and annotation that the injector reads or writes.
pub const TABLE: &[Key] = &[
    key(
        INJECT,
        On::PodLabel,
        Access::Read,
        "`true`, `false`",
        "whether the pod is given a sidecar; beats the annotation of the same name, any other value says nothing",
    ),
    key(
        INJECT,
        On::PodAnnotation,
        Access::Read,
        "`true`, `false`",
        "whether the pod is given a sidecar",
    ),
    key(
        NAMESPACE_INJECTION,
        On::NamespaceLabel,
        Access::Read,
        "`enabled`, `disabled`",
        "whether the API server asks the injector about pods of the namespace; read through the webhook's selectors",
    ),
    key(
        REVISION,
        On::PodLabel,
        Access::Read,
        "a revision",
        "which injector is asked about the pod; read through the webhook's selectors",
    ),
    key(
        REVISION,
        On::NamespaceLabel,
        Access::Read,
        "a revision",
        "which injector is asked about pods of the namespace; read through the webhook's selectors",
    ),
    key(
        REVISION,
        On::PodAnnotation,
        Access::Written,
        "a revision",
        "tells which injector gave the pod its sidecar",
    ),
    key(
        STATUS,
        On::PodAnnotation,
        Access::Written,
        "JSON",
        "tells what was injected, by name; a pod that has it is injected again without a change",
    ),
    key(
        TEMPLATES,
        On::PodAnnotation,
        Access::Read,
        "names of templates, with commas between them",
        "which templates are injected, instead of the default",
    ),
    key(
        NATIVE_SIDECAR,
        On::PodAnnotation,
        Access::Read,
        "`true`, `false`",
        "whether the proxy is an init container that goes on running, whatever nativeSidecars says",
    ),
    key(
        OVERRIDES,
        On::PodAnnotation,
        Access::Written,
        "JSON",
        "keeps what the pod itself said of containers that a template has too",
    ),
    key(
        PROXY_CONFIG,
        On::PodAnnotation,
        Access::Read,
        "YAML of Istio's ProxyConfig",
        "is laid over the mesh's ProxyConfig; holdApplicationUntilProxyStarts, interceptionMode, statusPort and proxyMetadata mean something here, all of it goes to the proxy",
    ),
    key(
        INTERCEPTION_MODE,
        On::PodAnnotation,
        Access::Written,
        "`REDIRECT`, `TPROXY`, `NONE`",
        "how inbound TCP is led to the sidecar, for the node; a pod's own word stays",
    ),
    key(
        INCLUDE_OUTBOUND_NETWORKS,
        On::PodAnnotation,
        Access::Written,
        "`*`, or networks as address/length, with commas between them",
        "which networks are reached through the sidecar; a pod's own word stays",
    ),
    key(
        EXCLUDE_OUTBOUND_NETWORKS,
        On::PodAnnotation,
        Access::Read,
        "networks as address/length, with commas between them",
        "is checked, for the node",
    ),
    key(
        INCLUDE_INBOUND_PORTS,
        On::PodAnnotation,
        Access::Written,
        "`*`, or ports, with commas between them",
        "which ports of the pod are led to the sidecar; a pod's own word stays",
    ),
    key(
        EXCLUDE_INBOUND_PORTS,
        On::PodAnnotation,
        Access::Written,
        "ports, with commas between them",
        "which ports of the pod are not: the pod's own and the agent's",
    ),
    key(
        EXCLUDE_OUTBOUND_PORTS,
        On::PodAnnotation,
        Access::Read,
        "ports, with commas between them",
        "is checked, for the node",
    ),
    key(
        INCLUDE_OUTBOUND_PORTS,
        On::PodAnnotation,
        Access::Read,
        "ports, with commas between them",
        "is checked, for the node",
    ),
    key(
        EXCLUDE_INTERFACES,
        On::PodAnnotation,
        Access::Read,
        "interface names, with commas between them",
        "is checked, for the node",
    ),
    key(
        KUBEVIRT_INTERFACES,
        On::PodAnnotation,
        Access::Read,
        "interface names, with commas between them",
        "is checked, for the node",
    ),
    key(
        STATUS_PORT,
        On::PodAnnotation,
        Access::Read,
        "a port, or `0`",
        "where the proxy's agent answers probes; `0`: the proxy has none of its own",
    ),
    key(
        READINESS_DELAY,
        On::PodAnnotation,
        Access::Read,
        "seconds",
        "of the proxy's readiness probe",
    ),
    key(
        READINESS_PERIOD,
        On::PodAnnotation,
        Access::Read,
        "seconds",
        "of the proxy's readiness probe",
    ),
    key(
        READINESS_FAILURES,
        On::PodAnnotation,
        Access::Read,
        "a number",
        "of the proxy's readiness probe",
    ),
    key(
        PROXY_IMAGE,
        On::PodAnnotation,
        Access::Read,
        "an image",
        "the proxy's image",
    ),
    key(
        PROXY_IMAGE_TYPE,
        On::PodAnnotation,
        Access::Read,
        "`default`, `debug`, `distroless`",
        "which build of the proxy's image: an ending of its tag",
    ),
    key(
        PROXY_CPU,
        On::PodAnnotation,
        Access::Read,
        "a quantity",
        "processor time that the proxy asks for",
    ),
    key(
        PROXY_CPU_LIMIT,
        On::PodAnnotation,
        Access::Read,
        "a quantity",
        "processor time that the proxy may have",
    ),
    key(
        PROXY_MEMORY,
        On::PodAnnotation,
        Access::Read,
        "a quantity",
        "memory that the proxy asks for",
    ),
    key(
        PROXY_MEMORY_LIMIT,
        On::PodAnnotation,
        Access::Read,
        "a quantity",
        "memory that the proxy may have",
    ),
    key(
        LOG_LEVEL,
        On::PodAnnotation,
        Access::Read,
        "a level",
        "the proxy's log level",
    ),
    key(
        COMPONENT_LOG_LEVEL,
        On::PodAnnotation,
        Access::Read,
        "component:level, with commas between them",
        "the log levels of the proxy's parts",
    ),
    key(
        AGENT_LOG_LEVEL,
        On::PodAnnotation,
        Access::Read,
        "scope:level, with commas between them",
        "the log levels of the proxy's agent",
    ),
    key(
        REWRITE_PROBES,
        On::PodAnnotation,
        Access::Read,
        "truth value",
        "whether probes of the application are led through the proxy's agent, whatever rewriteAppHTTPProbe says",
    ),
    key(
        CANONICAL_NAME,
        On::PodLabel,
        Access::Written,
        "a name",
        "under which name telemetry shows the workload",
    ),
    key(
        CANONICAL_REVISION,
        On::PodLabel,
        Access::Written,
        "a name",
        "under which revision telemetry shows the workload",
    ),
    key(
        TLS_MODE,
        On::PodLabel,
        Access::Written,
        "`istio`, `disabled`",
        "tells peers that the pod takes mutual TLS",
    ),
    key(
        TUNNEL,
        On::PodLabel,
        Access::Written,
        "`http`",
        "tells peers that the pod takes HBONE",
    ),
    key(
        NETWORK,
        On::PodLabel,
        Access::Written,
        "a network's name",
        "tells istiod in which network the pod is",
    ),
];

/// Label or annotation on a pod: whether the pod is given a sidecar.
pub const INJECT: &str = "sidecar.istio.io/inject";

/// Label on a namespace: whether the API server asks the injector about pods of the namespace.
pub const NAMESPACE_INJECTION: &str = "istio-injection";

/// Label on a pod or a namespace, annotation on a pod: which injector is asked about the pod.
pub const REVISION: &str = "istio.io/rev";

/// Annotation on a pod: tells what was injected, by name.
pub const STATUS: &str = "sidecar.istio.io/status";

/// Annotation on a pod: which templates are injected, instead of the default.
pub const TEMPLATES: &str = "inject.istio.io/templates";

/// Annotation on a pod: whether the proxy is an init container that goes on running, whatever nativeSidecars says.
pub const NATIVE_SIDECAR: &str = "sidecar.istio.io/nativeSidecar";

/// Annotation on a pod: keeps what the pod itself said of containers that a template has too.
pub const OVERRIDES: &str = "proxy.istio.io/overrides";

/// Annotation on a pod: is laid over the mesh's ProxyConfig.
pub const PROXY_CONFIG: &str = "proxy.istio.io/config";

/// Annotation on a pod: how inbound TCP is led to the sidecar, for the node.
pub const INTERCEPTION_MODE: &str = "sidecar.istio.io/interceptionMode";

/// Annotation on a pod: which networks are reached through the sidecar.
pub const INCLUDE_OUTBOUND_NETWORKS: &str = "traffic.sidecar.istio.io/includeOutboundIPRanges";

/// Annotation on a pod: is checked, for the node.
pub const EXCLUDE_OUTBOUND_NETWORKS: &str = "traffic.sidecar.istio.io/excludeOutboundIPRanges";

/// Annotation on a pod: which ports of the pod are led to the sidecar.
pub const INCLUDE_INBOUND_PORTS: &str = "traffic.sidecar.istio.io/includeInboundPorts";

/// Annotation on a pod: which ports of the pod are not.
pub const EXCLUDE_INBOUND_PORTS: &str = "traffic.sidecar.istio.io/excludeInboundPorts";

/// Annotation on a pod: is checked, for the node.
pub const EXCLUDE_OUTBOUND_PORTS: &str = "traffic.sidecar.istio.io/excludeOutboundPorts";

/// Annotation on a pod: is checked, for the node.
pub const INCLUDE_OUTBOUND_PORTS: &str = "traffic.sidecar.istio.io/includeOutboundPorts";

/// Annotation on a pod: is checked, for the node.
pub const EXCLUDE_INTERFACES: &str = "traffic.sidecar.istio.io/excludeInterfaces";

/// Annotation on a pod: is checked, for the node.
pub const KUBEVIRT_INTERFACES: &str = "traffic.sidecar.istio.io/kubevirtInterfaces";

/// Annotation on a pod: where the proxy's agent answers probes.
pub const STATUS_PORT: &str = "status.sidecar.istio.io/port";

/// Annotation on a pod: of the proxy's readiness probe.
pub const READINESS_DELAY: &str = "readiness.status.sidecar.istio.io/initialDelaySeconds";

/// Annotation on a pod: of the proxy's readiness probe.
pub const READINESS_PERIOD: &str = "readiness.status.sidecar.istio.io/periodSeconds";

/// Annotation on a pod: of the proxy's readiness probe.
pub const READINESS_FAILURES: &str = "readiness.status.sidecar.istio.io/failureThreshold";

/// Annotation on a pod: the proxy's image.
pub const PROXY_IMAGE: &str = "sidecar.istio.io/proxyImage";

/// Annotation on a pod: which build of the proxy's image.
pub const PROXY_IMAGE_TYPE: &str = "sidecar.istio.io/proxyImageType";

/// Annotation on a pod: processor time that the proxy asks for.
pub const PROXY_CPU: &str = "sidecar.istio.io/proxyCPU";

/// Annotation on a pod: processor time that the proxy may have.
pub const PROXY_CPU_LIMIT: &str = "sidecar.istio.io/proxyCPULimit";

/// Annotation on a pod: memory that the proxy asks for.
pub const PROXY_MEMORY: &str = "sidecar.istio.io/proxyMemory";

/// Annotation on a pod: memory that the proxy may have.
pub const PROXY_MEMORY_LIMIT: &str = "sidecar.istio.io/proxyMemoryLimit";

/// Annotation on a pod: the proxy's log level.
pub const LOG_LEVEL: &str = "sidecar.istio.io/logLevel";

/// Annotation on a pod: the log levels of the proxy's parts.
pub const COMPONENT_LOG_LEVEL: &str = "sidecar.istio.io/componentLogLevel";

/// Annotation on a pod: the log levels of the proxy's agent.
pub const AGENT_LOG_LEVEL: &str = "sidecar.istio.io/agentLogLevel";

/// Annotation on a pod: whether probes of the application are led through the proxy's agent, whatever rewriteAppHTTPProbe says.
pub const REWRITE_PROBES: &str = "sidecar.istio.io/rewriteAppHTTPProbers";

/// Label on a pod: under which name telemetry shows the workload.
pub const CANONICAL_NAME: &str = "service.istio.io/canonical-name";

/// Label on a pod: under which revision telemetry shows the workload.
pub const CANONICAL_REVISION: &str = "service.istio.io/canonical-revision";

/// Label on a pod: tells peers that the pod takes mutual TLS.
pub const TLS_MODE: &str = "security.istio.io/tlsMode";

/// Label on a pod: tells peers that the pod takes HBONE.
pub const TUNNEL: &str = "networking.istio.io/tunnel";

/// Label on a pod: tells istiod in which network the pod is.
pub const NETWORK: &str = "topology.istio.io/network";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_stands_on_an_object_once() {
        for (at, key) in TABLE.iter().enumerate() {
            let same = |other: &&Key| (other.name, other.on) == (key.name, key.on);
            assert_eq!(TABLE.iter().take(at).find(same), None, "{}", key.name);
        }
    }

    #[test]
    fn what_others_read_as_well_has_the_same_name_there() {
        assert_eq!(STATUS, crate::keys::SIDECAR_STATUS);
    }
}
