//! Computes the difference of two pods as RFC 6902 operations, minimal and deterministic.
//!
//! Items of lists are matched by their merge keys, so that inserting or moving an item is one operation and leaves the
//! other items untouched.

use json_patch::{
    AddOperation, MoveOperation, Patch, PatchOperation, RemoveOperation, ReplaceOperation,
    jsonptr::PointerBuf,
};
use serde_json::{Map, Value};

use crate::merge::{is_same, key_of};

pub fn create(before: &Value, after: &Value) -> Patch {
    let mut operations = Vec::new();
    let mut path = Vec::new();
    diff(before, after, &mut path, "", &mut operations);
    Patch(operations)
}

fn pointer(path: &[String]) -> PointerBuf {
    PointerBuf::from_tokens(path)
}

fn diff(
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
        (Value::Object(before), Value::Object(after)) => {
            diff_objects(before, after, path, operations);
        }
        (Value::Array(before), Value::Array(after)) => {
            if let Some(fields) = key_of(list)
                && has_unique_keys(before, after, fields)
            {
                return diff_lists(before, after, fields, path, operations);
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

fn diff_objects(
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
            Some(known) => diff(known, value, path, key, operations),
            None => add(value, path, operations),
        }
        path.pop();
    }
}

fn add(value: &Value, path: &[String], operations: &mut Vec<PatchOperation>) {
    let (path, value) = (pointer(path), value.clone());
    operations.push(PatchOperation::Add(AddOperation { path, value }));
}

fn has_unique_keys(before: &[Value], after: &[Value], fields: &[&str]) -> bool {
    let unique = |items: &[Value]| {
        let mut all = items.iter().enumerate();
        all.all(|(at, item)| {
            let mut earlier = items.iter().take(at);
            item.is_object() && !earlier.any(|other| is_same(fields, other, item))
        })
    };
    unique(before) && unique(after)
}

fn diff_lists(
    before: &[Value],
    after: &[Value],
    fields: &[&str],
    path: &mut Vec<String>,
    operations: &mut Vec<PatchOperation>,
) {
    let position = |item: &Value| after.iter().position(|it| is_same(fields, it, item));
    // Items are removed from the end, so that earlier indices stay valid.
    for (at, item) in before.iter().enumerate().rev() {
        if position(item).is_none() {
            path.push(at.to_string());
            operations.push(PatchOperation::Remove(RemoveOperation {
                path: pointer(path),
            }));
            path.pop();
        }
    }
    // At the start of each step, the list is final up to `at`.
    let mut current: Vec<(usize, &Value)> = before
        .iter()
        .filter_map(|item| Some((position(item)?, item)))
        .collect();
    for (at, item) in after.iter().enumerate() {
        let known = current.iter().position(|(position, _)| *position == at);
        if let Some(from) = known {
            move_item(&mut current, from, at, path, operations);
        }
        path.push(at.to_string());
        match current.get(at).filter(|_| known.is_some()) {
            Some((_, known)) => diff(known, item, path, "", operations),
            None => {
                add(item, path, operations);
                current.insert(at, (at, item));
            }
        }
        path.pop();
    }
}

/// Moves an item to the position `at`. If only one predecessor is in the way, the predecessor moves back instead.
fn move_item(
    current: &mut Vec<(usize, &Value)>,
    from: usize,
    at: usize,
    path: &[String],
    operations: &mut Vec<PatchOperation>,
) {
    let (from, to) = match current.get(at) {
        _ if from == at => return,
        Some((own, _)) if from == at + 1 => (at, current.iter().filter(|(it, _)| it < own).count()),
        _ => (from, at),
    };
    let item = current.remove(from);
    current.insert(to, item);
    let position = |at: usize| pointer(&[path, &[at.to_string()]].concat());
    operations.push(PatchOperation::Move(MoveOperation {
        from: position(from),
        path: position(to),
    }));
}

#[cfg(test)]
mod tests;
