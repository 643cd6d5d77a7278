//! Selects pods by labels: the setting `enablement_selectors`, like Istio's `AMBIENT_ENABLEMENT_SELECTOR`.
//!
//! A pod joins if both selectors of any entry match. An empty selector
//! matches everything (services/docs/facts/istio-ambient.md, 1.5).

mod parse;

use std::collections::BTreeSet;

use inpod_types::keys;

use crate::pod::{Labels, Namespace};

pub use parse::InvalidSelectors;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selectors {
    entries: Vec<Entry>,
    pod_keys: BTreeSet<String>,
    namespace_keys: BTreeSet<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Entry {
    pods: Selector,
    namespaces: Selector,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Selector(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    operator: Operator,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Operator {
    In(BTreeSet<String>),
    NotIn(BTreeSet<String>),
    Exists,
    DoesNotExist,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selected {
    By {
        /// The first matching entry, counted from 1.
        entry: usize,
        by_namespace: bool,
    },
    Not {
        /// Set if an entry's namespace selector matches and only the pod selector does not.
        namespace_matches: bool,
    },
    /// The result depends on unknown labels of the namespace.
    Unknown,
}

impl Operator {
    /// Returns whether a value meets the operator. A missing label (`None`) is in no list, as in Kubernetes.
    fn holds(&self, value: Option<&str>) -> bool {
        match self {
            Self::In(values) => value.is_some_and(|value| values.contains(value)),
            Self::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
            Self::Exists => value.is_some(),
            Self::DoesNotExist => value.is_none(),
        }
    }

    fn values(&self) -> impl Iterator<Item = &str> {
        let values = match self {
            Self::In(values) | Self::NotIn(values) => Some(values),
            Self::Exists | Self::DoesNotExist => None,
        };
        values.into_iter().flatten().map(String::as_str)
    }
}

impl Selector {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn selects<'a>(&self, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        let holds = |one: &Requirement| one.operator.holds(label(&one.key));
        self.0.iter().all(holds)
    }

    /// Matches a namespace whose name is the only known label. Returns `None` if other labels decide.
    fn selects_unknown(&self, namespace: &Namespace) -> Option<bool> {
        let is_of_name = |one: &&Requirement| one.key == keys::NAMESPACE_NAME;
        let (of_name, rest): (Vec<_>, Vec<_>) = self.0.iter().partition(is_of_name);
        let holds = |one: &&Requirement| one.operator.holds(Some(namespace.name.as_str()));
        if !of_name.iter().all(holds) || !rest.iter().all(|one| self.can_hold(&one.key)) {
            Some(false)
        } else if rest.is_empty() {
            Some(true)
        } else {
            None
        }
    }

    /// Returns whether any value of a label meets all requirements for the label: no value, a listed value, or any
    /// other value.
    fn can_hold(&self, key: &str) -> bool {
        // No label has this value.
        const ANOTHER: &str = "\0";
        let required = || self.0.iter().filter(|one| one.key == key);
        let named = required().flat_map(|one| one.operator.values());
        let mut values = [None, Some(ANOTHER)].into_iter().chain(named.map(Some));
        values.any(|value| required().all(|one| one.operator.holds(value)))
    }

    fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|one| one.key.as_str())
    }
}

impl Entry {
    /// Returns `None` if unknown labels of the namespace decide.
    fn selects_namespace(&self, namespace: &Namespace, is_known: bool) -> Option<bool> {
        if is_known {
            Some(self.namespaces.selects(|key| namespace.label(key)))
        } else {
            self.namespaces.selects_unknown(namespace)
        }
    }
}

impl From<Vec<Entry>> for Selectors {
    fn from(entries: Vec<Entry>) -> Self {
        let of_pods = entries.iter().flat_map(|entry| entry.pods.keys());
        let of_namespaces = entries.iter().flat_map(|entry| entry.namespaces.keys());
        Self {
            pod_keys: of_pods.map(str::to_owned).collect(),
            namespace_keys: of_namespaces.map(str::to_owned).collect(),
            entries,
        }
    }
}

impl Selectors {
    /// Selects a pod. An unknown namespace is passed with a name but no labels.
    pub fn select(&self, pod: &Labels, namespace: &Namespace, is_known: bool) -> Selected {
        let mut selected = Selected::Not {
            namespace_matches: false,
        };
        for (at, entry) in self.entries.iter().enumerate() {
            let selects_pod = entry.pods.selects(|key| pod.get(key).map(String::as_str));
            match (selects_pod, entry.selects_namespace(namespace, is_known)) {
                (true, Some(true)) => {
                    return Selected::By {
                        entry: at + 1,
                        by_namespace: !entry.namespaces.is_empty(),
                    };
                }
                (true, None) => selected = Selected::Unknown,
                (false, Some(true)) if selected != Selected::Unknown => {
                    selected = Selected::Not {
                        namespace_matches: true,
                    };
                }
                _ => {}
            }
        }
        selected
    }

    /// Matches the namespace selectors; entries without a namespace selector do not count.
    pub fn selects_namespace(&self, namespace: &Namespace) -> bool {
        let with_namespaces = self
            .entries
            .iter()
            .filter(|entry| !entry.namespaces.is_empty());
        with_namespaces
            .into_iter()
            .any(|entry| entry.namespaces.selects(|key| namespace.label(key)))
    }

    pub fn pod_keys(&self) -> &BTreeSet<String> {
        &self.pod_keys
    }

    pub fn namespace_keys(&self) -> &BTreeSet<String> {
        &self.namespace_keys
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests;
