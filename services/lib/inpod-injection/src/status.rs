//! What was injected, written down in the pod: for the node's plugin and repair, which look for the annotation, and for
//! the next injection, which goes by it (services/docs/facts/istio-sidecar.md, 6.6). Beyond Istio's fields it holds what the pod said
//! before, so that an injection can be taken back.

use std::collections::BTreeMap;

use inpod_types::keys;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::{
    config::Config,
    json,
    last_applied::{self, FieldHashes},
};

/// What an annotation or label said before; `None`: it was not there.
pub type PreviousValues = BTreeMap<String, Option<String>>;

/// The annotation's content. Fields of others are passed over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    /// Injected init containers.
    #[serde(deserialize_with = "null_as_empty")]
    pub init_containers: Vec<String>,
    /// Injected containers.
    #[serde(deserialize_with = "null_as_empty")]
    pub containers: Vec<String>,
    /// Injected volumes.
    #[serde(deserialize_with = "null_as_empty")]
    pub volumes: Vec<String>,
    /// Injected secrets.
    #[serde(deserialize_with = "null_as_empty")]
    pub image_pull_secrets: Vec<String>,
    /// Which injector it was.
    pub revision: String,
    /// Labels that were set, with what they said before.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: PreviousValues,
    /// Annotations that were set, with what they said before.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: PreviousValues,
    /// The names of ports of rewritten probes, by the path that they have now.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub ports: BTreeMap<String, String>,
    /// Marks of what was laid over the pod.
    #[serde(rename = "laid", skip_serializing_if = "FieldHashes::is_empty")]
    pub last_applied: FieldHashes,
}

/// Istio writes `null` where there is none.
fn null_as_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl Status {
    /// What stands in a pod; `None` where it was not injected, or by somebody whose word cannot be read.
    pub fn read(pod: &Value) -> Option<Self> {
        serde_json::from_str(json::annotation(pod, keys::SIDECAR_STATUS)?).ok()
    }

    /// What was made of a pod by what was laid over it.
    pub(crate) fn of(over: &Value, original: &Value, pod: &Value, config: &Config) -> Self {
        let spec = json::spec(over);
        let known = |list: &str, name: &str| {
            let mut items = json::list(json::spec(original), list).iter();
            items.any(|it| json::name(it) == Some(name))
        };
        let names = |list: &'static str| json::list(spec, list).iter().filter_map(json::name);
        let all = |list| names(list).map(str::to_owned).collect();
        let new = |list| {
            let new = names(list).filter(|name| !known(list, name));
            new.map(str::to_owned).collect()
        };
        let (labels, annotations) = (
            changed_values(original, pod, "labels"),
            changed_values(original, pod, "annotations"),
        );
        let mut applied = last_applied::container_hashes(over);
        applied.extend(metadata_hashes(pod, "labels", &labels));
        applied.extend(metadata_hashes(pod, "annotations", &annotations));
        Self {
            init_containers: all("initContainers"),
            containers: all("containers"),
            volumes: new("volumes"),
            image_pull_secrets: new("imagePullSecrets"),
            revision: config.revision.clone(),
            labels,
            annotations,
            ports: Self::read(pod).unwrap_or_default().ports,
            last_applied: applied,
        }
    }

    /// Writes it into a pod.
    pub(crate) fn write(&self, pod: &mut Value) {
        // A struct of texts is always written.
        let text = serde_json::to_string(self).unwrap_or_default();
        json::annotate(pod, keys::SIDECAR_STATUS, &text);
    }
}

/// What of a map of the metadata is not as it was, what is gone included. The status itself is not told: it is there or
/// not.
fn changed_values(original: &Value, pod: &Value, map: &str) -> PreviousValues {
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
fn metadata_hashes(pod: &Value, map: &str, keys: &PreviousValues) -> FieldHashes {
    let now = |key: &str| pod.get("metadata")?.get(map)?.get(key);
    let hash = |key: &String| last_applied::field_hash(map, key, now(key).unwrap_or(&Value::Null));
    keys.keys().map(hash).collect()
}
