//! Keys that the injector reads or writes. Custom templates may write further keys.

use super::{Access, INJECTOR, Key, Location, row};

pub(super) const INJECTION: &[Key] = &[
    row(
        INJECTOR,
        Access::Read,
        NAMESPACE_INJECTION,
        Location::NamespaceLabel,
        "`enabled`, `disabled`",
        "whether the API server calls the injector for pods of the namespace; through the webhook's selectors",
    ),
    row(
        INJECTOR,
        Access::Read,
        REVISION,
        Location::PodLabel,
        "a revision",
        "the revision of the injector for the pod; through the webhook's selectors",
    ),
    row(
        INJECTOR,
        Access::Read,
        REVISION,
        Location::NamespaceLabel,
        "a revision",
        "the revision of the injector for pods of the namespace; through the webhook's selectors",
    ),
    row(
        INJECTOR,
        Access::Written,
        REVISION,
        Location::PodAnnotation,
        "a revision",
        "the revision of the injector that added the sidecar",
    ),
    row(
        INJECTOR,
        Access::Read,
        TEMPLATES,
        Location::PodAnnotation,
        "comma-separated names of templates",
        "templates to inject instead of the default",
    ),
    row(
        INJECTOR,
        Access::Read,
        NATIVE_SIDECAR,
        Location::PodAnnotation,
        "`true`, `false`",
        "whether the proxy is a native sidecar (a restartable init container); overrides nativeSidecars",
    ),
    row(
        INJECTOR,
        Access::Written,
        OVERRIDES,
        Location::PodAnnotation,
        "JSON",
        "keeps the pod's own settings for containers that a template has too",
    ),
    row(
        INJECTOR,
        Access::Read,
        PROXY_CONFIG,
        Location::PodAnnotation,
        "YAML of Istio's ProxyConfig",
        "overrides the mesh's ProxyConfig; the injector uses holdApplicationUntilProxyStarts, interceptionMode, statusPort and proxyMetadata, and passes everything to the proxy",
    ),
    row(
        INJECTOR,
        Access::Read,
        STATUS_PORT,
        Location::PodAnnotation,
        "a port, or `0`",
        "the port on which the proxy's agent answers probes; `0` removes the proxy's own probes",
    ),
    row(
        INJECTOR,
        Access::Read,
        READINESS_DELAY,
        Location::PodAnnotation,
        "seconds",
        "initial delay of the proxy's readiness probe",
    ),
    row(
        INJECTOR,
        Access::Read,
        READINESS_PERIOD,
        Location::PodAnnotation,
        "seconds",
        "period of the proxy's readiness probe",
    ),
    row(
        INJECTOR,
        Access::Read,
        READINESS_FAILURES,
        Location::PodAnnotation,
        "a number",
        "failure threshold of the proxy's readiness probe",
    ),
    row(
        INJECTOR,
        Access::Read,
        PROXY_IMAGE,
        Location::PodAnnotation,
        "an image",
        "the proxy's image",
    ),
    row(
        INJECTOR,
        Access::Read,
        PROXY_IMAGE_TYPE,
        Location::PodAnnotation,
        "`default`, `debug`, `distroless`",
        "the variant of the proxy's image: a suffix of its tag",
    ),
    row(
        INJECTOR,
        Access::Read,
        PROXY_CPU,
        Location::PodAnnotation,
        "a quantity",
        "CPU request of the proxy",
    ),
    row(
        INJECTOR,
        Access::Read,
        PROXY_CPU_LIMIT,
        Location::PodAnnotation,
        "a quantity",
        "CPU limit of the proxy",
    ),
    row(
        INJECTOR,
        Access::Read,
        PROXY_MEMORY,
        Location::PodAnnotation,
        "a quantity",
        "memory request of the proxy",
    ),
    row(
        INJECTOR,
        Access::Read,
        PROXY_MEMORY_LIMIT,
        Location::PodAnnotation,
        "a quantity",
        "memory limit of the proxy",
    ),
    row(
        INJECTOR,
        Access::Read,
        LOG_LEVEL,
        Location::PodAnnotation,
        "a level",
        "the proxy's log level",
    ),
    row(
        INJECTOR,
        Access::Read,
        COMPONENT_LOG_LEVEL,
        Location::PodAnnotation,
        "comma-separated component:level",
        "the log levels of the proxy's components",
    ),
    row(
        INJECTOR,
        Access::Read,
        AGENT_LOG_LEVEL,
        Location::PodAnnotation,
        "comma-separated scope:level",
        "the log levels of the proxy's agent",
    ),
    row(
        INJECTOR,
        Access::Read,
        REWRITE_PROBES,
        Location::PodAnnotation,
        "boolean",
        "whether the application's probes go through the proxy's agent; overrides rewriteAppHTTPProbe",
    ),
    row(
        INJECTOR,
        Access::Written,
        CANONICAL_NAME,
        Location::PodLabel,
        "a name",
        "the name of the workload in telemetry",
    ),
    row(
        INJECTOR,
        Access::Written,
        CANONICAL_REVISION,
        Location::PodLabel,
        "a name",
        "the revision of the workload in telemetry",
    ),
    row(
        INJECTOR,
        Access::Written,
        TLS_MODE,
        Location::PodLabel,
        "`istio`, `disabled`",
        "announces to peers that the pod supports mutual TLS",
    ),
    row(
        INJECTOR,
        Access::Written,
        TUNNEL,
        Location::PodLabel,
        "`http`",
        "announces to peers that the pod supports HBONE",
    ),
    row(
        INJECTOR,
        Access::Written,
        NETWORK,
        Location::PodLabel,
        "a network's name",
        "the network of the pod, for istiod",
    ),
    row(
        INJECTOR,
        Access::Read,
        MERGE_METRICS,
        Location::PodAnnotation,
        "boolean",
        "whether the proxy's agent merges the application's metrics; overrides enablePrometheusMerge",
    ),
    row(
        INJECTOR,
        Access::Read,
        SCRAPE_TARGETS,
        Location::PodAnnotation,
        "comma-separated PORT:PATH",
        "where the agent scrapes the application's metrics, instead of prometheus.io/port and prometheus.io/path",
    ),
    row(
        INJECTOR,
        Access::Written,
        SCRAPE,
        Location::PodAnnotation,
        "boolean",
        "makes Prometheus scrape the pod; if the pod sets it to `false`, in any spelling, all three stay unchanged",
    ),
    row(
        INJECTOR,
        Access::Written,
        SCRAPE_PATH,
        Location::PodAnnotation,
        "a path",
        "the agent's metrics path; the pod's own value is passed to the agent",
    ),
    row(
        INJECTOR,
        Access::Written,
        SCRAPE_PORT,
        Location::PodAnnotation,
        "a port",
        "the agent's metrics port; the pod's own value is passed to the agent",
    ),
    row(
        INJECTOR,
        Access::Written,
        SECURE_PORT,
        Location::PodAnnotation,
        "a port",
        "the port of the same metrics with mutual TLS, if the proxy's environment has ENVOY_SECURE_MERGED_METRICS_PORT",
    ),
    row(
        INJECTOR,
        Access::Written,
        MULTUS_NETWORKS,
        Location::PodAnnotation,
        "networks, as a list of names or of JSON objects",
        "makes Multus call the node's plugin, if multusNetwork names its network; the pod's own networks are kept",
    ),
];

