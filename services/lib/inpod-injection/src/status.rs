//! What was injected, written down in the pod: for the node's plugin and repair, which look for the annotation, and for
//! the next injection, which goes by it (services/docs/facts/istio-sidecar.md, 6.6). Beyond Istio's fields it holds what the pod said
//! before, so that an injection can be taken back.

use std::collections::BTreeMap;

use inpod_types::keys;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::{
    config::Config,
    laid::{self, Marks},
    tree,
};

/// What an annotation or label said before; `None`: it was not there.
pub type Before = BTreeMap<String, Option<String>>;

/// The annotation's content. Fields of others are passed over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    /// Injected init containers.
    #[serde(deserialize_with = "or_none")]
    pub init_containers: Vec<String>,
    /// Injected containers.
    #[serde(deserialize_with = "or_none")]
    pub containers: Vec<String>,
    /// Injected volumes.
    #[serde(deserialize_with = "or_none")]
    pub volumes: Vec<String>,
    /// Injected secrets.
    #[serde(deserialize_with = "or_none")]
    pub image_pull_secrets: Vec<String>,
    /// Which injector it was.
    pub revision: String,
    /// Labels that were set, with what they said before.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: Before,
    /// Annotations that were set, with what they said before.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: Before,
    /// The names of ports of rewritten probes, by the path that they have now.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub ports: BTreeMap<String, String>,
    /// Marks of what was laid over the pod.
    #[serde(skip_serializing_if = "Marks::is_empty")]
    pub laid: Marks,
}

/// Istio writes `null` where there is none.
fn or_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl Status {
    /// What stands in a pod; `None` where it was not injected, or by somebody whose word cannot be read.
    pub fn read(pod: &Value) -> Option<Self> {
        serde_json::from_str(tree::annotation(pod, keys::SIDECAR_STATUS)?).ok()
    }

    /// What was made of a pod by what was laid over it.
    pub(crate) fn of(over: &Value, original: &Value, pod: &Value, config: &Config) -> Self {
        let spec = tree::spec(over);
        let known = |list: &str, name: &str| {
            let mut items = tree::list(tree::spec(original), list).iter();
            items.any(|it| tree::name(it) == Some(name))
        };
        let names = |list: &'static str| tree::list(spec, list).iter().filter_map(tree::name);
        let all = |list| names(list).map(str::to_owned).collect();
        let new = |list| {
            let new = names(list).filter(|name| !known(list, name));
            new.map(str::to_owned).collect()
        };
        let (labels, annotations) = (
            changed(original, pod, "labels"),
            changed(original, pod, "annotations"),
        );
        let mut laid = laid::of_containers(over);
        laid.extend(marks(pod, "labels", &labels));
        laid.extend(marks(pod, "annotations", &annotations));
        Self {
            init_containers: all("initContainers"),
            containers: all("containers"),
            volumes: new("volumes"),
            image_pull_secrets: new("imagePullSecrets"),
            revision: config.revision.clone(),
            labels,
            annotations,
            ports: Self::read(pod).unwrap_or_default().ports,
            laid,
        }
    }

    /// Writes it into a pod.
    pub(crate) fn write(&self, pod: &mut Value) {
        // A struct of texts is always written.
        let text = serde_json::to_string(self).unwrap_or_default();
        tree::annotate(pod, keys::SIDECAR_STATUS, &text);
    }
}

/// What of a map of the metadata is not as it was, what is gone included. The status itself is not told: it is there or
/// not.
fn changed(original: &Value, pod: &Value, map: &str) -> Before {
    let of = |pod: &Value| {
        let found = pod.get("metadata").and_then(|metadata| metadata.get(map));
        found
            .and_then(Value::as_object)
            .cloned()
            .unwrap_or_else(Map::new)
    };
    let (before, now) = (of(original), of(pod));
    let is_other =
        |key: &&String| before.get(*key) != now.get(*key) && *key != keys::SIDECAR_STATUS;
    let was = |key: &String| before.get(key).and_then(Value::as_str).map(str::to_owned);
    let all = now.keys().chain(before.keys()).filter(is_other);
    all.map(|key| (key.clone(), was(key))).collect()
}

/// The marks of what these keys of a map of the metadata say now.
fn marks(pod: &Value, map: &str, keys: &Before) -> Marks {
    let now = |key: &str| pod.get("metadata")?.get(map)?.get(key);
    let mark = |key: &String| laid::mark(map, key, now(key).unwrap_or(&Value::Null));
    keys.keys().map(mark).collect()
}
