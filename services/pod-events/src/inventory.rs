//! A snapshot of this node's pods and their namespaces.

mod shared_map;

use std::{borrow::Cow, collections::BTreeSet, sync::Arc};

use inpod_types::NamespaceName;

use crate::pod::{Namespace, Pod, PodKey};

pub use shared_map::SharedMap;

/// A snapshot of this node's pods; clones share their unchanged parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    pub pods: SharedMap<PodKey, Pod>,
    pub namespaces: SharedMap<NamespaceName, Namespace>,
    pub gaps: Arc<BTreeSet<String>>,
    /// Set if every pod's namespace must be known. The field is true in Kubernetes; in a directory, a missing namespace
    /// has no labels.
    pub namespaces_required: bool,
}

impl Inventory {
    /// Returns whether a pod missing from the view does not exist.
    pub fn is_complete(&self) -> bool {
        self.gaps.is_empty()
    }

    /// Returns the first gap as the end of a message about a missing pod; empty without a gap.
    pub(crate) fn describe_gap(&self) -> String {
        let gap = self.gaps.first();
        gap.map_or_else(String::new, |gap| format!("; {gap}"))
    }

    pub fn is_namespace_unknown(&self, name: &NamespaceName) -> bool {
        !self.namespaces.contains_key(name) && (self.namespaces_required || !self.is_complete())
    }

    pub fn pod(&self, key: &PodKey) -> Option<&Pod> {
        self.pods.get(key)
    }

    /// Returns a namespace; an unknown namespace has no labels.
    pub fn namespace(&self, name: &NamespaceName) -> Cow<'_, Namespace> {
        let known = self.namespaces.get(name).map(Cow::Borrowed);
        known.unwrap_or_else(|| Cow::Owned(Namespace::unlabeled(name.clone())))
    }

    /// Returns the pods to evaluate again after a change, including removed pods.
    pub fn affected_since(&self, before: &Self) -> BTreeSet<PodKey> {
        let mut changes = self.changes_since(before);
        if !changes.are_of_pods_only() {
            let affected = self.pods.keys().filter(|key| changes.affects(key));
            let affected: Vec<_> = affected.cloned().collect();
            changes.pods.extend(affected);
        }
        changes.pods
    }

    pub fn changes_since(&self, before: &Self) -> Changes {
        Changes {
            pods: self.pods.differences(&before.pods),
            namespaces: self.namespaces.differences(&before.namespaces),
            completeness: self.is_complete() != before.is_complete(),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Added, changed or removed pods.
    pub pods: BTreeSet<PodKey>,
    /// Added, changed or removed namespaces.
    pub namespaces: BTreeSet<NamespaceName>,
    /// Set if only the earlier or only the later inventory is complete, which affects every pod.
    pub completeness: bool,
}

impl Changes {
    /// Returns a change that affects every pod.
    pub fn to_everything() -> Self {
        Self {
            completeness: true,
            ..Self::default()
        }
    }

    /// Returns whether nothing but the changed pods has to be evaluated again.
    pub fn are_of_pods_only(&self) -> bool {
        self.namespaces.is_empty() && !self.completeness
    }

    /// Returns whether a pod has to be evaluated again.
    pub fn affects(&self, key: &PodKey) -> bool {
        self.completeness || self.namespaces.contains(&key.0) || self.pods.contains(key)
    }
}
