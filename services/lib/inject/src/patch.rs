//! What leads from one pod to another, as RFC 6902 operations: as few as there are differences, in an order that depends
//! on the two pods alone.
//!
//! Items of a list that have a name are followed by it: one that is inserted before them is one `add`, and none of the
//! others is touched.

use json_patch::{
    AddOperation, Patch, PatchOperation, RemoveOperation, ReplaceOperation, jsonptr::PointerBuf,
};
use serde_json::{Map, Value};

use crate::merge::{is_same, key_of};

/// The operations that make `after` of `before`. None where they are equal.
pub fn create(before: &Value, after: &Value) -> Patch {
    let mut operations = Vec::new();
    let mut path = Vec::new();
    differ(before, after, &mut path, "", &mut operations);
    Patch(operations)
}

fn pointer(path: &[String]) -> PointerBuf {
    PointerBuf::from_tokens(path)
}

fn differ(
    before: &Value,
    after: &Value,
    path: &mut Vec<String>,
    list: &str,
    operations: &mut Vec<PatchOperation>,
) {
    if before == after {
        return;
    }
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => maps(before, after, path, operations),
        (Value::Array(before), Value::Array(after)) => {
            if let Some(fields) = key_of(list)
                && followed(before, after, fields)
            {
                return lists(before, after, fields, path, operations);
            }
            replace(after.clone().into(), path, operations);
        }
        _ => replace(after.clone(), path, operations),
    }
}

fn replace(value: Value, path: &[String], operations: &mut Vec<PatchOperation>) {
    let path = pointer(path);
    operations.push(PatchOperation::Replace(ReplaceOperation { path, value }));
}

fn maps(
    before: &Map<String, Value>,
    after: &Map<String, Value>,
    path: &mut Vec<String>,
    operations: &mut Vec<PatchOperation>,
) {
    for key in before.keys().filter(|key| !after.contains_key(*key)) {
        path.push(key.clone());
        operations.push(PatchOperation::Remove(RemoveOperation {
            path: pointer(path),
        }));
        path.pop();
    }
    for (key, value) in after {
        path.push(key.clone());
        match before.get(key) {
            Some(known) => differ(known, value, path, key, operations),
            None => add(value, path, operations),
        }
        path.pop();
    }
}

fn add(value: &Value, path: &[String], operations: &mut Vec<PatchOperation>) {
    let (path, value) = (pointer(path), value.clone());
    operations.push(PatchOperation::Add(AddOperation { path, value }));
}

/// Whether the items of both lists have keys, each its own, and those that stay keep their order.
fn followed(before: &[Value], after: &[Value], fields: &[&str]) -> bool {
    let alone = |items: &[Value]| {
        let mut all = items.iter().enumerate();
        all.all(|(at, item)| {
            let mut earlier = items.iter().take(at);
            item.is_object() && !earlier.any(|other| is_same(fields, other, item))
        })
    };
    let place = |item: &Value| after.iter().position(|other| is_same(fields, item, other));
    let places: Vec<_> = before.iter().filter_map(place).collect();
    alone(before) && alone(after) && places.is_sorted()
}

fn lists(
    before: &[Value],
    after: &[Value],
    fields: &[&str],
    path: &mut Vec<String>,
    operations: &mut Vec<PatchOperation>,
) {
    let is_in = |items: &[Value], item: &Value| items.iter().any(|it| is_same(fields, it, item));
    // From behind, so that places before them do not move.
    for (at, item) in before.iter().enumerate().rev() {
        if !is_in(after, item) {
            path.push(at.to_string());
            operations.push(PatchOperation::Remove(RemoveOperation {
                path: pointer(path),
            }));
            path.pop();
        }
    }
    for (at, item) in after.iter().enumerate() {
        path.push(at.to_string());
        match before.iter().find(|known| is_same(fields, known, item)) {
            Some(known) => differ(known, item, path, "", operations),
            None => add(item, path, operations),
        }
        path.pop();
    }
}

#[cfg(test)]
mod tests;