/// Namespace label: whether the API server calls the injector for pods of the namespace.
pub const NAMESPACE_INJECTION: &str = "istio-injection";

/// Label of a pod or namespace, and annotation of a pod: the revision of the injector.
pub const REVISION: &str = "istio.io/rev";

/// Pod annotation: the templates to inject instead of the default templates.
pub const TEMPLATES: &str = "inject.istio.io/templates";

/// Pod annotation: whether the proxy is a native sidecar (a restartable init container). The annotation overrides
/// nativeSidecars.
pub const NATIVE_SIDECAR: &str = "sidecar.istio.io/nativeSidecar";

/// Pod annotation: the pod's own settings for containers that a template contains, too.
pub const OVERRIDES: &str = "proxy.istio.io/overrides";

/// Pod annotation: a ProxyConfig that overrides the mesh's ProxyConfig field by field.
pub const PROXY_CONFIG: &str = "proxy.istio.io/config";

/// Pod annotation: the port on which the proxy's agent answers probes.
pub const STATUS_PORT: &str = "status.sidecar.istio.io/port";

/// Pod annotation: the initial delay of the proxy's readiness probe, in seconds.
pub const READINESS_DELAY: &str = "readiness.status.sidecar.istio.io/initialDelaySeconds";

/// Pod annotation: the period of the proxy's readiness probe, in seconds.
pub const READINESS_PERIOD: &str = "readiness.status.sidecar.istio.io/periodSeconds";

