use inpod_types::keys;
use serde_json::{Value, json};

use super::{Pairs, some};
use crate::{config::Config, json, proxy::ProxySettings};

pub(super) fn of_proxy(config: &Config, proxy: &ProxySettings, pod: &Value) -> Pairs<19> {
    let settings = &config.proxy;
    let text = |key, default: &str| json::annotation(pod, key).unwrap_or(default).into();
    let number = |key, default: u32| {
        let value = json::annotation(pod, key).and_then(|text| text.parse().ok());
        Value::from(value.unwrap_or(default))
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
        (
            "proxy.validationFamily",
            some(settings.validation_family.as_str()),
        ),
        ("proxy.imagePullPolicy", some(&settings.image_pull_policy)),
        ("proxy.uid", proxy.uid.into()),
        ("proxy.gid", proxy.gid.into()),
        ("proxy.capturedUid", proxy.captured_uid().into()),
        (
            "proxy.resources",
            resources.cloned().map_or(Value::Null, Value::from),
        ),
        ("proxy.logLevel", text(keys::LOG_LEVEL, &settings.log_level)),
        (
            "proxy.componentLogLevel",
            text(keys::COMPONENT_LOG_LEVEL, &settings.component_log_level),
        ),
        (
            "proxy.agentLogLevel",
            text(keys::AGENT_LOG_LEVEL, &settings.agent_log_level),
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
            some(hbone.filter(|it| *it == "true").map_or("", |_| "http")),
        ),
    ]
}

pub(super) fn of_mesh(config: &Config) -> Pairs<8> {
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
