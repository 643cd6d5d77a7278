//! Lets the agent serve the metrics of application, proxy and agent at its own port
//! (services/docs/facts/istio-sidecar.md, 6.8), because Prometheus has no certificate of the mesh. [`SCRAPED`] passes
//! the address of the application's metrics to the agent.

use inpod_types::{keys, lists};
use serde_json::{Value, json};

use crate::{
    config::Config,
    error::{InjectError, excerpt},
    json,
    proxy::ProxySettings,
    proxy_container,
};

/// The environment variable that passes the scrape annotations to the agent, as JSON.
pub const SCRAPED: &str = "ISTIO_PROMETHEUS_ANNOTATIONS";

/// The environment variable with the port at which merged metrics are served with mutual TLS.
const SECURE: &str = "ENVOY_SECURE_MERGED_METRICS_PORT";

const PATH: &str = "/stats/prometheus";

/// Ports that cannot be scrape targets: Envoy's admin interface, redirection, tunnel and DNS (6.8).
const RESERVED: [u16; 6] = [15000, 15001, 15004, 15006, 15008, 15053];

/// The scrape settings in the annotations of the pod's author.
#[derive(Debug, Default, PartialEq, Eq)]
struct ScrapeAnnotations {
    scrape: String,
    path: String,
    port: String,
    targets: Vec<Target>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Target {
    port: u16,
    path: String,
}

/// Points Prometheus to the agent, and the agent to the application.
///
/// # Errors
///
/// Fails if the list of scrape targets is invalid, or contains a port of the proxy or the agent.
pub(crate) fn merge(
    pod: &mut Value,
    original: &Value,
    config: &Config,
    proxy: &ProxySettings,
) -> Result<(), InjectError> {
    let secure = proxy_container(pod).and_then(|it| json::env_value(it, SECURE));
    if let Some(port) = secure.map(str::to_owned) {
        json::annotate(pod, keys::SECURE_PORT, &port);
    }
    let wanted = json::annotation(original, keys::MERGE_METRICS).and_then(json::parse_bool);
    let is_wanted = wanted.unwrap_or(config.enable_prometheus_merge);
    if !is_wanted || proxy.status_port == 0 || proxy_container(pod).is_none() {
        return Ok(());
    }
    let scrape_annotations = ScrapeAnnotations::read(original, proxy)?;
    let port = proxy.status_port.to_string();
    // The author disabled scraping, or the agent's port is already set.
    if json::parse_bool(&scrape_annotations.scrape) == Some(false)
        || scrape_annotations.port == port
    {
        return Ok(());
    }
    let keys_found = matching_keys(pod);
    json::remove_metadata(pod, "annotations", keys_found.iter().map(String::as_str));
    json::annotate(pod, keys::SCRAPE, "true");
    json::annotate(pod, keys::SCRAPE_PATH, PATH);
    json::annotate(pod, keys::SCRAPE_PORT, &port);
    if scrape_annotations != ScrapeAnnotations::default() {
        let text = scrape_annotations.to_json();
        json::each_container(pod, |_, container| {
            if crate::is_proxy(container) {
                json::set_variable(container, SCRAPED, &text);
            }
        });
    }
    Ok(())
}

impl ScrapeAnnotations {
    fn read(original: &Value, proxy: &ProxySettings) -> Result<Self, InjectError> {
        let text = |key| {
            find_annotation(original, key)
                .unwrap_or_default()
                .to_owned()
        };
        let wrong = |why: String| InjectError::invalid_annotation(keys::SCRAPE_TARGETS, &why);
        let list = json::annotation(original, keys::SCRAPE_TARGETS).unwrap_or_default();
        let targets = targets(list).map_err(wrong)?;
        if targets.iter().any(|it| it.port == proxy.status_port) {
            let why = format!("port {} is the agent's own", proxy.status_port);
            return Err(wrong(why));
        }
        Ok(Self {
            scrape: text(keys::SCRAPE),
            path: text(keys::SCRAPE_PATH),
            port: text(keys::SCRAPE_PORT),
            targets,
        })
    }

    /// Formats the settings as a PrometheusScrapeConfiguration of pilot-agent.
    fn to_json(&self) -> String {
        let Self {
            scrape,
            path,
            port,
            targets,
        } = self;
        let mut json = json!({"scrape": scrape, "path": path, "port": port});
        let targets = targets
            .iter()
            .map(|it| json!({"port": it.port.to_string(), "path": it.path}));
        let targets: Vec<_> = targets.collect();
        if let Some(fields) = json.as_object_mut().filter(|_| !targets.is_empty()) {
            fields.insert("targets".to_owned(), targets.into());
        }
        json.to_string()
    }
}

/// Replaces every character that is not alphanumeric by an underscore, as Prometheus does.
fn sanitize(key: &str) -> String {
    let mark = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    key.chars().map(mark).collect()
}

fn annotations(pod: &Value) -> impl Iterator<Item = (&String, &Value)> {
    let all = pod.pointer("/metadata/annotations");
    all.and_then(Value::as_object).into_iter().flatten()
}

/// Finds an annotation in any equivalent spelling, preferring the usual one.
fn find_annotation<'a>(pod: &'a Value, key: &str) -> Option<&'a str> {
    let other = || {
        let mut all = annotations(pod);
        let found = all.find(|(known, _)| sanitize(known) == sanitize(key))?;
        found.1.as_str()
    };
    json::annotation(pod, key).or_else(other)
}

/// Returns the three annotations for Prometheus in all spellings.
fn matching_keys(pod: &Value) -> Vec<String> {
    let ours = [keys::SCRAPE, keys::SCRAPE_PATH, keys::SCRAPE_PORT].map(sanitize);
    let all = annotations(pod).filter(|(key, _)| ours.contains(&sanitize(key)));
    all.map(|(key, _)| key.clone()).collect()
}

/// Parses comma-separated entries `PORT:PATH`, in which the default path is `/metrics`.
pub(crate) fn targets(text: &str) -> Result<Vec<Target>, String> {
    let entries = text.split(',').map(str::trim);
    entries
        .filter(|_| !text.trim().is_empty())
        .map(target)
        .collect()
}

fn target(entry: &str) -> Result<Target, String> {
    let (port, path) = entry.split_once(':').unwrap_or((entry, ""));
    let wrong = |what: &str| {
        let entry = excerpt(entry);
        format!("{entry} {what}; use PORT:PATH such as 9100:/metrics, separated by commas")
    };
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    let port: Option<u16> = digits.then(|| port.parse().ok()).flatten();
    let port = port.filter(|port| *port != 0);
    let port = port.ok_or_else(|| wrong("has no port"))?;
    if RESERVED.contains(&port) || lists::NEVER_CAPTURED.contains(&port) {
        return Err(wrong("names a port of the proxy"));
    }
    let path = if path.is_empty() { "/metrics" } else { path };
    let is_path = path.starts_with('/') && path.bytes().all(|byte| byte.is_ascii_graphic());
    let path = is_path.then(|| path.to_owned());
    let path = path.ok_or_else(|| wrong("has no path"))?;
    Ok(Target { port, path })
}

#[cfg(test)]
mod tests;
