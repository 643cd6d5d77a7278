//! One YAML file, shared by the webhook and `inpod inject`.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{decide::Policy, selector::Selector};

#[derive(Debug, thiserror::Error)]
pub enum InvalidConfig {
    /// Not YAML, or an unknown field.
    #[error("the configuration cannot be read: {0}")]
    Yaml(String),
    #[error("{field}: {why}")]
    Field {
        field: String,
        /// The problem and the expected value.
        why: String,
    },
    #[error("template {name:?}, line {line}: {why}")]
    Template {
        name: String,
        line: usize,
        why: String,
    },
}

/// Native sidecars are init containers that keep running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NativeSidecars {
    /// On if `kubernetesVersion` is 1.33 or later: all kubelets support it.
    #[default]
    Auto,
    True,
    False,
}

impl<'de> Deserialize<'de> for NativeSidecars {
    /// Accepts YAML booleans, too.
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        match value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned)
            .as_str()
        {
            "auto" => Ok(Self::Auto),
            "true" => Ok(Self::True),
            "false" => Ok(Self::False),
            other => Err(serde::de::Error::custom(format!(
                "nativeSidecars {other:?} is not auto, true or false"
            ))),
        }
    }
}

/// The configuration; every field has a default.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Config {
    /// For pods without label or annotation.
    pub policy: Policy,
    /// Excludes pods that do not opt in; one match suffices.
    pub never_inject_selector: Vec<Selector>,
    /// Includes pods whatever the policy; one match suffices.
    pub always_inject_selector: Vec<Selector>,
    /// For pods that name none.
    pub default_templates: Vec<String>,
    /// Names of lists of templates.
    pub aliases: BTreeMap<String, Vec<String>>,
    /// By name; may override the built-in `sidecar`.
    pub templates: BTreeMap<String, String>,
    /// The node redirects traffic, not a container in each pod.
    pub cni: bool,
    pub native_sidecars: NativeSidecars,
    /// For `nativeSidecars: auto`, such as `1.33`.
    pub kubernetes_version: String,
    /// Redirects application probes to the agent.
    #[serde(rename = "rewriteAppHTTPProbe")]
    pub rewrite_app_http_probe: bool,
    /// The agent merges the application's metrics.
    pub enable_prometheus_merge: bool,
    /// The node's plugin as a Multus network such as `default/istio-cni`; empty if it is in the CNI chain.
    pub multus_network: String,
    /// The revision of this injector.
    pub revision: String,
    pub cluster_domain: String,
    /// The cluster's name in the mesh.
    pub cluster_id: String,
    /// The network's name, which may be empty.
    pub network: String,
    /// If empty, the trust domain.
    pub mesh_id: String,
    pub trust_domain: String,
    /// The CA's host and port.
    pub ca_address: String,
    /// Istio's `MeshConfig.defaultConfig`; pods' annotations override it.
    pub proxy_config: Map<String, Value>,
    /// Set on every injected pod.
    pub injected_annotations: BTreeMap<String, String>,
    /// Pull secrets for the images below.
    pub image_pull_secrets: Vec<String>,
    pub proxy: Proxy,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Proxy {
    pub image: String,
    /// For `istio-init`, if `cni` is false.
    pub init_image: String,
    pub validation_image: String,
    /// Always, IfNotPresent or Never; empty for Kubernetes' default.
    pub image_pull_policy: String,
    pub uid: u32,
    pub gid: u32,
    pub log_level: String,
    pub component_log_level: String,
    pub agent_log_level: String,
    /// For health checks, unless the pod or `proxyConfig` sets it.
    pub status_port: u16,
    /// The proxy's resources, unless an annotation sets any.
    pub resources: Map<String, Value>,
}

/// Kubelets cannot disable native sidecars since then (KEP-753).
const NATIVE_SINCE: (u32, u32) = (1, 33);

impl Default for Config {
    fn default() -> Self {
        let text = str::to_owned;
        Self {
            policy: Policy::default(),
            never_inject_selector: Vec::new(),
            always_inject_selector: Vec::new(),
            default_templates: vec![text("sidecar")],
            aliases: BTreeMap::new(),
            templates: BTreeMap::new(),
            cni: true,
            native_sidecars: NativeSidecars::default(),
            kubernetes_version: String::new(),
            rewrite_app_http_probe: true,
            enable_prometheus_merge: true,
            multus_network: String::new(),
            revision: text("default"),
            cluster_domain: text("cluster.local"),
            cluster_id: text("Kubernetes"),
            network: String::new(),
            mesh_id: String::new(),
            trust_domain: text("cluster.local"),
            ca_address: text("istiod.istio-system.svc:15012"),
            proxy_config: Map::new(),
            injected_annotations: BTreeMap::new(),
            image_pull_secrets: Vec::new(),
            proxy: Proxy::default(),
        }
    }
}

