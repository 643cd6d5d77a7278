//! The injector's configuration, a YAML file.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::selector::Selector;

#[derive(Debug, thiserror::Error)]
pub enum InvalidConfig {
    /// The text is not YAML, or has an unknown field.
    #[error("the configuration cannot be read: {0}")]
    Yaml(String),
    #[error("{field}: {why}")]
    Field {
        field: String,
        /// The problem, with the expected value.
        why: String,
    },
    #[error("template {name:?}, line {line}: {why}")]
    Template {
        name: String,
        line: usize,
        why: String,
    },
}

/// The decision for pods that have neither label nor annotation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    #[default]
    Enabled,
    Disabled,
}

/// The choice of native sidecars, which are init containers that keep running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NativeSidecars {
    /// Proxies are native sidecars if `kubernetesVersion` is 1.33 or later, because all kubelets then support them.
    #[default]
    Auto,
    True,
    False,
}

impl<'de> Deserialize<'de> for NativeSidecars {
    /// Accepts booleans of YAML as well as strings.
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

/// The configuration of the injector, in which every field has a default.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Config {
    /// The decision for pods that have neither label nor annotation.
    pub policy: Policy,
    /// Excludes pods that do not opt in themselves, if any of the selectors matches.
    pub never_inject_selector: Vec<Selector>,
    /// Includes pods regardless of the policy, if any of the selectors matches.
    pub always_inject_selector: Vec<Selector>,
    /// The templates for pods that name none in an annotation.
    pub default_templates: Vec<String>,
    /// Names for lists of templates, usable in place of a template's name.
    pub aliases: BTreeMap<String, Vec<String>>,
    /// Templates by name; the name `sidecar` overrides the built-in template.
    pub templates: BTreeMap<String, String>,
    /// True if the node redirects traffic, instead of a container in each pod.
    pub cni: bool,
    pub native_sidecars: NativeSidecars,
    /// The cluster's version, such as `1.33`, which decides for `nativeSidecars: auto`.
    pub kubernetes_version: String,
    /// True if the probes of applications are redirected to the agent.
    #[serde(rename = "rewriteAppHTTPProbe")]
    pub rewrite_app_http_probe: bool,
    /// True if the agent merges the application's metrics with its own and the proxy's.
    pub enable_prometheus_merge: bool,
    /// The node's plugin as a Multus network such as `default/istio-cni`, or an empty text if the plugin is in the CNI
    /// chain.
    pub multus_network: String,
    /// The revision of this injector, as in the label `istio.io/rev`.
    pub revision: String,
    pub cluster_domain: String,
    /// The name of the cluster in the mesh.
    pub cluster_id: String,
    /// The name of the cluster's network, which may be empty.
    pub network: String,
    /// The id of the mesh, by default the trust domain.
    pub mesh_id: String,
    pub trust_domain: String,
    /// The host and port of the certificate authority.
    pub ca_address: String,
    /// Istio's `MeshConfig.defaultConfig`, overridden by the annotations of pods.
    pub proxy_config: Map<String, Value>,
    /// The annotations that every injected pod gets.
    pub injected_annotations: BTreeMap<String, String>,
    /// The names of pull secrets for the images below.
    pub image_pull_secrets: Vec<String>,
    pub proxy: Proxy,
}

/// The families whose redirection `istio-validation` checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ValidationFamily {
    /// The families in which the pod has an address.
    Auto,
    /// IPv4 alone, for nodes that redirect no IPv6: validation would fail for each pod with an IPv6 address.
    Ipv4,
}

impl ValidationFamily {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Ipv4 => "ipv4",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Proxy {
    pub image: String,
    /// The image of `istio-init`, which is used only if `cni` is false.
    pub init_image: String,
    pub validation_image: String,
    pub validation_family: ValidationFamily,
    /// Always, IfNotPresent or Never, or an empty text for Kubernetes' default.
    pub image_pull_policy: String,
    pub uid: u32,
    pub gid: u32,
    pub log_level: String,
    pub component_log_level: String,
    pub agent_log_level: String,
    /// The port for health checks, unless the pod or `proxyConfig` sets another port.
    pub status_port: u16,
    /// The resources of the proxy, unless an annotation sets any resource.
    pub resources: Map<String, Value>,
}

/// The version since which kubelets cannot disable native sidecars (KEP-753).
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
    /// Returns the values of Istio's chart (services/docs/facts/istio-sidecar.md, 6.6).
    fn default() -> Self {
        let text = str::to_owned;
        let resources = json!({
            "requests": {"cpu": "100m", "memory": "128Mi"},
            // The limits have the API server's canonical form, so that a second injection changes nothing.
            "limits": {"cpu": "2", "memory": "1Gi"},
        });
        Self {
            image: text("docker.io/istio/proxyv2:1.29.0"),
            init_image: text("docker.io/istio/proxyv2:1.29.0"),
            validation_image: format!("localhost/validate:{}", env!("CARGO_PKG_VERSION")),
            validation_family: ValidationFamily::Auto,
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
    /// Parses YAML; an empty text yields the default configuration.
    ///
    /// # Errors
    ///
    /// Fails on invalid YAML, and on unknown fields and values, too.
    pub fn parse(text: &str) -> Result<Self, InvalidConfig> {
        let document: Value =
            serde_saphyr::from_str(text).map_err(|error| InvalidConfig::Yaml(error.to_string()))?;
        if document.is_null() {
            return Ok(Self::default());
        }
        serde_json::from_value(document).map_err(|error| InvalidConfig::Yaml(error.to_string()))
    }

    /// Returns whether proxies are native sidecars by default; a pod's annotation may override the default.
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

/// Parses the major and minor number of versions such as `v1.33.2-gke.1`.
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