/// Pod annotation: the failure threshold of the proxy's readiness probe.
pub const READINESS_FAILURES: &str = "readiness.status.sidecar.istio.io/failureThreshold";

/// Pod annotation: the image of the proxy, as a reference or a name.
pub const PROXY_IMAGE: &str = "sidecar.istio.io/proxyImage";

/// Pod annotation: the variant of the proxy's image, a suffix of the tag.
pub const PROXY_IMAGE_TYPE: &str = "sidecar.istio.io/proxyImageType";

/// Pod annotation: the CPU request of the proxy, as a Kubernetes quantity.
pub const PROXY_CPU: &str = "sidecar.istio.io/proxyCPU";

/// Pod annotation: the CPU limit of the proxy, as a Kubernetes quantity.
pub const PROXY_CPU_LIMIT: &str = "sidecar.istio.io/proxyCPULimit";

/// Pod annotation: the memory request of the proxy, as a Kubernetes quantity.
pub const PROXY_MEMORY: &str = "sidecar.istio.io/proxyMemory";

/// Pod annotation: the memory limit of the proxy, as a Kubernetes quantity.
pub const PROXY_MEMORY_LIMIT: &str = "sidecar.istio.io/proxyMemoryLimit";

/// Pod annotation: the log level of the proxy as a whole.
pub const LOG_LEVEL: &str = "sidecar.istio.io/logLevel";

/// Pod annotation: log levels for single components of the proxy, comma-separated.
pub const COMPONENT_LOG_LEVEL: &str = "sidecar.istio.io/componentLogLevel";

/// Pod annotation: log levels for single scopes of the agent, comma-separated.
pub const AGENT_LOG_LEVEL: &str = "sidecar.istio.io/agentLogLevel";

/// Pod annotation: whether the application's probes go through the agent. The annotation overrides rewriteAppHTTPProbe.
pub const REWRITE_PROBES: &str = "sidecar.istio.io/rewriteAppHTTPProbers";

/// Pod label: the name under which the workload appears in telemetry.
pub const CANONICAL_NAME: &str = "service.istio.io/canonical-name";

/// Pod label: the revision under which the workload appears in telemetry.
pub const CANONICAL_REVISION: &str = "service.istio.io/canonical-revision";

/// Pod label: announces to peers whether the pod supports mutual TLS.
pub const TLS_MODE: &str = "security.istio.io/tlsMode";

/// Pod label: announces to peers whether the pod supports HBONE.
pub const TUNNEL: &str = "networking.istio.io/tunnel";

/// Pod label: the name of the pod's network, read by istiod.
pub const NETWORK: &str = "topology.istio.io/network";

/// Pod annotation: whether the agent merges the application's metrics with its own and the proxy's.
pub const MERGE_METRICS: &str = "prometheus.istio.io/merge-metrics";

/// Pod annotation: the ports and paths at which the agent scrapes the application's metrics.
pub const SCRAPE_TARGETS: &str = "prometheus.istio.io/scrape-targets";

/// Pod annotation: whether Prometheus scrapes the metrics of the pod.
pub const SCRAPE: &str = "prometheus.io/scrape";

/// Pod annotation: the path at which Prometheus scrapes the pod's metrics.
pub const SCRAPE_PATH: &str = "prometheus.io/path";

/// Pod annotation: the port at which Prometheus scrapes the pod's metrics.
pub const SCRAPE_PORT: &str = "prometheus.io/port";

/// Pod annotation: the port that serves the same metrics with mutual TLS.
pub const SECURE_PORT: &str = "prometheus.istio.io/secure-port";

/// Pod annotation: the networks for which Multus calls plugins.
pub const MULTUS_NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