impl Default for Proxy {
    /// Returns Istio's chart values (services/docs/facts/istio-sidecar.md, 6.6).
    fn default() -> Self {
        let text = str::to_owned;
        let resources = json!({
            "requests": {"cpu": "100m", "memory": "128Mi"},
            // In the API server's canonical form: a second injection changes nothing.
            "limits": {"cpu": "2", "memory": "1Gi"},
        });
        Self {
            image: text("docker.io/istio/proxyv2:1.29.0"),
            init_image: text("docker.io/istio/proxyv2:1.29.0"),
            validation_image: format!("localhost/validate:{}", env!("CARGO_PKG_VERSION")),
            image_pull_policy: String::new(),
            uid: 1337,
            gid: 1337,
            log_level: text("warning"),
            component_log_level: text("misc:error"),
            agent_log_level: text("default:info"),
            status_port: 15020,
            resources: resources.as_object().cloned().unwrap_or_default(),
        }
    }
}

impl Config {
    /// Parses YAML; an empty text is the default.
    ///
    /// # Errors
    ///
    /// On unknown fields and values, too.
    pub fn parse(text: &str) -> Result<Self, InvalidConfig> {
        let document: Value =
            serde_saphyr::from_str(text).map_err(|error| InvalidConfig::Yaml(error.to_string()))?;
        if document.is_null() {
            return Ok(Self::default());
        }
        serde_json::from_value(document).map_err(|error| InvalidConfig::Yaml(error.to_string()))
    }

    /// Annotations may override it.
    pub fn has_native_sidecars(&self) -> bool {
        match self.native_sidecars {
            NativeSidecars::True => true,
            NativeSidecars::False => false,
            NativeSidecars::Auto => {
                version(&self.kubernetes_version).is_some_and(|it| it >= NATIVE_SINCE)
            }
        }
    }

    pub(crate) fn check(&self) -> Result<(), InvalidConfig> {
        let field = |field: &str, why: String| InvalidConfig::Field {
            field: field.to_owned(),
            why,
        };
        let lists = [
            ("neverInjectSelector", &self.never_inject_selector),
            ("alwaysInjectSelector", &self.always_inject_selector),
        ];
        for (name, selectors) in lists {
            if let Some(fault) = selectors.iter().find_map(Selector::fault) {
                return Err(field(name, fault));
            }
        }
        let versions = &self.kubernetes_version;
        if !versions.is_empty() && version(versions).is_none() {
            return Err(field(
                "kubernetesVersion",
                format!("{versions:?} is not a version such as 1.33"),
            ));
        }
        if self.proxy.uid == 0 {
            let why = "0 is root, whose traffic rules cannot tell from the node's; use another";
            return Err(field("proxy.uid", why.to_owned()));
        }
        Ok(())
    }
}

/// Parses major and minor of `v1.33.2-gke.1` and the like.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.trim_start_matches('v').split('.');
    let mut number = || {
        let digits: String = parts
            .next()?
            .chars()
            .take_while(char::is_ascii_digit)
            .collect();
        digits.parse().ok()
    };
    Some((number()?, number()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_text_is_the_default_and_an_unknown_field_is_rejected() {
        assert_eq!(Config::parse("").unwrap(), Config::default());
        let wrong = Config::parse("proxy: {imag: x}").unwrap_err().to_string();
        assert!(wrong.contains("imag"), "{wrong}");
    }

    #[test]
    fn native_sidecars_follow_the_version_unless_it_is_said() {
        let with = |native, version: &str| {
            let config = Config {
                native_sidecars: native,
                kubernetes_version: version.to_owned(),
                ..Config::default()
            };
            config.has_native_sidecars()
        };
        assert!(with(NativeSidecars::Auto, "v1.33.1-gke.3"));
        assert!(with(NativeSidecars::Auto, "1.34+"));
        assert!(!with(NativeSidecars::Auto, "1.32.9"));
        assert!(!with(NativeSidecars::Auto, ""));
        assert!(with(NativeSidecars::True, "1.20"));
        assert!(!with(NativeSidecars::False, "1.40"));
        for text in ["nativeSidecars: true", "nativeSidecars: 'true'"] {
            assert_eq!(
                Config::parse(text).unwrap().native_sidecars,
                NativeSidecars::True
            );
        }
        assert!(Config::parse("nativeSidecars: maybe").is_err());
    }

    #[test]
    fn what_cannot_be_is_refused_by_its_name() {
        for (text, words) in [
            ("kubernetesVersion: new", "kubernetesVersion"),
            ("proxy: {uid: 0}", "proxy.uid"),
            (
                "neverInjectSelector: [{matchExpressions: [{key: a, operator: In}]}]",
                "neverInjectSelector",
            ),
        ] {
            let config = Config::parse(text).unwrap();
            let message = config.check().unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
        }
    }
}
