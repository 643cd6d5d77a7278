use serde_json::{Map, Value};

use super::{Conditions, VALUE, WHEN};
use crate::variables::Variables;

pub(super) enum Rendered {
    Present(Value),
    Omitted,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part<'a> {
    Text(&'a str),
    /// A variable `${NAME}` or `${NAME|DEFAULT}` within a text.
    Variable {
        name: &'a str,
        default: Option<&'a str>,
    },
    /// The characters `${` without a closing brace.
    Open(&'a str),
}

/// Splits a text into its parts, in which `$${` escapes `${`.
pub(super) fn parts(text: &str) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        let (before, from) = rest.split_at(at);
        if let Some(escaped) = before.strip_suffix('$') {
            parts.extend([Part::Text(escaped), Part::Text("${")]);
            rest = from.strip_prefix("${").unwrap_or_default();
            continue;
        }
        parts.push(Part::Text(before));
        let Some(end) = from.find('}') else {
            parts.push(Part::Open(from));
            return parts;
        };
        let inner = from.get(2..end).unwrap_or_default();
        let (name, default) = match inner.split_once('|') {
            Some((name, default)) => (name, Some(default)),
            None => (inner, None),
        };
        parts.push(Part::Variable { name, default });
        rest = from.get(end + 1..).unwrap_or_default();
    }
    parts.push(Part::Text(rest));
    parts.retain(|part| *part != Part::Text(""));
    parts
}

/// Returns the conditions, with `None` for a condition that is not a string.
pub(super) fn conditions(value: &Value) -> Vec<Option<&str>> {
    value.as_array().map_or_else(
        || vec![value.as_str()],
        |items| items.iter().map(Value::as_str).collect(),
    )
}

/// The keys below which Kubernetes accepts only strings, so that numbers are formatted as text.
const TEXTS: [&str; 5] = ["args", "command", "value", "labels", "annotations"];

pub(super) struct Rendering<'a> {
    pub(super) variables: &'a Variables,
    pub(super) holds: &'a Conditions,
}

impl Rendering<'_> {
    /// Renders a value; a list or map is omitted if all of its parts are omitted.
    pub(super) fn render_value(&self, value: &Value, is_text: bool) -> Result<Rendered, String> {
        match value {
            Value::String(text) => self.render_text(text, is_text),
            Value::Array(items) => {
                let mut rendered = Vec::new();
                for item in items {
                    if let Rendered::Present(item) = self.render_value(item, is_text)? {
                        rendered.push(item);
                    }
                }
                if rendered.is_empty() && !items.is_empty() {
                    return Ok(Rendered::Omitted);
                }
                Ok(Rendered::Present(rendered.into()))
            }
            Value::Object(fields) => self.map(fields, is_text),
            Value::Null | Value::Bool(_) | Value::Number(_) => Ok(Rendered::Present(value.clone())),
        }
    }

    fn map(&self, fields: &Map<String, Value>, is_text: bool) -> Result<Rendered, String> {
        let wanted = fields.get(WHEN).map(conditions).unwrap_or_default();
        if !wanted
            .into_iter()
            .flatten()
            .all(|condition| self.holds.hold(condition))
        {
            return Ok(Rendered::Omitted);
        }
        if let Some(only) = fields.get(VALUE) {
            return self.render_value(only, is_text);
        }
        let mut rendered = Map::new();
        for (key, field) in fields.iter().filter(|(key, _)| *key != WHEN) {
            let is_text = is_text || TEXTS.contains(&key.as_str());
            if let Rendered::Present(field) = self.render_value(field, is_text)? {
                rendered.insert(key.clone(), field);
            }
        }
        if rendered.is_empty() && !fields.is_empty() {
            return Ok(Rendered::Omitted);
        }
        Ok(Rendered::Present(rendered.into()))
    }

    /// Renders a text. A single variable keeps its type where Kubernetes allows other types than strings, and a text
    /// with an unset variable is omitted.
    fn render_text(&self, text: &str, is_text: bool) -> Result<Rendered, String> {
        let parts = parts(text);
        let get = |name: &str, default: Option<&str>| {
            let default = || default.map(Value::from);
            self.variables.get(name).or_else(default)
        };
        if let [Part::Variable { name, default }] = parts.as_slice()
            && !is_text
        {
            return Ok(get(name, *default).map_or(Rendered::Omitted, Rendered::Present));
        }
        let mut whole = String::new();
        for part in parts {
            match part {
                Part::Text(text) | Part::Open(text) => whole.push_str(text),
                Part::Variable { name, default } => {
                    let Some(found) = get(name, default) else {
                        return Ok(Rendered::Omitted);
                    };
                    whole.push_str(&to_text(name, &found)?);
                }
            }
        }
        Ok(Rendered::Present(whole.into()))
    }
}

fn to_text(name: &str, value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Bool(_) | Value::Number(_) => Ok(value.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => Err(format!(
            "${{{name}}} is a list or a map, and cannot stand within a text"
        )),
    }
}
