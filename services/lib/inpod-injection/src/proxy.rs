//! The settings of a proxy, from the configuration and, with priority, the pod's annotations.

use inpod_types::keys;
use serde_json::{Map, Value, json};

use crate::{
    config::Config,
    error::{InjectError, yaml_error},
    is_proxy,
    json::{self, MAX_ITEMS, annotation},
    proxy_container,
};

pub const ISTIO_PROXY: &str = "istio-proxy";

/// The init container that redirects traffic in clusters without CNI.
pub const ISTIO_INIT: &str = "istio-init";

/// The init container that waits until the node has redirected the traffic.
pub const ISTIO_VALIDATION: &str = "istio-validation";

/// Istio's user and group id, which TPROXY requires (services/docs/facts/istio-sidecar.md, 6.6 and 6.7).
const ISTIO_UID: u32 = 1337;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interception {
    /// The rules redirect traffic by destination NAT.
    Redirect,
    /// The rules redirect traffic without changing the client's address.
    Tproxy,
    None,
}

impl Interception {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Redirect => "REDIRECT",
            Self::Tproxy => "TPROXY",
            Self::None => "NONE",
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct ProxySettings {
    pub interception: Interception,
    /// The port for health checks, or 0 without an agent.
    pub status_port: u16,
    /// True if the proxy is an init container that keeps running.
    pub is_native: bool,
    /// True if the application starts only after the proxy is ready.
    pub holds_application: bool,
    /// True if the application's probes go to the proxy's agent.
    pub rewrites_probes: bool,
    /// The user id of the proxy, whose traffic is exempt from redirection.
    pub uid: u32,
    /// The group id of the proxy; with TPROXY Istio's id, which then exempts the proxy's traffic (6.7).
    pub gid: u32,
    pub image: String,
    pub resources: Map<String, Value>,
    pub config: Map<String, Value>,
}

impl ProxySettings {
    /// Computes the settings, in which annotations override the configuration.
    ///
    /// # Errors
    ///
    /// Fails if the ProxyConfig in the pod's annotation is invalid.
    pub fn of(config: &Config, pod: &Value) -> Result<Self, InjectError> {
        let proxy_config = proxy_config(config, pod)?;
        let native = match annotation(pod, keys::NATIVE_SIDECAR) {
            Some(requested) => requested == "true",
            None => config.has_native_sidecars(),
        };
        let rewrites = annotation(pod, keys::REWRITE_PROBES).and_then(json::parse_bool);
        let holds = proxy_config.get("holdApplicationUntilProxyStarts");
        let interception = interception(pod, &proxy_config)?;
        Ok(Self {
            interception,
            status_port: status_port(config, pod, &proxy_config)?,
            is_native: native,
            holds_application: holds == Some(&Value::Bool(true)),
            rewrites_probes: rewrites.unwrap_or(config.rewrite_app_http_probe),
            uid: config.proxy.uid,
            gid: match interception {
                Interception::Tproxy => ISTIO_UID,
                Interception::Redirect | Interception::None => config.proxy.gid,
            },
            image: image(config, pod),
            resources: resources(config, pod),
            config: proxy_config,
        })
    }

