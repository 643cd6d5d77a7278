//! A path that is answered late, and does nothing else: whoever asks waits. The kubelet asks before it ends the proxy
//! (`preStop`), so that the proxy goes on serving for as long as that. Every Kubernetes and every image can do this:
//! `preStop.sleep` is known from 1.30 on, and `exec` needs a program beside Envoy.

use serde_json::{Value, json};

use super::{extend_object, extension, typed};

/// As the template's hook names it.
const PATH: &str = "/drain";

const FILTER: &str = "envoy.filters.http.fault";
const KIND: &str = "envoy.extensions.filters.http.fault.v3.HTTPFault";

/// How long Envoy lets any request wait for something to happen, by default: counted from the end of the delay.
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

/// With what delays answers where a route says so.
pub(super) fn connection_manager(mut manager: Value, seconds: u64) -> Value {
    if let Some(filters) = crate::json::list_mut(&mut manager, "http_filters") {
        filters.insert(0, extension(FILTER, KIND, json!({})));
    }
    let idle = format!("{}s", seconds + IDLE_SECONDS);
    extend_object(&mut manager, json!({"stream_idle_timeout": idle}));
    manager
}
