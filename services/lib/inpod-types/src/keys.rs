//! Labels and annotations that inpod reads or writes: Istio's, Kubernetes' and, below `inpod.io`, its own. Other crates
//! never spell a key themselves. `deploy/docs/labels.md` has a row for each key, and describes its values and effect.

// Keys of Istio and Kubernetes that concern ambient pods.

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

/// Label of a pod or namespace: the pod, or each pod of the namespace, has to be in the mesh.
pub const REQUIRE: &str = "inpod.io/require";

/// The value of [`REQUIRE`] that keeps a pod from starting outside the mesh.
pub const REQUIRE_MESH: &str = "mesh";

/// The value of [`REQUIRE`] that also refuses a running pod's new connections until ztunnel serves the pod.
pub const REQUIRE_MESH_OR_STOP: &str = "mesh-or-stop";

/// The pod condition and readiness gate: whether the pod is proven to be in the mesh.
pub const IN_MESH: &str = "inpod.io/InMesh";

// Keys of inpod itself, of `repair` and of the uninstall.

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

// Istio's keys for pods with sidecars, most of which the injector writes and the node reads.

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

/// Pod annotation: the former name of [`REROUTE_VIRTUAL_INTERFACES`], for pods with a sidecar.
pub const SIDECAR_KUBEVIRT_INTERFACES: &str = "traffic.sidecar.istio.io/kubevirtInterfaces";

// Keys that the injector reads or writes. Custom templates may write further keys.

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
