//! Parses YAML or JSON: a list of `{podSelector, namespaceSelector}`, each a `metav1.LabelSelector`. Null counts as
//! absent, as in Go.

use std::{collections::BTreeSet, str::FromStr};

use kube::core::Expression;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use super::{Entry, Selectors};
use crate::labels::{is_label, is_name};

type Fields = Map<String, Value>;

// An unknown field is an error: without its field, a selector with a typo would select everything.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Selection {
    pod_selector: Option<Fields>,
    namespace_selector: Option<Fields>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct LabelSelector {
    match_labels: Option<Fields>,
    match_expressions: Option<Vec<Fields>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Requirement {
    key: String,
    operator: String,
    values: Option<Vec<Value>>,
}

impl FromStr for Selectors {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const SETTING: &str = "setting enablement_selectors";
        let value = serde_saphyr::from_str(text)
            .map_err(|error| format!("{SETTING} is neither YAML nor JSON: {error}"))?;
        let Value::Array(entries) = value else {
            return Err(format!("{SETTING} is not a list; [] selects no pod"));
        };
        let parsed = entries.into_iter().zip(1..).map(|(value, number)| {
            entry(value).map_err(|why| format!("{SETTING}, entry {number}: {why}"))
        });
        parsed.collect::<Result<_, _>>().map(Self)
    }
}

fn entry(value: Value) -> Result<Entry, String> {
    let selection: Selection = object(value)?;
    Ok(Entry {
        pods: selector(selection.pod_selector).map_err(|why| format!("podSelector: {why}"))?,
        namespaces: selector(selection.namespace_selector)
            .map_err(|why| format!("namespaceSelector: {why}"))?,
    })
}

/// Parses an object. Serde alone would also fill a struct from a list.
fn object<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    let fields = Fields::deserialize(value).map_err(|error| error.to_string())?;
    T::deserialize(fields).map_err(|error| error.to_string())
}

fn selector(fields: Option<Fields>) -> Result<Vec<Expression>, String> {
    let selector: LabelSelector = object(fields.unwrap_or_default().into())?;
    let equal = selector.match_labels.into_iter().flatten();
    let equal = equal.map(|(key, value)| expression(key, "In", &[value]));
    let others = selector.match_expressions.into_iter().flatten();
    let others = others.map(|fields| {
        let other: Requirement = object(fields.into())?;
        expression(
            other.key,
            &other.operator,
            &other.values.unwrap_or_default(),
        )
    });
    equal.chain(others).collect()
}

fn expression(key: String, operator: &str, values: &[Value]) -> Result<Expression, String> {
    if !is_label(&key) {
        return Err(format!("{key:?} is not a label key"));
    }
    let values = values.iter().map(label_value).collect::<Result<_, _>>();
    let values: BTreeSet<_> = values.map_err(|why| format!("{key}: {why}"))?;
    match (operator, values.is_empty()) {
        ("In", false) => Ok(Expression::In(key, values)),
        ("NotIn", false) => Ok(Expression::NotIn(key, values)),
        ("Exists", true) => Ok(Expression::Exists(key)),
        ("DoesNotExist", true) => Ok(Expression::DoesNotExist(key)),
        _ => Err(format!(
            "{key}: operator {operator:?} with values {values:?}: In and NotIn need at least one value, Exists and DoesNotExist none"
        )),
    }
}

fn label_value(value: &Value) -> Result<String, String> {
    match value.as_str() {
        Some(text) if text.is_empty() || is_name(text) => Ok(text.to_owned()),
        Some(text) => Err(format!("{text:?} is not a label value")),
        None => Err(format!("{value} is not a string; quote it")),
    }
}
