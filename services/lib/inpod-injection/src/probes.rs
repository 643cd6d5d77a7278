//! Redirects the kubelet's probes to the agent, which probes the application at the pod's address
//! (services/docs/facts/istio-sidecar.md, 6.9), because the kubelet has no certificate of the mesh.
//!
//! HTTP, TCP and gRPC probes, and HTTP and TCP hooks, become HTTP requests to the agent, which receives the originals
//! in [`PROBERS`]. A probe of an undeclared port name stays unchanged, because the agent could only fail.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::{
    error::InjectError,
    is_proxy, json,
    proxy::{ISTIO_PROXY, ProxySettings},
    proxy_container,
    status::Status,
};

/// The environment variable that passes the original probes to the agent, as JSON by path.
pub const PROBERS: &str = "ISTIO_KUBE_APP_PROBERS";

/// The maximum size of an environment variable, with which Linux still starts a program (MAX_ARG_STRLEN,
/// linux/binfmts.h).
const MAX_VARIABLE_BYTES: usize = 128 * 1024;

/// The fields of probes and hooks, with the agent's path for each and the supported handlers.
const PROBE_FIELDS: [(&[&str], &str, &str, &[&str]); 5] = [
    (&["readinessProbe"], "app-health", "readyz", &PROBES),
    (&["livenessProbe"], "app-health", "livez", &PROBES),
    (&["startupProbe"], "app-health", "startupz", &PROBES),
    (
        &["lifecycle", "preStop"],
        "app-lifecycle",
        "prestopz",
        &HOOKS,
    ),
    (
        &["lifecycle", "postStart"],
        "app-lifecycle",
        "poststartz",
        &HOOKS,
    ),
];

const PROBES: [&str; 3] = ["httpGet", "tcpSocket", "grpc"];
const HOOKS: [&str; 2] = ["httpGet", "tcpSocket"];

/// Redirects the probes of all containers. Already redirected probes keep their entries.
///
/// # Errors
///
/// Fails if the probes of an earlier injection cannot be parsed.
pub(crate) fn rewrite(pod: &mut Value, proxy: &ProxySettings) -> Result<(), InjectError> {
    if proxy_container(pod).is_none() {
        return Ok(());
    }
    if !proxy.rewrites_probes || proxy.status_port == 0 {
        return Ok(());
    }
    let mut probers = probers(pod)?;
    let mut names = BTreeMap::new();
    json::each_container(pod, |_, container| {
        if !is_proxy(container) {
            rewrite_container(container, proxy.status_port, &mut probers, &mut names);
        }
    });
    if !probers.is_empty() {
        let text = Value::from(probers).to_string();
        json::each_container(pod, |_, container| {
            if is_proxy(container) {
                json::set_variable(container, PROBERS, &text);
            }
        });
    }
    save_port_names(pod, names);
    Ok(())
}

fn probers(pod: &Value) -> Result<Map<String, Value>, InjectError> {
    let text = proxy_container(pod).and_then(|it| json::env_value(it, PROBERS));
    let Some(text) = text else {
        return Ok(Map::new());
    };
    let wrong = |why: String| {
        InjectError::InvalidPod(format!(
            "variable {PROBERS} of {ISTIO_PROXY} is not valid JSON of probes: {why}"
        ))
    };
    if text.len() > MAX_VARIABLE_BYTES {
        return Err(wrong(format!(
            "it has more than {MAX_VARIABLE_BYTES} bytes"
        )));
    }
    serde_json::from_str(text).map_err(|error| wrong(error.to_string()))
}

/// Saves the names of ports for the status, which a later step writes.
fn save_port_names(pod: &mut Value, names: BTreeMap<String, String>) {
    if names.is_empty() {
        return;
    }
    let mut status = Status::read(pod).unwrap_or_default();
    status.ports.extend(names);
    status.write(pod);
}

fn probe_mut<'a>(container: &'a mut Value, keys: &[&str]) -> Option<&'a mut Map<String, Value>> {
    let mut found = container;
    for key in keys {
        found = found.get_mut(*key)?;
    }
    found.as_object_mut()
}

