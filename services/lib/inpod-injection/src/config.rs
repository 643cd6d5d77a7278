//! What an operator says of injection: one YAML file, the same for the webhook and for `inpod inject`.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{decide::Policy, selector::Selector};

/// Why a configuration is not used. Told to the operator.
#[derive(Debug, thiserror::Error)]
pub enum InvalidConfig {
    /// It is no YAML, or has a field that there is not.
    #[error("the configuration cannot be read: {0}")]
    Yaml(String),
    /// A field says what it should not.
    #[error("{field}: {why}")]
    Field {
        /// Its name.
        field: String,
        /// What is wrong with it, and what to give.
        why: String,
    },
    /// A template cannot be used.
    #[error("template {name:?}, line {line}: {why}")]
    Template {
        /// Its name.
        name: String,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
}

/// Whether the proxy is an init container that goes on running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NativeSidecars {
    /// Where every kubelet of the cluster is sure to know them: `kubernetesVersion` is 1.33 or later.
    #[default]
    Auto,
    /// Always.
    True,
    /// Never.
    False,
}

impl<'de> Deserialize<'de> for NativeSidecars {
    /// `true` and `false` are no texts in YAML, and both are taken.
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

/// What is configured; every field has a default.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Config {
    /// What becomes of pods that say nothing.
    pub policy: Policy,
    /// Pods that are not injected unless they ask for it; any selector is enough.
    pub never_inject_selector: Vec<Selector>,
    /// Pods that are injected whatever the policy says; any selector is enough.
    pub always_inject_selector: Vec<Selector>,
    /// Templates of pods that name none.
    pub default_templates: Vec<String>,
    /// Names that stand for lists of templates.
    pub aliases: BTreeMap<String, Vec<String>>,
    /// Templates by name, besides the built-in `sidecar` and `standalone`, which one of such a name replaces.
    pub templates: BTreeMap<String, String>,
    /// Whether the node redirects traffic; false: a container of each pod does.
    pub cni: bool,
    /// Whether the proxy is an init container that goes on running.
    pub native_sidecars: NativeSidecars,
    /// The API server's version, like `1.33`, by which `nativeSidecars: auto` is decided.
    pub kubernetes_version: String,
    /// Whether probes of applications are led through the proxy's agent.
    #[serde(rename = "rewriteAppHTTPProbe")]
    pub rewrite_app_http_probe: bool,
    /// Whether metrics of applications are asked for through the proxy's agent.
    pub enable_prometheus_merge: bool,
    /// The network of Multus that is the node's plugin, like `default/istio-cni`; empty: it is in a chain.
    pub multus_network: String,
    /// Which injector this is.
    pub revision: String,
    /// The cluster's DNS domain.
    pub cluster_domain: String,
    /// The cluster's name in the mesh.
    pub cluster_id: String,
    /// The network's name in the mesh; empty: none.
    pub network: String,
    /// The mesh's name; empty: the trust domain.
    pub mesh_id: String,
    /// The trust domain of identities.
    pub trust_domain: String,
    /// Where certificates are had, host and port.
    pub ca_address: String,
    /// Istio's `MeshConfig.defaultConfig`: goes to the proxy as it is, below what the pod says.
    pub proxy_config: Map<String, Value>,
    /// Annotations of every pod that is injected.
    pub injected_annotations: BTreeMap<String, String>,
    /// Names of secrets for the registry of the images below.
    pub image_pull_secrets: Vec<String>,
    /// The proxy.
    pub proxy: Proxy,
}

/// What is configured of the injected containers.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Proxy {
    /// The proxy's image.
    pub image: String,
    /// The image of `istio-init`, which redirects where `cni` is false.
    pub init_image: String,
    /// The image of `istio-validation`.
    pub validation_image: String,
    /// Always, IfNotPresent or Never; empty: as Kubernetes has it.
    pub image_pull_policy: String,
    /// The user that the proxy runs as.
    pub uid: u32,
    /// The group that the proxy runs as.
    pub gid: u32,
    /// The proxy's log level.
    pub log_level: String,
    /// The log levels of the proxy's parts.
    pub component_log_level: String,
    /// The log levels of the proxy's agent.
    pub agent_log_level: String,
    /// Where the proxy's agent answers probes, where neither the pod nor `proxyConfig` says it.
    pub status_port: u16,
    /// Whether the built-in bootstrap listens on IPv6 too; false where the nodes' kernels have none.
    pub ipv6: bool,
    /// The proxy's resources, as Kubernetes has them, where no annotation says any.
    pub resources: Map<String, Value>,
}

/// The first release whose kubelets cannot switch native sidecars off (Kubernetes, KEP-753: stable in 1.33).
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
    /// Names and numbers of Istio's chart (services/docs/facts/istio-sidecar.md, 6.6).
    fn default() -> Self {
        let text = str::to_owned;
        let resources = json!({
            "requests": {"cpu": "100m", "memory": "128Mi"},
            // As the API server writes quantities: a second injection finds nothing to change.
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
            ipv6: true,
            resources: resources.as_object().cloned().unwrap_or_default(),
        }
    }
}

impl Config {
    /// Reads a configuration; an empty text is the default.
    ///
    /// # Errors
    ///
    /// When it is no YAML, or names what there is not.
    pub fn parse(text: &str) -> Result<Self, InvalidConfig> {
        let document: Value =
            serde_saphyr::from_str(text).map_err(|error| InvalidConfig::Yaml(error.to_string()))?;
        if document.is_null() {
            return Ok(Self::default());
        }
        serde_json::from_value(document).map_err(|error| InvalidConfig::Yaml(error.to_string()))
    }

    /// Whether the cluster has native sidecars. A pod may say otherwise.
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
                format!("{versions:?} is no version like 1.33"),
            ));
        }
        if self.proxy.uid == 0 {
            let why = "0 is root, whose traffic nothing tells from the node's; give another";
            return Err(field("proxy.uid", why.to_owned()));
        }
        Ok(())
    }
}

/// Major and minor, of `v1.33.2-gke.1` and the like.
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
    fn nothing_said_is_the_default_and_an_unknown_name_is_told() {
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
