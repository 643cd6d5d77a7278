//! What a template may name: a closed list ([`TABLE`]), each value known before any template is read.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use workload::injection::keys;

use crate::{
    Request,
    config::Config,
    error::InjectError,
    is_proxy,
    owner::Owner,
    proxy::{ISTIO_INIT, ISTIO_PROXY, ISTIO_VALIDATION, ProxySettings},
    tree,
};

/// The names that templates may use besides `annotation:KEY` and `label:KEY`, and what each is. One that is nothing leaves
/// out what it stands in.
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

/// Ports that the node never captures (istio-sidecar-install.md, 3.4).
const NEVER_CAPTURED: [u16; 3] = [15020, 15021, 15090];

/// The longest value of a label (apimachinery, validation.LabelValueMaxLength).
const LONGEST_LABEL: usize = 63;

/// The values of [`TABLE`] for one pod; null is nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    values: BTreeMap<&'static str, Value>,
    annotations: BTreeMap<String, String>,
    labels: BTreeMap<String, String>,
}

impl Facts {
    /// Gathers what is known of a pod as its author wrote it.
    ///
    /// # Errors
    ///
    /// When its list of ports cannot be read.
    pub fn gather(
        config: &Config,
        proxy: &ProxySettings,
        original: &Value,
        request: &Request<'_>,
    ) -> Result<Self, InjectError> {
        let mut values = BTreeMap::new();
        values.extend(of_pod(original, request));
        values.extend(of_workload(original, request));
        values.extend(of_interception(original, proxy)?);
        values.extend(of_proxy(config, proxy, original));
        values.extend(of_mesh(config));
        let map = |key| {
            let found = original
                .get("metadata")
                .and_then(|metadata| metadata.get(key));
            let texts = found.and_then(Value::as_object).into_iter().flatten();
            let text =
                |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
            texts.filter_map(text).collect()
        };
        Ok(Self {
            values,
            annotations: map("annotations"),
            labels: map("labels"),
        })
    }

    /// What a name stands for; `None` where it is nothing or not in the list, which reading the template has told.
    pub fn get(&self, name: &str) -> Option<Value> {
        if let Some(key) = name.strip_prefix("annotation:") {
            return self.annotations.get(key).map(|text| text.as_str().into());
        }
        if let Some(key) = name.strip_prefix("label:") {
            return self.labels.get(key).map(|text| text.as_str().into());
        }
        self.values
            .get(name)
            .filter(|value| !value.is_null())
            .cloned()
    }
}

/// Whether a template may use a name.
pub fn is_known(name: &str) -> bool {
    let of_pod = ["annotation:", "label:"]
        .into_iter()
        .find_map(|kind| name.strip_prefix(kind));
    of_pod.map_or_else(
        || TABLE.iter().any(|(known, _)| *known == name),
        |key| !key.is_empty(),
    )
}

