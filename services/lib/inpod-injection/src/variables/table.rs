/// The variables of templates, besides `annotation:KEY` and `label:KEY`. A text with an unset variable is omitted.
pub const TABLE: &[(&str, &str)] = &[
    (
        "pod.name",
        "name of the pod; unset if the API server generates it",
    ),
    ("pod.namespace", "namespace of the pod"),
    (
        "pod.serviceAccount",
        "service account of the pod; `default` if it names none",
    ),
    (
        "pod.ports",
        "JSON: all ports of its containers, without the proxy's",
    ),
    (
        "pod.containers",
        "names of its containers, separated by commas, without the proxy",
    ),
    (
        "pod.defaultContainer",
        "default container of kubectl: by annotation, else the first",
    ),
    (
        "pod.defaultLogsContainer",
        "default container of `kubectl logs`: by annotation, else the first",
    ),
    (
        "pod.networks",
        "Multus networks of the pod with the configured one; unset without `multusNetwork`",
    ),
    (
        "workload.name",
        "name of the pod's owner: a Deployment, CronJob or other object",
    ),
    (
        "workload.owner",
        "path of the owner: kubernetes://apis/VERSION/namespaces/NAMESPACE/KINDs/NAME",
    ),
    (
        "canonical.name",
        "name of the workload in telemetry: by label, else `workload.name`; at most 63 characters",
    ),
    (
        "canonical.revision",
        "revision of the workload: by label, else `latest`",
    ),
    ("interception.mode", "REDIRECT, TPROXY or NONE"),
    (
        "interception.excludeInboundPorts",
        "the pod's own list, with the agent's port unless the node excludes it anyway",
    ),
    (
        "proxy.image",
        "image of the proxy, from annotations or configuration",
    ),
    ("proxy.initImage", "image of `istio-init`"),
    ("proxy.validationImage", "image of `istio-validation`"),
    (
        "proxy.imagePullPolicy",
        "image pull policy; unset for the default of Kubernetes",
    ),
    ("proxy.uid", "user ID of the proxy"),
    ("proxy.gid", "group ID of the proxy"),
    (
        "proxy.capturedUid",
        "user ID whose traffic is not redirected",
    ),
    (
        "proxy.resources",
        "resources of the proxy, from annotations or configuration",
    ),
    ("proxy.logLevel", "log level of the proxy"),
    (
        "proxy.componentLogLevel",
        "log levels of the proxy's components",
    ),
    ("proxy.agentLogLevel", "log levels of the agent"),
    ("proxy.statusPort", "status port of the agent"),
    (
        "proxy.readinessDelay",
        "seconds before the first readiness probe",
    ),
    ("proxy.readinessPeriod", "seconds between readiness probes"),
    (
        "proxy.readinessFailures",
        "failures before the proxy is unready",
    ),
    ("proxy.config", "JSON: Istio's ProxyConfig of the proxy"),
    (
        "proxy.concurrency",
        "number of worker threads; unset for the proxy's default",
    ),
    (
        "proxy.tunnel",
        "`http` if it accepts HBONE (proxyMetadata ISTIO_META_ENABLE_HBONE), else unset",
    ),
    ("mesh.id", "name of the mesh"),
    ("mesh.trustDomain", "trust domain of the mesh"),
    ("mesh.clusterId", "name of the cluster"),
    ("mesh.clusterDomain", "DNS domain of the cluster"),
    (
        "mesh.network",
        "name of the network; unset if not configured",
    ),
    ("mesh.caAddress", "address of the CA"),
    (
        "mesh.imagePullSecrets",
        "pull secrets in the form of Kubernetes",
    ),
    ("revision", "revision of this injector"),
];
