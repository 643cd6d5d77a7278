//! Parses templates, which are partial pods in YAML with variables `${NAME}` and conditions `$when`.
//!
//! Variables are replaced in the parsed values, so that no value of a pod can add structure. Go templates are rejected,
//! with the number of the first such line.

mod render;

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    config::{Config, InvalidConfig},
    error::InjectError,
    proxy::{Interception, ProxySettings},
    variables::{self, Variables},
};
use render::{Rendered, Rendering};

/// The built-in template `sidecar`, which adds Istio's proxy.
const SIDECAR: &str = include_str!("templates/sidecar.yaml");

/// The key of a condition, or of a list of conditions that must all hold; `!` negates a condition.
pub const WHEN: &str = "$when";

/// The key of the value in a map that otherwise has only [`WHEN`].
pub const VALUE: &str = "$value";

/// The conditions that [`WHEN`] may name, with their descriptions.
pub const CONDITIONS: &[(&str, &str)] = &[
    ("cni", "the node redirects traffic"),
    ("native", "the proxy is a native sidecar"),
    ("intercepted", "the interception mode is not NONE"),
    ("tproxy", "the interception mode is TPROXY"),
    ("hold", "the application starts after the proxy is ready"),
    ("agent", "the agent's status port is not 0"),
    ("network", "the cluster's network has a name"),
];

/// A merge directive, and the only other key that begins with `$`.
const PATCH: &str = "$patch";

/// A valid template, which contains only known variables and conditions.
#[derive(Clone, Debug, PartialEq)]
pub struct Template(Value);

/// The values of all [`CONDITIONS`] for one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conditions(BTreeMap<&'static str, bool>);

impl Conditions {
    pub(crate) fn of(config: &Config, proxy: &ProxySettings) -> Self {
        let holds = [
            ("cni", config.cni),
            ("native", proxy.is_native),
            ("intercepted", proxy.interception != Interception::None),
            ("tproxy", proxy.interception == Interception::Tproxy),
            ("hold", proxy.holds_application),
            ("agent", proxy.status_port != 0),
            ("network", !config.network.is_empty()),
        ];
        Self(BTreeMap::from(holds))
    }

    fn hold(&self, condition: &str) -> bool {
        let name = condition.trim_start_matches('!');
        let holds = self.0.get(name).copied().unwrap_or(false);
        holds != condition.starts_with('!')
    }
}

/// Parses the configured templates and the built-in template.
///
/// # Errors
///
/// Fails if a template is invalid, or if a name refers to no template.
pub(crate) fn all(config: &Config) -> Result<Vec<(String, Template)>, InvalidConfig> {
    let mut texts = BTreeMap::from([("sidecar", SIDECAR)]);
    let configured = config.templates.iter();
    texts.extend(configured.map(|(name, text)| (name.as_str(), text.as_str())));
    let lists = config
        .aliases
        .iter()
        .map(|(alias, names)| (format!("aliases.{alias}"), names));
    let default = ("defaultTemplates".to_owned(), &config.default_templates);
    for (field, names) in lists.chain([default]) {
        let is_known = |name: &str| {
            texts.contains_key(name)
                || field == "defaultTemplates" && config.aliases.contains_key(name)
        };
        if let Some(name) = names.iter().find(|name| !is_known(name)) {
            let why = format!("there is no template {name:?}");
            return Err(InvalidConfig::Field { field, why });
        }
    }
    let parse = |(name, text): (&str, &str)| Ok((name.to_owned(), Template::parse(name, text)?));
    texts.into_iter().map(parse).collect()
}

/// An error in a template, with a part of the text by which to find the line.
struct Fault {
    part: String,
    why: String,
}

fn fault(part: &str, why: impl Into<String>) -> Fault {
    Fault {
        part: part.to_owned(),
        why: why.into(),
    }
}

impl Template {
    /// Parses and validates one template from YAML.
    ///
    /// # Errors
    ///
    /// Fails, naming the line, on invalid YAML, a Go template, an unknown name, or a field that does not belong to a
    /// pod.
    pub fn parse(name: &str, text: &str) -> Result<Self, InvalidConfig> {
        let invalid = |line: usize, why: String| InvalidConfig::Template {
            name: name.to_owned(),
            line,
            why,
        };
        if let Some(line) = line_of(text, "{{") {
            let why = "Go templates are not supported: write a partial pod as YAML with ${NAME} and $when";
            return Err(invalid(line, why.to_owned()));
        }
        let document: Value = serde_saphyr::from_str(text).map_err(|error| {
            let line = error
                .location()
                .and_then(|it| usize::try_from(it.line()).ok());
            invalid(line.unwrap_or(1), format!("it is not valid YAML: {error}"))
        })?;
        let document = if document.is_null() {
            Value::Object(serde_json::Map::new())
        } else {
            document
        };
        let checked = check_outline(&document).and_then(|()| check(&document));
        checked.map_err(|Fault { part, why }| invalid(line_of(text, &part).unwrap_or(1), why))?;
        Ok(Self(document))
    }

