//! Accessors for pods as JSON. A value of the wrong type counts as absent, because the API server has validated the
//! pod, or [`check_pod`] the manifest.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::{error::InjectError, merge::key_of};

/// The lists of containers, in the order in which the kubelet starts them.
pub(crate) const CONTAINER_LISTS: [&str; 2] = ["initContainers", "containers"];

/// The largest size of a pod as JSON text. By default etcd accepts objects up to 1.5 MiB, in protobuf; JSON adds about
/// 20 bytes for each of at most [`MAX_VALUES`] values.
const MAX_POD_BYTES: usize = 2 * 1024 * 1024;

/// The maximum number of values in a pod: a map of 7 bytes as text takes 700 bytes in memory, in up to eight copies.
const MAX_VALUES: usize = 25_000;

/// The maximum number of values in a pod that is parsed only to name a list with too many items.
const MAX_PARSED_VALUES: usize = 6 * MAX_VALUES;

/// The maximum number of items in a list that is merged by item.
pub(crate) const MAX_ITEMS: usize = 1000;

/// The maximum size of all annotations, as in the API server's own validation (apimachinery,
/// validation.TotalAnnotationSizeLimitB).
const MAX_ANNOTATION_BYTES: usize = 256 * 1024;

/// The maximum length of the names of containers and volumes (apimachinery, validation.DNS1123LabelMaxLength).
const MAX_NAME_LENGTH: usize = 63;

/// Parses a pod whose size in memory is limited.
///
/// # Errors
///
/// Fails if the pod is too large, or nested too deeply.
pub fn parse_pod(text: &str) -> Result<Value, InjectError> {
    check_limit("it", "bytes of JSON", text.len(), MAX_POD_BYTES)?;
    let count = count_values(text);
    check_limit("it", "values", count, MAX_PARSED_VALUES)?;
    let pod = serde_json::from_str(text);
    let pod = pod.map_err(|error| InjectError::InvalidPod(error.to_string()))?;
    check_lengths(&pod)?;
    check_limit("it", "values", count, MAX_VALUES)?;
    Ok(pod)
}

/// Counts the values of a JSON text before they take memory. Empty lists and maps count twice.
fn count_values(text: &str) -> usize {
    let (mut is_in_string, mut is_escaped) = (false, false);
    let begins_value = |byte: &u8| {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => is_in_string = !is_in_string,
            _ => {}
        }
        !is_in_string && matches!(byte, b',' | b'[' | b'{')
    };
    1 + text.as_bytes().iter().copied().filter(begins_value).count()
}

fn check_limit(part: &str, what: &str, count: usize, max: usize) -> Result<(), InjectError> {
    if count <= max {
        return Ok(());
    }
    let why = format!("{part} has {count} {what}, and the limit is {max}");
    Err(InjectError::InvalidPod(why))
}

/// Checks the structure of a pod on which the injection relies, and the limits that keep the injection short.
pub(crate) fn check_pod(pod: &Value) -> Result<(), InjectError> {
    let objects = [
        "",
        "/metadata",
        "/spec",
        "/metadata/labels",
        "/metadata/annotations",
    ];
    for pointer in objects {
        let value = pod.pointer(pointer).filter(|value| !value.is_null());
        if value.is_some_and(|value| !value.is_object()) {
            return Err(InjectError::InvalidPod(format!(
                "{pointer} is not an object"
            )));
        }
    }
    let annotations = pod.pointer("/metadata/annotations");
    let annotations = annotations.and_then(Value::as_object);
    let bytes = |(key, value): (&String, &Value)| key.len() + value.as_str().map_or(0, str::len);
    let bytes = annotations.into_iter().flatten().map(bytes).sum();
    check_limit("annotations", "bytes", bytes, MAX_ANNOTATION_BYTES)?;
    check_lists(pod)?;
    if containers(pod, "containers").is_empty() {
        return Err(InjectError::InvalidPod("it has no containers".to_owned()));
    }
    Ok(())
}

/// Checks the lists of a pod. Names are unique, as in the API server's own validation, which runs after the injection.
pub(crate) fn check_lists(pod: &Value) -> Result<(), InjectError> {
    check_lengths(pod)?;
    for list in ["initContainers", "containers", "volumes"] {
        let items = pod.pointer(&format!("/spec/{list}"));
        let Some(items) = items.filter(|value| !value.is_null()) else {
            continue;
        };
        let mut names = HashSet::new();
        let mut is_named = |item: &Value| {
            let name = name(item).filter(|name| name.len() <= MAX_NAME_LENGTH);
            name.is_some_and(|name| names.insert(name.to_owned()))
        };
        if !items
            .as_array()
            .is_some_and(|items| items.iter().all(&mut is_named))
        {
            let what = format!(
                "/spec/{list} is not a list of objects with unique names of at most {MAX_NAME_LENGTH} bytes"
            );
            return Err(InjectError::InvalidPod(what));
        }
    }
    Ok(())
}

fn check_lengths(pod: &Value) -> Result<(), InjectError> {
    find_long_list(pod).map_or(Ok(()), |(name, count)| {
        check_limit(name, "items", count, MAX_ITEMS)
    })
}

