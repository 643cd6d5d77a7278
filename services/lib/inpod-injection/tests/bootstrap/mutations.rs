//! Documents, each wrong in one position.

use serde_json::{Value, json};

pub(crate) fn positions(value: &Value, at: &str) -> Vec<String> {
    let below: Vec<_> = match value {
        Value::Object(fields) => fields
            .iter()
            .flat_map(|(key, value)| positions(value, &format!("{at}/{}", key.replace('/', "~1"))))
            .collect(),
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items
                .flat_map(|(index, value)| positions(value, &format!("{at}/{index}")))
                .collect()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
    };
    [vec![at.to_owned()], below].concat()
}

/// Changes a position in every way that makes it invalid.
pub(crate) fn mutations(document: &Value, position: &str) -> Vec<(String, Value)> {
    let mut all = Vec::new();
    let mut with = |what: &str, value: Value| {
        let mut mutated = document.clone();
        *mutated.pointer_mut(position).unwrap() = value;
        all.push((format!("{position}: {what}"), mutated));
    };
    let old = document.pointer(position).unwrap();
    let key = position.rsplit('/').next().unwrap();
    match old {
        Value::Object(_) => with("a list for a map", json!([true])),
        Value::Array(_) => with("a map for a list", json!({"x": 1})),
        Value::String(text) => {
            with("a number for a text", json!(7));
            with("a list for a text", json!([text]));
            if matches!(key, "@type" | "type" | "lb_policy" | "traffic_direction") {
                with("a word that there is not", json!(format!("{text}X")));
            }
            if key.ends_with("timeout") {
                with("a number without a unit", json!("10"));
            }
            if key == "cluster" {
                with("a cluster that there is not", json!("other"));
            }
            with("nothing", json!(""));
        }
        Value::Number(_) => {
            with("a text for a number", json!("x"));
            with("a negative number", json!(-1));
            if key.contains("port") {
                with("too high a port", json!(65536));
            }
        }
        Value::Bool(_) => with("a text for a truth value", json!("yes")),
        Value::Null => {}
    }
    if let Value::Object(fields) = old {
        for key in fields.keys() {
            let mut renamed = fields.clone();
            let value = renamed.remove(key).unwrap();
            renamed.insert(format!("{key}_"), value);
            with(&format!("{key} has another name"), Value::Object(renamed));
        }
    }
    all
}