fn rewrite_container(
    container: &mut Value,
    status_port: u16,
    probers: &mut Map<String, Value>,
    names: &mut BTreeMap<String, String>,
) {
    let Some(name) = json::name(container).map(str::to_owned) else {
        return;
    };
    let ports = json::list(container, "ports").to_vec();
    for (keys, kind, end, handlers) in PROBE_FIELDS {
        let Some(probe) = probe_mut(container, keys) else {
            continue;
        };
        let Some(handler) = handlers
            .iter()
            .find(|handler| probe.contains_key(**handler))
        else {
            continue;
        };
        let Some(number) = port(probe.get(*handler), &ports) else {
            continue;
        };
        // The probe is for the agent's own port, or is already redirected.
        if number == u64::from(status_port) {
            continue;
        }
        let path = format!("/{kind}/{name}/{end}");
        let entry = prober_entry(probe, handler, number);
        if let Some(value) = probe.get(*handler).and_then(|it| it.get("port")?.as_str()) {
            names.insert(path.clone(), value.to_owned());
        }
        let handler_value = agent_http_get(probe.remove(*handler), handler, &path, status_port);
        probe.insert("httpGet".to_owned(), handler_value);
        probers.entry(path).or_insert(entry);
    }
}

/// Returns the port of a handler, or `None` if its name is undeclared.
fn port(handler: Option<&Value>, ports: &[Value]) -> Option<u64> {
    let value = handler?.get("port")?;
    if let Some(name) = value.as_str() {
        let mut named = ports.iter().filter(|port| json::name(port) == Some(name));
        return named.next()?.get("containerPort")?.as_u64();
    }
    value.as_u64()
}

/// Returns the original handler, with a numeric port and the timeout of the probe.
fn prober_entry(probe: &Map<String, Value>, handler: &str, number: u64) -> Value {
    let mut handler_value = probe.get(handler).cloned().unwrap_or_default();
    if let Some(fields) = handler_value.as_object_mut() {
        fields.insert("port".to_owned(), number.into());
    }
    let mut entry = Map::from_iter([(handler.to_owned(), handler_value)]);
    if let Some(timeout) = probe.get("timeoutSeconds") {
        entry.insert("timeoutSeconds".to_owned(), timeout.clone());
    }
    entry.into()
}

/// Returns the agent's handler. An HTTP probe keeps host and headers, but not HTTPS, because the agent does not serve
/// TLS.
fn agent_http_get(before: Option<Value>, handler: &str, path: &str, status_port: u16) -> Value {
    let mut handler_value = json!({});
    if handler == "httpGet" {
        handler_value = before.unwrap_or(handler_value);
        if handler_value
            .get("scheme")
            .is_some_and(|scheme| scheme == "HTTPS")
            && let Some(fields) = handler_value.as_object_mut()
        {
            fields.insert("scheme".to_owned(), "HTTP".into());
        }
    }
    if let Some(fields) = handler_value.as_object_mut() {
        fields.insert("path".to_owned(), path.into());
        fields.insert("port".to_owned(), status_port.into());
    }
    handler_value
}

/// Restores the probes from before the injection.
pub(crate) fn restore(pod: &mut Value, status: &Status) {
    let Ok(probers_before) = probers(pod) else {
        return;
    };
    json::each_container(pod, |_, container| {
        if !is_proxy(container) {
            restore_container(container, &probers_before, status);
        }
    });
}

fn restore_container(container: &mut Value, probers_before: &Map<String, Value>, status: &Status) {
    let Some(name) = json::name(container).map(str::to_owned) else {
        return;
    };
    for (keys, kind, end, handlers) in PROBE_FIELDS {
        let path = format!("/{kind}/{name}/{end}");
        let (Some(probe), Some(entry)) = (probe_mut(container, keys), probers_before.get(&path))
        else {
            continue;
        };
        let is_ours = probe.get("httpGet").and_then(|it| it.get("path")?.as_str()) == Some(&path);
        let handler = handlers
            .iter()
            .find(|handler| entry.get(**handler).is_some());
        let (true, Some(handler)) = (is_ours, handler) else {
            continue;
        };
        let mut before = entry.get(*handler).cloned().unwrap_or_default();
        if let (Some(fields), Some(port)) = (before.as_object_mut(), status.ports.get(&path)) {
            fields.insert("port".to_owned(), port.as_str().into());
        }
        probe.remove("httpGet");
        probe.insert((*handler).to_owned(), before);
    }
}

#[cfg(test)]
mod tests;
