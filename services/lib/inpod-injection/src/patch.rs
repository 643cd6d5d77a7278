//! Computes the difference of two pods as RFC 6902 operations.

use json_patch::Patch;
use serde_json::Value;

pub fn create(before: &Value, after: &Value) -> Patch {
    let mut before = before.clone();
    clear_changed_lists(&mut before, after);
    json_patch::diff(&before, after)
}

/// Replaces lists that differ by null, so that the patch replaces them as a whole and is never larger than its pod.
/// Otherwise `json_patch::diff` compares items by position: in a pod of 2 MiB in which an item with long keys moves, the
/// paths of the operations would add up to gigabytes.
fn clear_changed_lists(before: &mut Value, after: &Value) {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            for (key, value) in before {
                clear_changed_lists(value, after.get(key).unwrap_or(&Value::Null));
            }
        }
        (before @ Value::Array(_), after) if !after.is_null() && before != after => {
            *before = Value::Null;
        }
        _ => {}
    }
}