    /// Renders the template for one pod.
    ///
    /// # Errors
    ///
    /// Fails if a variable with a list or map is part of a longer text.
    pub fn render(
        &self,
        name: &str,
        variables: &Variables,
        conditions: &Conditions,
    ) -> Result<Value, InjectError> {
        let failed = |why| InjectError::Template {
            template: name.to_owned(),
            why,
        };
        let rendering = Rendering {
            variables,
            holds: conditions,
        };
        match rendering.render_value(&self.0, false).map_err(failed)? {
            Rendered::Present(value) => Ok(value),
            Rendered::Omitted => Ok(Value::Object(serde_json::Map::new())),
        }
    }
}

/// Returns the number of the first line that contains the text, counted from 1 and without comments.
fn line_of(text: &str, part: &str) -> Option<usize> {
    let mut lines = text.lines().zip(1..);
    let found = lines.find(|(line, _)| !line.trim_start().starts_with('#') && line.contains(part));
    found.map(|(_, number)| number)
}

/// Allows only labels, annotations and the spec in a template.
fn check_outline(document: &Value) -> Result<(), Fault> {
    let of = |value: &Value, known: &[&str]| {
        let fields = value
            .as_object()
            .ok_or_else(|| fault("", "it is not a map"))?;
        let unknown = fields
            .keys()
            .find(|key| !known.contains(&key.as_str()) && *key != WHEN);
        let reject = |key: &String| fault(key, format!("{key:?} is not {}", known.join(" or ")));
        unknown.map(reject).map_or(Ok(()), Err)
    };
    of(document, &["metadata", "spec"])?;
    if let Some(metadata) = document.get("metadata") {
        of(metadata, &["labels", "annotations"])?;
    }
    let spec = document.get("spec");
    if spec.is_some_and(|spec| !spec.is_object()) {
        return Err(fault("spec", "spec is not a map"));
    }
    Ok(())
}

fn check(value: &Value) -> Result<(), Fault> {
    match value {
        Value::String(text) => check_text(text),
        Value::Array(items) => items.iter().try_for_each(check),
        Value::Object(fields) => fields
            .iter()
            .try_for_each(|(key, value)| match key.as_str() {
                WHEN => check_when(value),
                PATCH => match value.as_str() {
                    Some("delete" | "replace" | "merge") => Ok(()),
                    _ => Err(fault(PATCH, "$patch is not delete, replace or merge")),
                },
                VALUE if fields.keys().any(|key| key != VALUE && key != WHEN) => {
                    Err(fault(VALUE, "$value may be combined with $when only"))
                }
                VALUE => check(value),
                key if key.starts_with('$') => Err(fault(
                    key,
                    format!("{key:?} is not $when, $value or $patch"),
                )),
                _ => check(value),
            }),
        Value::Null | Value::Bool(_) | Value::Number(_) => Ok(()),
    }
}

fn check_when(value: &Value) -> Result<(), Fault> {
    let known = |condition: &str| {
        let name = condition.strip_prefix('!').unwrap_or(condition);
        CONDITIONS.iter().any(|(known, _)| *known == name)
    };
    for condition in render::conditions(value) {
        let Some(condition) = condition else {
            return Err(fault(
                WHEN,
                "$when is not a condition or a list of conditions",
            ));
        };
        if !known(condition) {
            let names: Vec<_> = CONDITIONS.iter().map(|(name, _)| *name).collect();
            let why = format!(
                "unknown condition {condition:?}; known are {}",
                names.join(", ")
            );
            return Err(fault(condition, why));
        }
    }
    Ok(())
}

fn check_text(text: &str) -> Result<(), Fault> {
    for part in render::parts(text) {
        match part {
            render::Part::Text(_) => {}
            render::Part::Open(rest) => return Err(fault(rest, "${ has no closing }")),
            render::Part::Variable { name, .. } if variables::is_known(name) => {}
            render::Part::Variable { name, .. } => {
                let why = format!(
                    "unknown variable {name:?}; services/lib/inpod-injection/README.md lists all"
                );
                return Err(fault(name, why));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
