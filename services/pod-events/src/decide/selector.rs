//! Who joins the mesh by labels: the setting `enablement_selectors`, as Istio's `AMBIENT_ENABLEMENT_SELECTOR`.
//!
//! An entry selects a pod when both of its selectors do; a pod joins when any entry selects it. A selector that says
//! nothing selects everything (services/docs/facts/istio-ambient.md, 1.5).

mod parse;

use std::collections::{BTreeMap, BTreeSet};

use inpod_types::keys;

use crate::pod::Namespace;

pub use parse::InvalidSelectors;

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;

/// Who joins: any entry is enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selectors {
    entries: Vec<Entry>,
    pod_keys: BTreeSet<String>,
    namespace_keys: BTreeSet<String>,
}

/// Pods of namespaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Entry {
    pods: Selector,
    namespaces: Selector,
}

/// A Kubernetes LabelSelector: every requirement has to hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Selector(Vec<Requirement>);

/// What a label has to be.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    operator: Operator,
}

/// A LabelSelectorRequirement's operator, with its values.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Operator {
    In(BTreeSet<String>),
    NotIn(BTreeSet<String>),
    Exists,
    DoesNotExist,
}

/// What the selectors say of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selected {
    /// An entry selects it.
    By {
        /// The first that does, counted from 1.
        entry: usize,
        /// Whether it says something of namespaces.
        by_namespace: bool,
    },
    /// None selects it.
    Not {
        /// Whether an entry would that selects the namespace, and says no to this pod alone.
        namespace_matches: bool,
    },
    /// The labels of the namespace, which are not known, decide.
    Unknown,
}

impl Operator {
    /// Whether a label holds: its value, or `None` where there is none. As Kubernetes does, a label that is not there is
    /// in no list.
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

    /// Whether a namespace is selected of which no label is known but the one that says its name; `None` where the others
    /// decide.
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

    /// Whether a label can hold all that is required of it: is not there, has one of the values that are named, or
    /// another.
    fn can_hold(&self, key: &str) -> bool {
        // No label has such a value.
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
    /// `None` where it depends on labels of the namespace that are not known.
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
    /// What is said of a pod. Where its namespace is not known, `namespace` is one with its name and without labels.
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

    /// Whether an entry selects a namespace by what it says of namespaces.
    pub fn selects_namespace(&self, namespace: &Namespace) -> bool {
        let with_namespaces = self
            .entries
            .iter()
            .filter(|entry| !entry.namespaces.is_empty());
        with_namespaces
            .into_iter()
            .any(|entry| entry.namespaces.selects(|key| namespace.label(key)))
    }

    /// The labels of pods that are read.
    pub fn pod_keys(&self) -> &BTreeSet<String> {
        &self.pod_keys
    }

    /// The labels of namespaces that are read.
    pub fn namespace_keys(&self) -> &BTreeSet<String> {
        &self.namespace_keys
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nobody joins.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests;
