//! Strategic merge of a partial pod, for the fields that templates use.
//!
//! Maps are merged by key, and the lists below by item, while any other value is replaced. `null` and `$patch: delete`
//! remove a value, and `$patch: replace` replaces a map.

use std::collections::HashMap;

use serde_json::{Map, Value};

/// The merge keys of lists, from k8s.io/api/core/v1 (`patchMergeKey`). Ports have two keys, so that TCP and UDP ports
/// of the same number are different items.
const KEYED: &[(&str, &[&str])] = &[
    ("containers", &["name"]),
    ("initContainers", &["name"]),
    ("ephemeralContainers", &["name"]),
    ("volumes", &["name"]),
    ("imagePullSecrets", &["name"]),
    ("env", &["name"]),
    ("ports", &["containerPort", "protocol"]),
    ("volumeMounts", &["mountPath"]),
    ("volumeDevices", &["devicePath"]),
    ("hostAliases", &["ip"]),
    ("resourceClaims", &["name"]),
    (
        "topologySpreadConstraints",
        &["topologyKey", "whenUnsatisfiable"],
    ),
];

/// Lists of unions, in which a later item replaces an earlier item, because two members would be invalid.
const WHOLE: &[&str] = &["env", "volumes"];

/// The handlers of probes and hooks, of which exactly one is allowed.
const HANDLERS: [&str; 5] = ["exec", "httpGet", "tcpSocket", "grpc", "sleep"];

const DIRECTIVE: &str = "$patch";

/// Returns the keys of a list, or `None` if the list is not merged by item.
pub(crate) fn key_of(list: &str) -> Option<&'static [&'static str]> {
    let found = KEYED.iter().find(|(name, _)| *name == list);
    found.map(|(_, fields)| *fields)
}

/// Returns the values of an item's merge keys, which are equal for the same item.
fn key_values(item: &Value, fields: &[&str]) -> Vec<Value> {
    let value = |name: &&str| match item.get(*name) {
        // TCP is the default of `protocol` (core/v1, ContainerPort).
        None | Some(Value::Null) if *name == "protocol" => "TCP".into(),
        found => found.cloned().unwrap_or_default(),
    };
    fields.iter().map(value).collect()
}

pub fn merge(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => merge_map(base, over),
        (base, over) => *base = without_directives(over),
    }
}

fn merge_map(base: &mut Map<String, Value>, over: &Map<String, Value>) {
    match over.get(DIRECTIVE).and_then(Value::as_str) {
        Some("replace") => base.clear(),
        Some("delete") => return base.clear(),
        _ => {}
    }
    if HANDLERS.iter().any(|handler| over.contains_key(*handler)) {
        base.retain(|key, _| !HANDLERS.contains(&key.as_str()) || over.contains_key(key));
    }
    for (key, value) in over {
        if key == DIRECTIVE {
            continue;
        }
        if value.is_null() || directive(value) == Some("delete") {
            base.remove(key);
            continue;
        }
        let fields = key_of(key).filter(|_| value.is_array());
        match (base.get_mut(key), fields) {
            (Some(Value::Array(items)), Some(fields)) => {
                let over = value.as_array().map_or(&[][..], Vec::as_slice);
                merge_list(items, over, fields, WHOLE.contains(&key.as_str()));
            }
            (Some(known @ Value::Object(_)), _) => merge(known, value),
            (Some(known), _) if covers(known, value) => {}
            (Some(known), _) => *known = without_directives(value),
            (None, _) => {
                base.insert(key.clone(), without_directives(value));
            }
        }
    }
}

fn merge_list(items: &mut Vec<Value>, over: &[Value], fields: &[&str], is_whole: bool) {
    let mut slots: Vec<_> = std::mem::take(items).into_iter().map(Some).collect();
    let mut positions = HashMap::new();
    for (at, item) in slots.iter().flatten().enumerate() {
        positions.entry(key_values(item, fields)).or_insert(at);
    }
    for item in over {
        let key = key_values(item, fields);
        let is_deleted = directive(item) == Some("delete");
        match positions.get(&key).and_then(|at| slots.get_mut(*at)) {
            Some(slot) if is_deleted => *slot = None,
            Some(Some(known)) if is_whole && covers(known, item) => {}
            Some(Some(known)) if !is_whole => merge(known, item),
            Some(slot) => *slot = Some(without_directives(item)),
            None if is_deleted => {}
            None => {
                positions.insert(key, slots.len());
                slots.push(Some(without_directives(item)));
            }
        }
    }
    items.extend(slots.into_iter().flatten());
}

/// Returns whether `known` contains all values of `over`; additional values are the API server's defaults.
fn covers(known: &Value, over: &Value) -> bool {
    match (known, over) {
        (Value::Object(known), Value::Object(over)) => over.iter().all(|(key, value)| {
            let existing = known.get(key);
            existing.is_some_and(|existing| covers(existing, value))
        }),
        (Value::Array(known), Value::Array(over)) => {
            known.len() == over.len()
                && known
                    .iter()
                    .zip(over)
                    .all(|(left, right)| covers(left, right))
        }
        (known, over) => known == over,
    }
}

fn directive(value: &Value) -> Option<&str> {
    value.get(DIRECTIVE)?.as_str()
}

fn without_directives(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let kept = map.iter().filter(|(key, value)| {
                *key != DIRECTIVE && !value.is_null() && directive(value) != Some("delete")
            });
            kept.map(|(key, value)| (key.clone(), without_directives(value)))
                .collect()
        }
        Value::Array(items) => {
            let kept = items
                .iter()
                .filter(|item| directive(item) != Some("delete"));
            kept.map(without_directives).collect()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.clone(),
    }
}

#[cfg(test)]
mod tests;
