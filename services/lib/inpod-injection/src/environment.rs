//! Sets environment variables in addition to the variables in templates.

use inpod_types::keys;
use serde_json::{Value, json};

use crate::{
    config::Config,
    is_proxy, json, merge,
    proxy::{ISTIO_INIT, ISTIO_PROXY, ISTIO_VALIDATION, ProxySettings},
};

/// Adds `proxyMetadata` to all injected containers, and the variables of the webhook's path to the proxy.
pub(crate) fn set(
    pod: &mut Value,
    config: &Config,
    proxy: &ProxySettings,
    path: &[(String, String)],
) {
    let metadata = proxy.config.get("proxyMetadata").and_then(Value::as_object);
    let metadata = metadata.into_iter().flatten();
    let metadata: Vec<_> = metadata
        .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
        .collect();
    let network = path.iter().find(|(name, _)| name == "ISTIO_META_NETWORK");
    let network = network
        .map_or(config.network.as_str(), |(_, value)| value)
        .to_owned();
    if !network.is_empty() {
        json::set_label(pod, keys::NETWORK, &network);
    }
    json::each_container(pod, |_, container| {
        let is_injected = |it: &Value| {
            matches!(
                json::name(it),
                Some(ISTIO_PROXY | ISTIO_INIT | ISTIO_VALIDATION)
            )
        };
        if !is_injected(container) {
            return;
        }
        let path = if is_proxy(container) { path } else { &[] };
        let variables = metadata.iter().chain(path);
        let variables = variables.map(|(name, value)| json!({"name": name, "value": value}));
        let variables: Vec<_> = variables.collect();
        if !variables.is_empty() {
            merge::merge(container, &json!({"env": variables}));
        }
    });
}