    /// Returns the user id that the rules and `istio-validation` treat as the proxy's.
    pub fn captured_uid(&self) -> u32 {
        match self.interception {
            Interception::Tproxy => ISTIO_UID,
            Interception::Redirect | Interception::None => self.uid,
        }
    }
}

/// Merges the pod's ProxyConfig over the mesh's, with nested maps merged by key.
fn proxy_config(config: &Config, pod: &Value) -> Result<Map<String, Value>, InjectError> {
    let mut merged = config.proxy_config.clone();
    let Some(text) = annotation(pod, keys::PROXY_CONFIG) else {
        make_texts(&mut merged);
        return Ok(merged);
    };
    let wrong = |why: String| InjectError::invalid_annotation(keys::PROXY_CONFIG, &why);
    let requested: Value =
        serde_saphyr::from_str(text).map_err(|error| wrong(yaml_error(&error)))?;
    for (key, value) in requested.as_object().into_iter().flatten() {
        match (merged.get_mut(key), value) {
            (Some(Value::Object(known)), Value::Object(more)) => {
                known.extend(more.clone());
            }
            _ => drop(merged.insert(key.clone(), value.clone())),
        }
    }
    let variables = merged.get("proxyMetadata").and_then(Value::as_object);
    let count = variables.map_or(0, Map::len);
    if count > MAX_ITEMS {
        let why = format!("proxyMetadata has {count} variables, and the limit is {MAX_ITEMS}");
        return Err(wrong(why));
    }
    make_texts(&mut merged);
    Ok(merged)
}

/// Turns booleans and numbers in `proxyMetadata` into texts, because YAML makes `true` a boolean, and the proxy's agent
/// accepts only texts.
fn make_texts(config: &mut Map<String, Value>) {
    let variables = config.get_mut("proxyMetadata");
    let variables = variables.and_then(Value::as_object_mut);
    for value in variables.into_iter().flat_map(Map::values_mut) {
        if !value.is_string() {
            *value = value.to_string().into();
        }
    }
}

fn interception(pod: &Value, config: &Map<String, Value>) -> Result<Interception, InjectError> {
    let requested = annotation(pod, keys::INTERCEPTION_MODE);
    let requested = requested.or_else(|| config.get("interceptionMode")?.as_str());
    match requested {
        None | Some("REDIRECT") => Ok(Interception::Redirect),
        Some("TPROXY") => Ok(Interception::Tproxy),
        Some("NONE") => Ok(Interception::None),
        Some(other) => {
            let why =
                format!("interceptionMode {other:?} is not a mode; use REDIRECT, TPROXY or NONE");
            Err(InjectError::invalid_annotation(keys::PROXY_CONFIG, &why))
        }
    }
}

fn status_port(
    config: &Config,
    pod: &Value,
    proxy_config: &Map<String, Value>,
) -> Result<u16, InjectError> {
    if let Some(requested) = annotation(pod, keys::STATUS_PORT) {
        return Ok(requested.parse().unwrap_or(config.proxy.status_port));
    }
    let Some(requested) = proxy_config.get("statusPort") else {
        return Ok(config.proxy.status_port);
    };
    let port = requested.as_u64().and_then(|port| u16::try_from(port).ok());
    let wrong = || {
        InjectError::invalid_annotation(
            keys::PROXY_CONFIG,
            &format!("statusPort {requested} is not a port"),
        )
    };
    port.ok_or_else(wrong)
}

/// Returns the proxy's resources; a single annotation replaces all configured resources (6.6).
fn resources(config: &Config, pod: &Value) -> Map<String, Value> {
    let requested = [
        ("requests", "cpu", keys::PROXY_CPU),
        ("requests", "memory", keys::PROXY_MEMORY),
        ("limits", "cpu", keys::PROXY_CPU_LIMIT),
        ("limits", "memory", keys::PROXY_MEMORY_LIMIT),
    ];
    let mut resources = Map::new();
    for (kind, resource, key) in requested {
        let Some(quantity) = annotation(pod, key) else {
            continue;
        };
        let of_kind = resources.entry(kind).or_insert_with(|| json!({}));
        if let Some(of_kind) = of_kind.as_object_mut() {
            of_kind.insert(resource.to_owned(), quantity.into());
        }
    }
    if resources.is_empty() {
        return config.proxy.resources.clone();
    }
    resources
}

/// Resolves the image annotations: a value with a slash is a full reference, a value without a slash is a name, and the
/// type is a suffix of the tag (6.6).
fn image(config: &Config, pod: &Value) -> String {
    let configured = &config.proxy.image;
    let image = match annotation(pod, keys::PROXY_IMAGE) {
        Some(image) if image.contains('/') => return image.to_owned(),
        Some(name) => with_name(configured, name),
        None => configured.clone(),
    };
    match annotation(pod, keys::PROXY_IMAGE_TYPE) {
        Some(kind) => with_type(&image, kind),
        None => image,
    }
}

fn with_name(image: &str, name: &str) -> String {
    let (position, last) = image.rsplit_once('/').unwrap_or(("", image));
    let tag = last
        .find([':', '@'])
        .map_or("", |at| last.get(at..).unwrap_or_default());
    let slash = if position.is_empty() { "" } else { "/" };
    let tag = if name.contains(':') { "" } else { tag };
    format!("{position}{slash}{name}{tag}")
}

fn with_type(image: &str, kind: &str) -> String {
    let last = image.rsplit('/').next().unwrap_or(image);
    // An image with a digest or without a tag has no variants.
    if image.contains('@') || !last.contains(':') {
        return image.to_owned();
    }
    let known = ["-debug", "-distroless"];
    let bare = known.iter().find_map(|ending| image.strip_suffix(ending));
    let bare = bare.unwrap_or(image);
    if kind == "default" {
        return bare.to_owned();
    }
    format!("{bare}-{kind}")
}

/// Moves a native proxy, which templates declare among `containers`, to `initContainers`.
pub(crate) fn move_native(mut rendered: Value, proxy: &ProxySettings) -> Value {
    if !proxy.is_native {
        return rendered;
    }
    let Some(spec) = rendered.get_mut("spec") else {
        return rendered;
    };
    let Some(containers) = json::list_mut(spec, "containers") else {
        return rendered;
    };
    let (mut native, others): (Vec<_>, Vec<_>) =
        std::mem::take(containers).into_iter().partition(is_proxy);
    *containers = others;
    for container in &mut native {
        if let Some(fields) = container.as_object_mut() {
            fields.insert("restartPolicy".to_owned(), "Always".into());
        }
    }
    if let Some(init) = json::list_mut(spec, "initContainers") {
        init.append(&mut native);
    }
    rendered
}

fn id(value: Option<&Value>) -> Option<u64> {
    value.and_then(Value::as_u64).filter(|id| *id != 0)
}

/// Gives proxy, rules and validation the user that the pod sets on its own `istio-proxy`. With TPROXY, the proxy always
/// runs as root (6.4 step 8).
pub(crate) fn align_users(pod: &mut Value, original: &Value, proxy: &ProxySettings) {
    let declared = proxy_container(original);
    let context = |key: &str| id(declared?.pointer(&format!("/securityContext/{key}")));
    let (user, group) = (context("runAsUser"), context("runAsGroup"));
    let is_tproxy = proxy.interception == Interception::Tproxy;
    json::each_container(pod, |_, container| match json::name(container) {
        Some(ISTIO_PROXY) if is_tproxy => run_as(container, Some(0), None),
        Some(ISTIO_VALIDATION) if !is_tproxy => run_as(container, user, group),
        Some(ISTIO_INIT) if !is_tproxy => set_init_user(container, user),
        _ => {}
    });
}

fn run_as(container: &mut Value, user: Option<u64>, group: Option<u64>) {
    let Some(context) = json::object_mut(container, "securityContext") else {
        return;
    };
    let Some(context) = context.as_object_mut() else {
        return;
    };
    for (key, id) in [("runAsUser", user), ("runAsGroup", group)] {
        if let Some(id) = id {
            context.insert(key.to_owned(), id.into());
        }
    }
    if user == Some(0) {
        context.insert("runAsNonRoot".to_owned(), false.into());
    }
}

/// Sets the option `-u` of `istio-iptables` (services/docs/facts/istio-sidecar.md, 4.1).
fn set_init_user(container: &mut Value, user: Option<u64>) {
    let arguments = container.get_mut("args").and_then(Value::as_array_mut);
    let (Some(arguments), Some(user)) = (arguments, user) else {
        return;
    };
    let position = arguments.iter().position(|it| it == "-u");
    if let Some(value) = position.and_then(|at| arguments.get_mut(at + 1)) {
        *value = user.to_string().into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(
        clippy::needless_pass_by_value,
        reason = "tests pass values that they build in place"
    )]
    fn settings(annotations: Value) -> ProxySettings {
        let pod = json!({"metadata": {"annotations": annotations}});
        ProxySettings::of(&Config::default(), &pod).unwrap()
    }

    #[test]
    fn an_image_is_named_whole_in_part_or_by_its_type() {
        let image = |annotations| settings(annotations).image;
        let usual = Config::default().proxy.image;
        let requested = |image: &str| json!({(keys::PROXY_IMAGE): image});
        assert_eq!(image(json!({})), usual);
        assert_eq!(image(requested("a.b/c:d")), "a.b/c:d");
        assert_eq!(image(requested("other")), usual.replace("proxyv2", "other"));
        assert_eq!(image(requested("other:9")), "docker.io/istio/other:9");
        let typed = |image: &str, kind| with_type(image, kind);
        assert_eq!(typed("h/p:1", "distroless"), "h/p:1-distroless");
        assert_eq!(typed("h/p:1-debug", "distroless"), "h/p:1-distroless");
        assert_eq!(typed("h/p:1-debug", "default"), "h/p:1");
        assert_eq!(typed("h:5000/p", "debug"), "h:5000/p");
        assert_eq!(typed("h/p@sha256:ab", "debug"), "h/p@sha256:ab");
    }

    #[test]
    fn resources_are_those_of_annotations_alone_where_there_is_any() {
        assert_eq!(
            settings(json!({})).resources,
            Config::default().proxy.resources
        );
        let one = settings(json!({(keys::PROXY_CPU): "5m"}));
        assert_eq!(
            Value::from(one.resources),
            json!({"requests": {"cpu": "5m"}})
        );
    }

    #[test]
    fn booleans_and_numbers_of_proxy_metadata_are_texts() {
        let mesh = Config::parse("proxyConfig: {proxyMetadata: {A: true, B: 1}}").unwrap();
        let texts =
            |pod: &Value| ProxySettings::of(&mesh, pod).unwrap().config["proxyMetadata"].clone();
        assert_eq!(texts(&json!({})), json!({"A": "true", "B": "1"}));
        let text = "proxyMetadata: {B: false}";
        let pod = json!({"metadata": {"annotations": {(keys::PROXY_CONFIG): text}}});
        assert_eq!(texts(&pod), json!({"A": "true", "B": "false"}));
    }

    #[test]
    fn the_pods_proxy_config_overrides_that_of_the_mesh() {
        let mesh =
            Config::parse("proxyConfig: {statusPort: 16000, proxyMetadata: {A: '1', B: '1'}}")
                .unwrap();
        let text = "{holdApplicationUntilProxyStarts: true, proxyMetadata: {B: '2'}, interceptionMode: TPROXY}";
        let pod = json!({"metadata": {"annotations": {(keys::PROXY_CONFIG): text}}});
        let found = ProxySettings::of(&mesh, &pod).unwrap();
        assert!(found.holds_application && found.status_port == 16000);
        assert_eq!(found.interception, Interception::Tproxy);
        assert_eq!(found.captured_uid(), 1337);
        assert_eq!(found.config["proxyMetadata"], json!({"A": "1", "B": "2"}));
        for wrong in ["statusPort: 70000", "interceptionMode: ALL"] {
            let pod = json!({"metadata": {"annotations": {(keys::PROXY_CONFIG): wrong}}});
            assert!(ProxySettings::of(&mesh, &pod).is_err(), "{wrong}");
        }
    }
}
