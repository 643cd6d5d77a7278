//! Responds late to the kubelet's `preStop` request, so that the proxy serves that much longer. Works with every
//! Kubernetes and image: `preStop.sleep` needs 1.30, and `exec` another program beside Envoy.

use serde_json::{Value, json};

use super::{extend_object, extension, typed};

/// The path in the template's hook.
const PATH: &str = "/drain";

const FILTER: &str = "envoy.filters.http.fault";
const KIND: &str = "envoy.extensions.filters.http.fault.v3.HTTPFault";

/// Envoy's default stream idle timeout, which starts at the delay's end.
const IDLE_SECONDS: u64 = 300;

pub(super) fn route(seconds: u64) -> Value {
    let delay = json!({"fixed_delay": format!("{seconds}s"), "percentage": {"numerator": 100}});
    let late = typed(KIND, json!({"delay": delay}));
    json!({
        "match": {"path": PATH},
        "direct_response": {"status": 200},
        "typed_per_filter_config": {(FILTER): late},
    })
}

/// Delays responses where a route asks for it.
pub(super) fn connection_manager(mut manager: Value, seconds: u64) -> Value {
    if let Some(filters) = crate::json::list_mut(&mut manager, "http_filters") {
        filters.insert(0, extension(FILTER, KIND, json!({})));
    }
    let idle = format!("{}s", seconds + IDLE_SECONDS);
    extend_object(&mut manager, json!({"stream_idle_timeout": idle}));
    manager
}
