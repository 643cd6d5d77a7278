//! The status annotation, for the node's plugin, for repair and for the next injection
//! (services/docs/facts/istio-sidecar.md, 6.6). Previous values, which Istio does not store, make a revert possible.

use std::collections::BTreeMap;

use inpod_types::keys;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::{
    config::Config,
    json,
    last_applied::{self, FieldHashes},
};

/// Previous values by key, with `None` for an absent value.
pub type PreviousValues = BTreeMap<String, Option<String>>;

/// The content of the annotation, in which unknown fields are ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    #[serde(deserialize_with = "null_as_empty")]
    pub init_containers: Vec<String>,
    #[serde(deserialize_with = "null_as_empty")]
    pub containers: Vec<String>,
    #[serde(deserialize_with = "null_as_empty")]
    pub volumes: Vec<String>,
    #[serde(deserialize_with = "null_as_empty")]
    pub image_pull_secrets: Vec<String>,
    pub revision: String,
    /// The labels set by the injection, with their previous values.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: PreviousValues,
    /// The annotations set by the injection, with their previous values.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: PreviousValues,
    /// The names of ports by the path of the redirected probe.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub ports: BTreeMap<String, String>,
    #[serde(rename = "laid", skip_serializing_if = "FieldHashes::is_empty")]
    pub last_applied: FieldHashes,
}

/// Accepts `null`, which Istio writes instead of an empty list.
fn null_as_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl Status {
    /// Returns `None` if the annotation is absent or invalid.
    pub fn read(pod: &Value) -> Option<Self> {
        serde_json::from_str(json::annotation(pod, keys::SIDECAR_STATUS)?).ok()
    }

    /// Computes the status from the merged templates and the two pods.
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

    pub(crate) fn write(&self, pod: &mut Value) {
        // A struct of strings can always be serialized.
        let text = serde_json::to_string(self).unwrap_or_default();
        json::annotate(pod, keys::SIDECAR_STATUS, &text);
    }
}

/// Returns changed or removed labels or annotations with their previous values, except the status itself.
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

/// Hashes the current values of labels or annotations.
fn metadata_hashes(pod: &Value, map: &str, keys: &PreviousValues) -> FieldHashes {
    let now = |key: &str| pod.get("metadata")?.get(map)?.get(key);
    let hash = |key: &String| last_applied::field_hash(map, key, now(key).unwrap_or(&Value::Null));
    keys.keys().map(hash).collect()
}
