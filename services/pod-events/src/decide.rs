//! Decides whether a pod belongs to the mesh.

mod demand;
mod inputs;
mod runtime_class;
mod selector;

use std::collections::BTreeSet;

use inpod_types::{Enrollment, NamespaceName, Reason, keys};

use crate::{
    inventory::Inventory,
    pod::{Namespace, Pod},
    redirection::Permissions,
};

pub use demand::Demand;
pub use runtime_class::{ClassPattern, SANDBOXED_RUNTIME_CLASSES};
pub use selector::{Selected, Selectors};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    pub enrollment: Enrollment,
    pub reason: Reason,
    pub demand: Demand,
}

impl Decision {
    /// Returns whether the pod stays outside although the pod or its namespace demands the mesh.
    pub(crate) fn is_unmet(&self) -> bool {
        self.demand.is_made()
            && self.enrollment == Enrollment::None
            && self.reason != Reason::PodTerminal
    }
}

/// The node's settings for the decision which pods join, and how.
#[derive(Clone, Copy, Debug)]
pub struct Policy<'a> {
    pub selectors: &'a Selectors,
    pub excluded: &'a [NamespaceName],
    /// The value of the setting `sandboxed_runtime_classes`.
    pub sandboxed: &'a [ClassPattern],
    pub pods_may: Permissions,
    /// The value of the setting `sidecar_redirection`.
    pub sidecars: bool,
    pub is_uninstalling: bool,
}

impl Policy<'_> {
    /// Returns the keys of the namespace labels that decide.
    pub(crate) fn namespace_keys(&self) -> BTreeSet<String> {
        let mut all = self.selectors.namespace_keys();
        all.insert(keys::REQUIRE.to_owned());
        all
    }

    fn excludes(&self, namespace: &Namespace) -> bool {
        self.excluded.contains(&namespace.name)
    }

    fn is_sandboxed(&self, pod: &Pod) -> bool {
        let class = pod.runtime_class.as_deref();
        class.is_some_and(|class| self.sandboxed.iter().any(|pattern| pattern.matches(class)))
    }
}

/// Decides on a pod: a pod on the host network or of a sandboxed runtime never joins; a pod with a sidecar is redirected
/// to the sidecar or not at all; otherwise a demand or the selectors decide. The decision is unknown only if unknown labels of the
/// namespace would decide.
pub fn decide_from(inventory: &Inventory, pod: &Pod, policy: &Policy<'_>) -> Decision {
    let namespace = inventory.namespace(&pod.pod.namespace);
    let is_known = !inventory.is_namespace_unknown(&namespace.name);
    decide(pod, &namespace, is_known, policy)
}

/// Decides on a pod; without a known namespace, `namespace` has no labels.
fn decide(pod: &Pod, namespace: &Namespace, is_known: bool, policy: &Policy<'_>) -> Decision {
    let selected = policy.selectors.select(&pod.labels, namespace, is_known);
    let demand = Demand::of(pod, namespace);
    let decided = excluded_reason(pod, namespace, policy).or_else(|| by_injection(pod, policy));
    let reason = decided.unwrap_or_else(|| by_labels(pod, selected, demand, is_known));
    let reason = if !joins_or_may(reason) {
        reason
    } else if policy.is_sandboxed(pod) {
        Reason::SandboxedRuntime
    } else if policy.is_uninstalling {
        Reason::NodeLeaves
    } else {
        reason
    };
    Decision {
        enrollment: if matches!(
            reason,
            Reason::LabelOnPod | Reason::LabelOnNamespace | Reason::MeshRequired
        ) {
            Enrollment::Ambient
        } else if reason == Reason::SidecarInjected {
            Enrollment::Sidecar
        } else if reason == Reason::NamespaceUnknown {
            Enrollment::Unknown
        } else {
            Enrollment::None
        },
        reason,
        demand,
    }
}

/// Lists the names and values behind a decision.
pub(crate) fn inputs_of(
    inventory: &Inventory,
    pod: &Pod,
    policy: &Policy<'_>,
) -> Vec<(String, String)> {
    let namespace = inventory.namespace(&pod.pod.namespace);
    let is_known = !inventory.is_namespace_unknown(&namespace.name);
    inputs::collect(pod, &namespace, is_known, policy)
}

/// The policy for pods whose decision is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnUnknown {
    /// The pod is admitted unenrolled, and recorded.
    Open,
    Closed,
}

/// Returns the policy for a pod whose decision is unknown. A demand of the namespace, or else its annotation, decides if
/// the namespace was ever seen; otherwise the pod waits if its namespace may have pods in the mesh. `is_listed` is `None` if no list of
/// such namespaces was ever written.
pub fn on_unknown(namespace: Option<&Namespace>, is_listed: Option<bool>) -> OnUnknown {
    if namespace.is_some_and(|namespace| Demand::of_namespace(namespace).is_made()) {
        return OnUnknown::Closed;
    }
    let value = namespace.and_then(|namespace| namespace.on_unknown.as_deref());
    match value {
        Some(keys::ON_UNKNOWN_OPEN) => OnUnknown::Open,
        Some(keys::ON_UNKNOWN_CLOSED) => OnUnknown::Closed,
        Some(_) | None if is_listed == Some(false) => OnUnknown::Open,
        Some(_) | None => OnUnknown::Closed,
    }
}

/// Returns why a pod stays outside regardless of its labels.
fn excluded_reason(pod: &Pod, namespace: &Namespace, policy: &Policy<'_>) -> Option<Reason> {
    if pod.host_network {
        Some(Reason::HostNetwork)
    } else if pod.terminal {
        Some(Reason::PodTerminal)
    } else if policy.excludes(namespace) {
        Some(Reason::NamespaceExcluded)
    } else {
        None
    }
}

/// Decides on an injected pod, which is never ambient.
fn by_injection(pod: &Pod, policy: &Policy<'_>) -> Option<Reason> {
    let injection = pod.injection.as_ref()?;
    Some(if policy.sidecars && injection.skip().is_none() {
        Reason::SidecarInjected
    } else {
        Reason::HasSidecar
    })
}

/// Returns whether a pod joins for the reason, or may join once the namespace is known. With a sandboxed runtime and
/// during an uninstall, such a pod neither joins nor waits.
fn joins_or_may(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::LabelOnPod
            | Reason::LabelOnNamespace
            | Reason::MeshRequired
            | Reason::SidecarInjected
            | Reason::NamespaceUnknown
    )
}

/// Without a known namespace, a demand of the namespace may decide about a pod that no selector selects.
fn by_labels(pod: &Pod, selected: Selected, demand: Demand, is_known: bool) -> Reason {
    let mode = pod.labels.get(keys::DATAPLANE_MODE).map(String::as_str);
    match selected {
        Selected::By { by_namespace, .. } if by_namespace => Reason::LabelOnNamespace,
        Selected::By { .. } => Reason::LabelOnPod,
        Selected::Unknown | Selected::Not { .. } if demand.is_made() => Reason::MeshRequired,
        Selected::Unknown => Reason::NamespaceUnknown,
        Selected::Not { .. } if !is_known => Reason::NamespaceUnknown,
        Selected::Not { namespace_matches }
            if namespace_matches && mode == Some(keys::DATAPLANE_MODE_NONE) =>
        {
            Reason::OptedOut
        }
        Selected::Not { .. } => Reason::NotSelected,
    }
}

#[cfg(test)]
mod tests;
