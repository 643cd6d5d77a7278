//! Sorts containers into their start order (services/docs/facts/istio-sidecar.md, 6.4).

use serde_json::Value;

use crate::{
    is_proxy, json,
    proxy::{ISTIO_INIT, ISTIO_PROXY, ISTIO_VALIDATION, ProxySettings},
};

/// The init container with which some templates enable core dumps of the proxy.
const CORE_DUMP: &str = "enable-core-dump";

/// Moves the injected containers, and keeps the order of the pod's own containers.
pub fn containers(pod: &mut Value, proxy: &ProxySettings) {
    let first_or_last = |container: &Value| match (is_proxy(container), proxy.holds_application) {
        (true, true) => -1,
        (true, false) => 1,
        (false, _) => 0,
    };
    let native = |container: &Value| match json::name(container) {
        Some(ISTIO_INIT | ISTIO_VALIDATION) => -3,
        Some(ISTIO_PROXY) => -2,
        Some(CORE_DUMP) => -1,
        _ => 0,
    };
    // Validation comes first, in order to fail before any container runs. `istio-init` comes last, because no proxy
    // serves redirected traffic while the pod's own init containers run.
    let ordinary = |container: &Value| match json::name(container) {
        Some(ISTIO_VALIDATION) => -1,
        Some(ISTIO_INIT) => 1,
        Some(CORE_DUMP) => 2,
        _ => 0,
    };
    sort(pod, "containers", first_or_last);
    if proxy.is_native {
        sort(pod, "initContainers", native);
    } else {
        sort(pod, "initContainers", ordinary);
    }
}

fn sort(pod: &mut Value, list: &str, rank: impl Fn(&Value) -> i8) {
    let items = pod.pointer_mut(&format!("/spec/{list}"));
    if let Some(items) = items.and_then(Value::as_array_mut) {
        // The sort is stable, so equal ranks keep their order.
        items.sort_by_key(|item| rank(item));
    }
}
