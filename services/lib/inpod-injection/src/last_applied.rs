//! Remembers a hash of each injected field, label and annotation for the next injection.
//!
//! The API server calls the webhook again after a later webhook has changed the pod. If this injector would only repeat
//! a value, the pod's value wins, because another image (a registry mirror) or other resources (an autoscaler) were set
//! on purpose. Istio's injector reverts both.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::json::{self, CONTAINER_LISTS};

pub type FieldHashes = BTreeSet<String>;

/// Computes FNV-1a with 32 bits (draft-eastlake-fnv). The hash is stable across releases, but is not a secret.
fn fnv1a(parts: [&str; 3]) -> u32 {
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0]));
    bytes.fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

/// Hashes a value of a container or a map; null stands for an absent value.
pub(crate) fn field_hash(owner: &str, key: &str, value: &Value) -> String {
    format!("{:08x}", fnv1a([owner, key, &value.to_string()]))
}

fn fields(container: &Value) -> impl Iterator<Item = (&String, &Value)> {
    container.as_object().into_iter().flatten()
}

pub(crate) fn container_hashes(over: &Value) -> FieldHashes {
    let all = json::all_containers(over).flat_map(|(_, container)| {
        let name = json::name(container).unwrap_or_default();
        fields(container).map(move |(key, value)| field_hash(name, key, value))
    });
    all.collect()
}

/// Removes fields whose value is in `applied`, the hashes of the previous injection. A container that is missing in the pod stays whole.
pub(crate) fn without_repeated(mut over: Value, pod: &Value, applied: &FieldHashes) -> Value {
    if applied.is_empty() {
        return over;
    }
    for list in CONTAINER_LISTS {
        let existing = json::containers(pod, list);
        let exists = |it: &Value| {
            existing
                .iter()
                .any(|known| json::name(known) == json::name(it))
        };
        let all = over.pointer_mut(&format!("/spec/{list}"));
        for container in all.and_then(Value::as_array_mut).into_iter().flatten() {
            let name = json::name(container).unwrap_or_default().to_owned();
            if exists(container)
                && let Some(fields) = container.as_object_mut()
            {
                fields.retain(|key, value| {
                    key == "name" || !applied.contains(&field_hash(&name, key, value))
                });
            }
        }
    }
    over
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{Config, Injector, Outcome, Request, revert};

    fn injected(config: &str, pod: &Value) -> (Value, usize) {
        let injector = Injector::new(Config::parse(config).unwrap()).unwrap();
        let request = Request {
            pod,
            namespace: "shop",
            environment: &[],
        };
        match injector.inject(&request).unwrap() {
            Outcome::Injected { pod, patch } => (pod, patch.0.len()),
            Outcome::Skipped(why) => panic!("{why:?}"),
        }
    }

    fn pod() -> Value {
        json!({"metadata": {"name": "web"}, "spec": {"containers": [{"name": "app", "image": "a"}]}})
    }

    #[test]
    fn what_others_have_changed_since_stays_and_is_no_reason_for_a_patch() {
        for declared in [
            None,
            Some(json!({"name": "istio-proxy", "image": "mine:1"})),
        ] {
            let mut pod = pod();
            pod["spec"]["containers"]
                .as_array_mut()
                .unwrap()
                .extend(declared);
            let (mut changed, _) = injected("", &pod);
            for container in ["/spec/containers/0", "/spec/containers/1"] {
                let container = changed.pointer_mut(container).unwrap();
                container["image"] = format!("mirror/{}", container["image"]).into();
                container["resources"] = json!({"requests": {"cpu": "7m"}});
            }
            assert_eq!(injected("", &changed), (changed, 0));
        }
    }

    #[test]
    fn new_values_are_applied_and_a_removed_container_comes_back() {
        let (mut changed, _) = injected("", &pod());
        changed["spec"]["containers"][1]["image"] = "mirror/proxy".into();
        let (now, _) = injected("proxy: {image: new/proxy}", &changed);
        assert_eq!(now["spec"]["containers"][1]["image"], "new/proxy");
        let (whole, _) = injected("", &pod());
        let mut gone = whole.clone();
        gone["spec"]["containers"].as_array_mut().unwrap().pop();
        assert_eq!(injected("", &gone).0, whole);
    }

    #[test]
    fn an_annotation_that_others_have_changed_since_is_taken_for_the_authors() {
        let key = inpod_types::keys::SIDECAR_EXCLUDE_INBOUND_PORTS;
        let (mut changed, _) = injected("", &pod());
        assert_eq!(changed["metadata"]["annotations"][key], "15020");
        changed["metadata"]["annotations"][key] = "3306".into();
        let (now, _) = injected("", &changed);
        assert_eq!(now["metadata"]["annotations"][key], "3306");
        let author = revert::original_pod(&now);
        assert_eq!(author["metadata"]["annotations"], json!({(key): "3306"}));
        assert_eq!(injected("", &now).1, 0);
    }

    #[test]
    fn marks_are_the_same_in_every_release() {
        assert_eq!(field_hash("istio-proxy", "image", &"i:1".into()), EXPECTED);
        assert_ne!(field_hash("istio-proxy", "image", &"i:2".into()), EXPECTED);
        assert_ne!(field_hash("istio-prox", "yimage", &"i:1".into()), EXPECTED);
    }

    /// The expected hash comes from another implementation of FNV-1a.
    const EXPECTED: &str = "406f248b";
}
