//! The variables with their descriptions.

/// Variables of templates besides `annotation:KEY` and `label:KEY`, with their descriptions. A text with an
/// unset variable is omitted.
pub const TABLE: &[(&str, &str)] = &[
    (
        "pod.name",
        "the pod's name; nothing where the API server makes it up",
    ),
    ("pod.namespace", "its namespace"),
    (
        "pod.serviceAccount",
        "its service account; `default` where it names none",
    ),
    (
        "pod.ports",
        "JSON: all ports of its containers, the proxy's left out",
    ),
    (
        "pod.containers",
        "the names of its containers, with commas between them, the proxy's left out",
    ),
    (
        "pod.defaultContainer",
        "the container that kubectl takes: by annotation, else the first of them",
    ),
    ("pod.defaultLogsContainer", "the same for logs"),
    (
        "pod.networks",
        "its networks of Multus with the configured one; nothing where `multusNetwork` names none",
    ),
    (
        "workload.name",
        "what makes the pod: the Deployment's, CronJob's or other object's name",
    ),
    (
        "workload.owner",
        "the same as a path: kubernetes://apis/VERSION/namespaces/NAMESPACE/KINDs/NAME",
    ),
    (
        "canonical.name",
        "the workload as telemetry shows it: by label, else by `workload.name`; at most 63 characters",
    ),
    (
        "canonical.revision",
        "its revision: by label, else `latest`",
    ),
    ("interception.mode", "REDIRECT, TPROXY or NONE"),
    (
        "interception.excludeInboundPorts",
        "the pod's own list with the agent's port, where the node would not leave it alone by itself",
    ),
    ("proxy.image", "the proxy's image, annotations considered"),
    ("proxy.initImage", "the image that redirects"),
    ("proxy.validationImage", "the image that validates"),
    (
        "proxy.imagePullPolicy",
        "when images are pulled; nothing: as Kubernetes has it",
    ),
    ("proxy.uid", "the proxy's user"),
    ("proxy.gid", "its group"),
    (
        "proxy.capturedUid",
        "the user whose traffic rules leave alone",
    ),
    ("proxy.resources", "its resources, annotations considered"),
    ("proxy.logLevel", "its log level"),
    ("proxy.componentLogLevel", "the log levels of its parts"),
    ("proxy.agentLogLevel", "the log levels of its agent"),
    ("proxy.statusPort", "where its agent answers"),
    (
        "proxy.readinessDelay",
        "seconds before its first readiness probe",
    ),
    ("proxy.readinessPeriod", "seconds between them"),
    ("proxy.readinessFailures", "how many may fail"),
    ("proxy.config", "JSON: Istio's ProxyConfig for it"),
    (
        "proxy.concurrency",
        "how many workers it has; nothing: as it likes",
    ),
    (
        "proxy.tunnel",
        "`http` where it takes HBONE (proxyMetadata ISTIO_META_ENABLE_HBONE), else nothing",
    ),
    ("mesh.id", "the mesh's name"),
    ("mesh.trustDomain", "the trust domain"),
    ("mesh.clusterId", "the cluster's name"),
    ("mesh.clusterDomain", "the cluster's DNS domain"),
    (
        "mesh.network",
        "the network's name; nothing where there is none",
    ),
    ("mesh.caAddress", "where certificates are had"),
    (
        "mesh.imagePullSecrets",
        "secrets of the images' registry, as Kubernetes lists them",
    ),
    ("revision", "which injector this is"),
];