type Pairs<const N: usize> = [(&'static str, Value); N];

fn some(text: &str) -> Value {
    if text.is_empty() {
        Value::Null
    } else {
        text.into()
    }
}

fn namespace<'a>(pod: &'a Value, request: &Request<'a>) -> &'a str {
    let own = tree::text(pod, "/metadata/namespace").filter(|own| !own.is_empty());
    own.unwrap_or(request.namespace)
}

fn of_pod(pod: &Value, request: &Request<'_>) -> Pairs<7> {
    let own = || {
        tree::containers(pod, "containers")
            .iter()
            .filter(|it| !is_proxy(it))
    };
    let names: Vec<_> = own().filter_map(tree::name).collect();
    let ports: Vec<_> = own()
        .flat_map(|it| tree::list(it, "ports").to_vec())
        .collect();
    let first = |key| {
        some(
            tree::annotation(pod, key)
                .or_else(|| names.first().copied())
                .unwrap_or_default(),
        )
    };
    let account = tree::text(pod, "/spec/serviceAccountName").filter(|name| !name.is_empty());
    [
        (
            "pod.name",
            some(tree::text(pod, "/metadata/name").unwrap_or_default()),
        ),
        ("pod.namespace", some(namespace(pod, request))),
        ("pod.serviceAccount", account.unwrap_or("default").into()),
        ("pod.ports", Value::from(ports).to_string().into()),
        ("pod.containers", some(&names.join(","))),
        (
            "pod.defaultContainer",
            first("kubectl.kubernetes.io/default-container"),
        ),
        (
            "pod.defaultLogsContainer",
            first("kubectl.kubernetes.io/default-logs-container"),
        ),
    ]
}

fn of_workload(pod: &Value, request: &Request<'_>) -> Pairs<4> {
    let owner = request.owner.cloned().unwrap_or_else(|| Owner::of(pod));
    let Owner {
        api_version,
        kind,
        name,
    } = &owner;
    let (namespace, kind) = (namespace(pod, request), kind.to_lowercase());
    let path = format!("kubernetes://apis/{api_version}/namespaces/{namespace}/{kind}s/{name}");
    let label = |keys: &[&str]| {
        let mut said = keys.iter().filter_map(|key| tree::label(pod, key));
        said.find(|value| !value.is_empty()).map(str::to_owned)
    };
    let names = [keys::CANONICAL_NAME, "app.kubernetes.io/name", "app"];
    let revisions = [
        keys::CANONICAL_REVISION,
        "app.kubernetes.io/version",
        "version",
    ];
    let canonical = label(&names).unwrap_or_else(|| name.clone());
    [
        ("workload.name", some(name)),
        (
            "workload.owner",
            if name.is_empty() {
                Value::Null
            } else {
                path.into()
            },
        ),
        ("canonical.name", some(&as_label(&canonical))),
        (
            "canonical.revision",
            label(&revisions)
                .unwrap_or_else(|| "latest".to_owned())
                .into(),
        ),
    ]
}

/// A text as a value of a label: a cut may end in what no label ends in.
fn as_label(text: &str) -> String {
    let start: String = text.chars().take(LONGEST_LABEL).collect();
    let is_mark = |c: char| "-_.".contains(c);
    start.trim_end_matches(is_mark).to_owned()
}

/// The pod's list stays as it is where the node leaves the agent's port alone anyway.
fn of_interception(pod: &Value, proxy: &ProxySettings) -> Result<Pairs<2>, InjectError> {
    let said = tree::annotation(pod, keys::EXCLUDE_INBOUND_PORTS);
    let own = workload::injection::ports(said.unwrap_or_default());
    let own = own.map_err(|error| InjectError::annotation(keys::EXCLUDE_INBOUND_PORTS, &error))?;
    let port = proxy.status_port;
    let is_left_alone = port == 0 || NEVER_CAPTURED.contains(&port) || own.contains(&port);
    let list = match said.filter(|said| !said.trim().is_empty()) {
        None if port == 0 => said.unwrap_or_default().to_owned(),
        None => port.to_string(),
        Some(said) if is_left_alone => said.to_owned(),
        Some(said) => format!("{said},{port}"),
    };
    Ok([
        ("interception.mode", proxy.interception.word().into()),
        ("interception.excludeInboundPorts", some(&list)),
    ])
}

fn of_proxy(config: &Config, proxy: &ProxySettings, pod: &Value) -> Pairs<18> {
    let settings = &config.proxy;
    let said = |key, default: &str| tree::annotation(pod, key).unwrap_or(default).into();
    let number = |key, default: u32| {
        let said = tree::annotation(pod, key).and_then(|text| text.parse().ok());
        Value::from(said.unwrap_or(default))
    };
    let resources = Some(&proxy.resources).filter(|resources| !resources.is_empty());
    let hbone = proxy
        .config
        .get("proxyMetadata")
        .and_then(|it| it.get("ISTIO_META_ENABLE_HBONE"));
    let concurrency = proxy.config.get("concurrency").and_then(Value::as_u64);
    [
        ("proxy.image", some(&proxy.image)),
        ("proxy.initImage", some(&settings.init_image)),
        ("proxy.validationImage", some(&settings.validation_image)),
        ("proxy.imagePullPolicy", some(&settings.image_pull_policy)),
        ("proxy.uid", proxy.uid.into()),
        ("proxy.gid", proxy.gid.into()),
        ("proxy.capturedUid", proxy.captured_uid().into()),
        (
            "proxy.resources",
            resources.cloned().map_or(Value::Null, Value::from),
        ),
        ("proxy.logLevel", said(keys::LOG_LEVEL, &settings.log_level)),
        (
            "proxy.componentLogLevel",
            said(keys::COMPONENT_LOG_LEVEL, &settings.component_log_level),
        ),
        (
            "proxy.agentLogLevel",
            said(keys::AGENT_LOG_LEVEL, &settings.agent_log_level),
        ),
        ("proxy.statusPort", proxy.status_port.into()),
        ("proxy.readinessDelay", number(keys::READINESS_DELAY, 0)),
        ("proxy.readinessPeriod", number(keys::READINESS_PERIOD, 15)),
        (
            "proxy.readinessFailures",
            number(keys::READINESS_FAILURES, 4),
        ),
        (
            "proxy.config",
            Value::from(proxy.config.clone()).to_string().into(),
        ),
        (
            "proxy.concurrency",
            concurrency.map_or(Value::Null, Value::from),
        ),
        (
            "proxy.tunnel",
            hbone.map_or(Value::Null, |it| {
                if it == "true" {
                    "http".into()
                } else {
                    Value::Null
                }
            }),
        ),
    ]
}

fn of_mesh(config: &Config) -> Pairs<8> {
    let mesh = Some(&config.mesh_id).filter(|name| !name.is_empty());
    let secrets: Vec<_> = config
        .image_pull_secrets
        .iter()
        .map(|name| json!({"name": name}))
        .collect();
    [
        ("mesh.id", some(mesh.unwrap_or(&config.trust_domain))),
        ("mesh.trustDomain", some(&config.trust_domain)),
        ("mesh.clusterId", some(&config.cluster_id)),
        ("mesh.clusterDomain", some(&config.cluster_domain)),
        ("mesh.network", some(&config.network)),
        ("mesh.caAddress", some(&config.ca_address)),
        (
            "mesh.imagePullSecrets",
            if secrets.is_empty() {
                Value::Null
            } else {
                secrets.into()
            },
        ),
        ("revision", some(&config.revision)),
    ]
}

/// Gives the injected containers the environment of `proxyMetadata`, and the proxy that of the webhook's path.
pub(crate) fn environment(
    pod: &mut Value,
    config: &Config,
    proxy: &ProxySettings,
    path: &[(String, String)],
) {
    let metadata = proxy.config.get("proxyMetadata").and_then(Value::as_object);
    let metadata = metadata.into_iter().flatten();
    let text = |value: &Value| {
        value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned)
    };
    let metadata: Vec<_> = metadata
        .map(|(name, value)| (name.clone(), text(value)))
        .collect();
    let network = path.iter().find(|(name, _)| name == "ISTIO_META_NETWORK");
    let network = network
        .map_or(config.network.as_str(), |(_, value)| value)
        .to_owned();
    if !network.is_empty() {
        tree::set_label(pod, keys::NETWORK, &network);
    }
    tree::each_container(pod, |_, container| {
        let is_injected = |it: &Value| {
            matches!(
                tree::name(it),
                Some(ISTIO_PROXY | ISTIO_INIT | ISTIO_VALIDATION)
            )
        };
        if !is_injected(container) {
            return;
        }
        for (name, value) in &metadata {
            tree::set_variable(container, name, value);
        }
        let path = if is_proxy(container) { path } else { &[] };
        for (name, value) in path {
            tree::set_variable(container, name, value);
        }
    });
}
