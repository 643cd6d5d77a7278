//! Selects pods by labels: the setting `enablement_selectors`, like Istio's `AMBIENT_ENABLEMENT_SELECTOR`.
//!
//! A pod joins if both selectors of any entry match. An empty selector
//! matches everything (services/docs/facts/istio-ambient.md, 1.5).

mod parse;

use std::collections::BTreeSet;

use kube::core::{Expression, SelectorExt};

use crate::pod::{Labels, Namespace};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selectors(Vec<Entry>);

/// The requirements of both selectors.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    pods: Vec<Expression>,
    namespaces: Vec<Expression>,
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

/// Returns the key and the values of a requirement.
fn parts(requirement: &Expression) -> (&String, Vec<&String>) {
    match requirement {
        Expression::In(key, values) | Expression::NotIn(key, values) => {
            (key, values.iter().collect())
        }
        Expression::Equal(key, value) | Expression::NotEqual(key, value) => (key, vec![value]),
        Expression::Exists(key) | Expression::DoesNotExist(key) => (key, Vec::new()),
    }
}

fn selects(selector: &[Expression], labels: &Labels) -> bool {
    selector.iter().all(|one| one.matches(labels))
}

/// Matches a namespace whose name is the only known label. Returns `None` if other labels decide.
fn selects_unknown(selector: &[Expression], name: &Labels) -> Option<bool> {
    let (of_name, rest): (Vec<_>, Vec<_>) =
        (selector.iter()).partition(|one| name.contains_key(parts(one).0));
    let can_match = of_name.iter().all(|one| one.matches(name))
        && rest.iter().all(|one| can_hold(selector, parts(one).0));
    (rest.is_empty() || !can_match).then_some(can_match)
}

/// Returns whether any value of a label meets all requirements for the label: no value, a listed value, or any
/// other value.
fn can_hold(selector: &[Expression], key: &str) -> bool {
    // No label has this value.
    let another = "\0".to_owned();
    let required = || selector.iter().filter(|one| parts(one).0 == key);
    let values = required().flat_map(|one| parts(one).1).chain([&another]);
    let labels = values.map(|value| Labels::from([(key.to_owned(), value.clone())]));
    let mut labels = labels.chain([Labels::new()]);
    labels.any(|labels| required().all(|one| one.matches(&labels)))
}

impl Selectors {
    /// Selects a pod. An unknown namespace is passed with a name but no labels.
    pub fn select(&self, pod: &Labels, namespace: &Namespace, is_known: bool) -> Selected {
        let not = |namespace_matches| Selected::Not { namespace_matches };
        let mut selected = not(false);
        let labels = namespace.all_labels();
        for (at, entry) in self.0.iter().enumerate() {
            let selects_namespace = if is_known {
                Some(selects(&entry.namespaces, &labels))
            } else {
                selects_unknown(&entry.namespaces, &labels)
            };
            match (selects(&entry.pods, pod), selects_namespace) {
                (true, Some(true)) => {
                    return Selected::By {
                        entry: at + 1,
                        by_namespace: !entry.namespaces.is_empty(),
                    };
                }
                (true, None) => selected = Selected::Unknown,
                (false, Some(true)) if selected != Selected::Unknown => {
                    selected = not(true);
                }
                _ => {}
            }
        }
        selected
    }

    /// Matches the namespace selectors; entries without a namespace selector do not count.
    pub fn selects_namespace(&self, namespace: &Namespace) -> bool {
        let labels = namespace.all_labels();
        let mut selectors = self.0.iter().map(|entry| &entry.namespaces);
        selectors.any(|selector| !selector.is_empty() && selects(selector, &labels))
    }

    pub fn pod_keys(&self) -> BTreeSet<String> {
        self.keys(|entry| &entry.pods)
    }

    pub fn namespace_keys(&self) -> BTreeSet<String> {
        self.keys(|entry| &entry.namespaces)
    }

    fn keys(&self, selector: impl Fn(&Entry) -> &Vec<Expression>) -> BTreeSet<String> {
        let requirements = self.0.iter().flat_map(selector);
        requirements.map(|one| parts(one).0.clone()).collect()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests;