/// Returns the name and the length of a list that is merged by item and has too many items.
fn find_long_list(value: &Value) -> Option<(&str, usize)> {
    match value {
        Value::Array(items) => items.iter().find_map(find_long_list),
        Value::Object(fields) => fields.iter().find_map(|(key, field)| {
            let count = list(value, key).len();
            let is_long = count > MAX_ITEMS && key_of(key).is_some();
            is_long
                .then_some((key.as_str(), count))
                .or_else(|| find_long_list(field))
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
    }
}

pub(crate) fn text<'a>(value: &'a Value, pointer: &str) -> Option<&'a str> {
    value.pointer(pointer).and_then(Value::as_str)
}

pub(crate) fn name(value: &Value) -> Option<&str> {
    value.get("name").and_then(Value::as_str)
}

fn of_metadata<'a>(pod: &'a Value, map: &str, key: &str) -> Option<&'a str> {
    pod.get("metadata")?.get(map)?.get(key)?.as_str()
}

pub(crate) fn annotation<'a>(pod: &'a Value, key: &str) -> Option<&'a str> {
    of_metadata(pod, "annotations", key)
}

pub(crate) fn label<'a>(pod: &'a Value, key: &str) -> Option<&'a str> {
    of_metadata(pod, "labels", key)
}

/// Returns the items of a list, or no items if the list is missing.
pub(crate) fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    let items = value.get(key).and_then(Value::as_array);
    items.map_or(&[], Vec::as_slice)
}

/// Returns a list, and creates a missing list.
pub(crate) fn list_mut<'a>(value: &'a mut Value, key: &str) -> Option<&'a mut Vec<Value>> {
    let items = value.as_object_mut()?.entry(key).or_insert(Value::Null);
    if items.is_null() {
        *items = Value::Array(Vec::new());
    }
    items.as_array_mut()
}

/// Returns an object, and creates a missing object.
pub(crate) fn object_mut<'a>(value: &'a mut Value, key: &str) -> Option<&'a mut Value> {
    let object = value.as_object_mut()?.entry(key).or_insert(Value::Null);
    if object.is_null() {
        *object = Value::Object(Map::new());
    }
    Some(object)
}

pub(crate) fn spec(pod: &Value) -> &Value {
    pod.get("spec").unwrap_or(&Value::Null)
}

pub(crate) fn containers<'a>(pod: &'a Value, key: &str) -> &'a [Value] {
    list(spec(pod), key)
}

/// Returns all containers, init containers first, each with the name of its list.
pub(crate) fn all_containers(pod: &Value) -> impl Iterator<Item = (&'static str, &Value)> {
    let of = |key: &'static str| containers(pod, key).iter().map(move |it| (key, it));
    CONTAINER_LISTS.into_iter().flat_map(of)
}

pub(crate) fn each_container(pod: &mut Value, mut act: impl FnMut(&'static str, &mut Value)) {
    for key in CONTAINER_LISTS {
        let pointer = format!("/spec/{key}");
        let items = pod.pointer_mut(&pointer).and_then(Value::as_array_mut);
        items.into_iter().flatten().for_each(|it| act(key, it));
    }
}

pub(crate) fn set_metadata(pod: &mut Value, map: &str, key: &str, value: &str) {
    let entries = object_mut(pod, "metadata").and_then(|metadata| object_mut(metadata, map));
    if let Some(entries) = entries.and_then(Value::as_object_mut) {
        entries.insert(key.to_owned(), value.into());
    }
}

pub(crate) fn annotate(pod: &mut Value, key: &str, value: &str) {
    set_metadata(pod, "annotations", key, value);
}

pub(crate) fn set_label(pod: &mut Value, key: &str, value: &str) {
    set_metadata(pod, "labels", key, value);
}

/// Removes entries, and also the map if no entry is left.
pub(crate) fn remove_metadata<'a>(
    pod: &mut Value,
    map: &str,
    keys: impl IntoIterator<Item = &'a str>,
) {
    let metadata = pod.get_mut("metadata").and_then(Value::as_object_mut);
    let Some(metadata) = metadata else { return };
    if let Some(entries) = metadata.get_mut(map).and_then(Value::as_object_mut) {
        for key in keys {
            entries.remove(key);
        }
        if entries.is_empty() {
            metadata.remove(map);
        }
    }
}

/// Returns the value of an environment variable, but only a literal value.
pub(crate) fn env_value<'a>(container: &'a Value, env_value: &str) -> Option<&'a str> {
    let mut all = list(container, "env").iter();
    let found = all.find(|it| name(it) == Some(env_value))?;
    found.get("value").and_then(Value::as_str)
}

/// Sets an environment variable, and keeps the position of an existing one.
pub(crate) fn set_variable(container: &mut Value, env_value: &str, value: &str) {
    let Some(all) = list_mut(container, "env") else {
        return;
    };
    let set = serde_json::json!({"name": env_value, "value": value});
    match all.iter_mut().find(|it| name(it) == Some(env_value)) {
        Some(known) => *known = set,
        None => all.push(set),
    }
}

/// Accepts the same texts as Go's `strconv.ParseBool`.
pub(crate) fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}
