//! Selects the pods that are always or never injected.

use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

use crate::json::label;

/// A `metav1.LabelSelector`, whose requirements must all be met.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Selector {
    match_labels: BTreeMap<String, String>,
    match_expressions: Vec<Requirement>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Requirement {
    key: String,
    operator: Operator,
    #[serde(default)]
    values: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Operator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

impl Selector {
    /// Ignores a selector without requirements (services/docs/facts/istio-sidecar.md, 6.3).
    pub fn selects(&self, pod: &Value) -> bool {
        if *self == Self::default() {
            return false;
        }
        let mut equal = self.match_labels.iter();
        let mut others = self.match_expressions.iter();
        equal.all(|(key, value)| label(pod, key) == Some(value)) && others.all(|it| it.holds(pod))
    }

    /// Returns an error message if the selector is invalid.
    pub(crate) fn fault(&self) -> Option<String> {
        let wrong = |it: &&Requirement| match it.operator {
            Operator::In | Operator::NotIn => it.values.is_empty(),
            Operator::Exists | Operator::DoesNotExist => !it.values.is_empty(),
        };
        let found = self.match_expressions.iter().find(wrong)?;
        let (key, operator) = (&found.key, found.operator);
        Some(format!(
            "{key} {operator:?}: In and NotIn name at least one value, the others none"
        ))
    }
}

impl Requirement {
    fn holds(&self, pod: &Value) -> bool {
        let value = label(pod, &self.key);
        let is_listed = || value.is_some_and(|value| self.values.iter().any(|it| it == value));
        match self.operator {
            Operator::In => is_listed(),
            Operator::NotIn => !is_listed(),
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
        }
    }
}
