//! Parses YAML or JSON: a list of `{podSelector, namespaceSelector}`, each a `metav1.LabelSelector`.

use std::{collections::BTreeSet, str::FromStr};

use serde_json::{Map, Value};

use super::{Entry, Operator, Requirement, Selector, Selectors};
use crate::labels::{is_label, is_name};

#[derive(Debug, thiserror::Error)]
pub enum InvalidSelectors {
    #[error("setting enablement_selectors is neither YAML nor JSON: {0}")]
    Text(String),
    #[error(
        "setting enablement_selectors is not a list of {{podSelector, namespaceSelector}}; [] selects no pod"
    )]
    NoList,
    #[error("setting enablement_selectors, entry {entry}: {field}: {why}")]
    Entry {
        /// The entry's number, counted from 1.
        entry: usize,
        field: String,
        why: String,
    },
}

/// An error in a field; each level that passes the error up extends the path.
#[derive(Debug)]
struct FieldError {
    field: String,
    why: String,
}

impl FieldError {
    fn new(why: impl Into<String>) -> Self {
        Self {
            field: String::new(),
            why: why.into(),
        }
    }

    fn within(self, name: &str) -> Self {
        let dot = if self.field.is_empty() || self.field.starts_with('[') {
            ""
        } else {
            "."
        };
        Self {
            field: format!("{name}{dot}{}", self.field),
            ..self
        }
    }
}

impl FromStr for Selectors {
    type Err = InvalidSelectors;

    fn from_str(text: &str) -> Result<Self, InvalidSelectors> {
        let value: Value = serde_saphyr::from_str(text)
            .map_err(|error| InvalidSelectors::Text(error.to_string()))?;
        let entries = value.as_array().ok_or(InvalidSelectors::NoList)?;
        let numbered = entries.iter().zip(1..);
        let parsed = numbered.map(|(value, entry)| {
            self::entry(value).map_err(|FieldError { field, why }| {
                let field = if field.is_empty() {
                    "itself".to_owned()
                } else {
                    field
                };
                InvalidSelectors::Entry { entry, field, why }
            })
        });
        parsed.collect::<Result<Vec<_>, _>>().map(Self::from)
    }
}

fn entry(value: &Value) -> Result<Entry, FieldError> {
    let fields = object(value, &["podSelector", "namespaceSelector"])?;
    Ok(Entry {
        pods: field(fields, "podSelector", selector)?,
        namespaces: field(fields, "namespaceSelector", selector)?,
    })
}

fn selector(value: &Value) -> Result<Selector, FieldError> {
    let fields = object(value, &["matchLabels", "matchExpressions"])?;
    let mut requirements = field(fields, "matchLabels", match_labels)?;
    requirements.extend(field(fields, "matchExpressions", |value| {
        list(value, requirement)
    })?);
    Ok(Selector(requirements))
}

fn match_labels(value: &Value) -> Result<Vec<Requirement>, FieldError> {
    let labels = value
        .as_object()
        .ok_or_else(|| FieldError::new("is not a map"))?;
    let equal = |(key, value): (&String, &Value)| {
        let value = label_value(value).map_err(|bad| bad.within(key))?;
        Ok(Requirement {
            key: label_key(key)?,
            operator: Operator::In(BTreeSet::from([value])),
        })
    };
    labels.iter().map(equal).collect()
}

fn requirement(value: &Value) -> Result<Requirement, FieldError> {
    let fields = object(value, &["key", "operator", "values"])?;
    let values: BTreeSet<String> = field(fields, "values", |value| list(value, label_value))?
        .into_iter()
        .collect();
    let operator = match text(fields, "operator")? {
        "In" => Operator::In(non_empty(values)?),
        "NotIn" => Operator::NotIn(non_empty(values)?),
        "Exists" => require_empty(&values).map(|()| Operator::Exists)?,
        "DoesNotExist" => require_empty(&values).map(|()| Operator::DoesNotExist)?,
        other => {
            let why = format!("{other:?} is not In, NotIn, Exists or DoesNotExist");
            return Err(FieldError::new(why).within("operator"));
        }
    };
    let key = label_key(text(fields, "key")?).map_err(|bad| bad.within("key"))?;
    Ok(Requirement { key, operator })
}

fn non_empty(values: BTreeSet<String>) -> Result<BTreeSet<String>, FieldError> {
    if values.is_empty() {
        return Err(
            FieldError::new("is empty: In and NotIn name at least one value").within("values"),
        );
    }
    Ok(values)
}

fn require_empty(values: &BTreeSet<String>) -> Result<(), FieldError> {
    if values.is_empty() {
        return Ok(());
    }
    Err(FieldError::new("is not empty: Exists and DoesNotExist name no value").within("values"))
}

/// Parses a field of an object. Null counts as absent, and an absent field is `T::default()`, as in Go.
fn field<T: Default>(
    fields: &Map<String, Value>,
    name: &str,
    parse: impl Fn(&Value) -> Result<T, FieldError>,
) -> Result<T, FieldError> {
    let value = fields.get(name).filter(|value| !value.is_null());
    value.map_or_else(
        || Ok(T::default()),
        |value| parse(value).map_err(|bad| bad.within(name)),
    )
}

fn text<'a>(fields: &'a Map<String, Value>, name: &str) -> Result<&'a str, FieldError> {
    let value = fields
        .get(name)
        .ok_or_else(|| FieldError::new("is required").within(name))?;
    value
        .as_str()
        .ok_or_else(|| FieldError::new("is not a string").within(name))
}

fn object<'a>(value: &'a Value, known: &[&str]) -> Result<&'a Map<String, Value>, FieldError> {
    let fields = value
        .as_object()
        .ok_or_else(|| FieldError::new("is not a map"))?;
    let unknown = fields.keys().find(|name| !known.contains(&name.as_str()));
    unknown.map_or(Ok(fields), |name| {
        let why = format!("is unknown; known fields are {}", known.join(" and "));
        Err(FieldError::new(why).within(name))
    })
}

fn list<T>(
    value: &Value,
    parse: impl Fn(&Value) -> Result<T, FieldError>,
) -> Result<Vec<T>, FieldError> {
    let items = value
        .as_array()
        .ok_or_else(|| FieldError::new("is not a list"))?;
    let parse = |(at, item)| parse(item).map_err(|bad| bad.within(&format!("[{at}]")));
    items.iter().enumerate().map(parse).collect()
}

fn label_key(text: &str) -> Result<String, FieldError> {
    if is_label(text) {
        return Ok(text.to_owned());
    }
    Err(FieldError::new(format!("{text:?} is not a label key")))
}

fn label_value(value: &Value) -> Result<String, FieldError> {
    match value.as_str() {
        Some(text) if text.is_empty() || is_name(text) => Ok(text.to_owned()),
        Some(text) => Err(FieldError::new(format!("{text:?} is not a label value"))),
        None => Err(FieldError::new(format!(
            "{value} is not a string; quote it"
        ))),
    }
}
