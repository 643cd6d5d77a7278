//! Reverts an injection to the author's pod, so that a second injection leads to the same result and a person can see
//! all additions.

use std::collections::HashSet;

use inpod_types::keys;
use serde_json::Value;

use crate::{
    json::{self, CONTAINER_LISTS},
    last_applied::{self, FieldHashes},
    merge::key_of,
    probes,
    status::{PreviousValues, Status},
};

/// Returns the author's pod; a pod without injection is returned unchanged.
///
/// Fields of the spec from custom templates remain, except containers, volumes and pull secrets, because the status
/// records no other fields.
pub fn original_pod(pod: &Value) -> Value {
    let Some(status) = Status::read(pod) else {
        return pod.clone();
    };
    let mut pod = pod.clone();
    probes::restore(&mut pod, &status);
    let declared = json::annotation(&pod, keys::OVERRIDES);
    let declared: Value = declared
        .and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default();
    let lists = [
        ("initContainers", &status.init_containers),
        ("containers", &status.containers),
        ("volumes", &status.volumes),
        ("imagePullSecrets", &status.image_pull_secrets),
    ];
    for (list, names) in lists {
        remove_items(&mut pod, list, names);
    }
    for list in CONTAINER_LISTS {
        restore_containers(&mut pod, list, json::list(&declared, list));
    }
    restore_metadata(&mut pod, "labels", &status.labels, &status.last_applied);
    restore_metadata(
        &mut pod,
        "annotations",
        &status.annotations,
        &status.last_applied,
    );
    json::remove_metadata(
        &mut pod,
        "annotations",
        [keys::SIDECAR_STATUS, keys::OVERRIDES],
    );
    pod
}

fn remove_items(pod: &mut Value, list: &str, names: &[String]) {
    let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) else {
        return;
    };
    let Some(items) = spec.get_mut(list).and_then(Value::as_array_mut) else {
        return;
    };
    let had_any = !items.is_empty();
    let names: HashSet<_> = names.iter().map(String::as_str).collect();
    let is_injected = |item: &Value| json::name(item).is_some_and(|name| names.contains(name));
    items.retain(|item| !is_injected(item));
    if had_any && items.is_empty() && key_of(list).is_some() {
        spec.remove(list);
    }
}

fn restore_containers(pod: &mut Value, list: &str, containers: &[Value]) {
    if containers.is_empty() {
        return;
    }
    let spec = json::object_mut(pod, "spec");
    if let Some(items) = spec.and_then(|spec| json::list_mut(spec, list)) {
        items.extend(containers.iter().cloned());
    }
}

/// Restores previous values, but keeps a value that others have changed since.
fn restore_metadata(pod: &mut Value, map: &str, before: &PreviousValues, applied: &FieldHashes) {
    let now = |key: &str| pod.get("metadata")?.get(map)?.get(key);
    let is_ours = |key: &str| {
        let now = now(key).unwrap_or(&Value::Null);
        applied.is_empty() || applied.contains(&last_applied::field_hash(map, key, now))
    };
    let ours: Vec<_> = before.iter().filter(|(key, _)| is_ours(key)).collect();
    for (key, value) in &ours {
        if let Some(value) = value {
            json::set_metadata(pod, map, key, value);
        }
    }
    let absent = ours.iter().filter(|(_, value)| value.is_none());
    json::remove_metadata(pod, map, absent.map(|(key, _)| key.as_str()));
}
