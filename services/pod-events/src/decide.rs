//! Whether a pod belongs to the mesh: a pure function of what is known of it.

mod inputs;
mod selector;

use inpod_types::{Enrollment, NamespaceName, Reason, keys};

use crate::{
    pod::{Namespace, Pod},
    redirection::Permissions,
    source::Inventory,
};

pub use selector::{InvalidSelectors, Labels, Selected, Selectors};

/// What was decided of a pod, and from what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What the pod should be.
    pub enrollment: Enrollment,
    /// Why.
    pub reason: Reason,
    /// What was looked at, name and value.
    pub inputs: Vec<(String, String)>,
}

/// What the node's settings say of who joins, and how.
#[derive(Clone, Copy, Debug)]
pub struct Policy<'a> {
    /// Who joins.
    pub selectors: &'a Selectors,
    /// Namespaces whose pods never do.
    pub excluded: &'a [NamespaceName],
    /// What pods may ask for.
    pub pods_may: Permissions,
    /// Whether the traffic of pods with a sidecar is redirected to it.
    pub sidecars: bool,
    /// Whether inpod is being taken off the node: no pod joins then.
    pub is_uninstalling: bool,
}

impl Policy<'_> {
    fn excludes(&self, namespace: &Namespace) -> bool {
        self.excluded.contains(&namespace.name)
    }
}

/// Decides of a pod from all that is known: never with the node's network, with a sidecar to that or not at all, then as
/// the selectors say. Unknown only where the labels of its namespace would decide, and nothing is known of them.
pub fn decide_from(inventory: &Inventory, pod: &Pod, policy: &Policy<'_>) -> Decision {
    let namespace = inventory.namespace(&pod.pod.namespace);
    let is_known = !inventory.is_silent_on(&namespace.name);
    decide(pod, &namespace, is_known, policy)
}

/// Where the namespace is not known, `namespace` is a bare one.
fn decide(pod: &Pod, namespace: &Namespace, is_known: bool, policy: &Policy<'_>) -> Decision {
    let selected = policy.selectors.select(&pod.labels, namespace, is_known);
    let decided = excluded_reason(pod, namespace, policy).or_else(|| by_injection(pod, policy));
    let reason = decided.unwrap_or_else(|| by_labels(pod, selected));
    let reason = if policy.is_uninstalling {
        during_uninstall(reason)
    } else {
        reason
    };
    Decision {
        enrollment: if matches!(reason, Reason::LabelOnPod | Reason::LabelOnNamespace) {
            Enrollment::Ambient
        } else if reason == Reason::SidecarInjected {
            Enrollment::Sidecar
        } else if reason == Reason::NamespaceUnknown {
            Enrollment::Unknown
        } else {
            Enrollment::None
        },
        reason,
        inputs: inputs::collect(pod, namespace, is_known, selected, policy),
    }
}

/// Whether a pod starts of which it is not known whether it is to be in the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnUnknown {
    /// It starts outside the mesh, written down.
    Open,
    /// It has to wait.
    Closed,
}

/// What becomes of such a pod: what its namespace says, as far as that was ever seen; else it waits where its namespace
/// may have pods in the mesh. `is_listed` is `None` where nobody ever wrote down which namespaces have.
pub fn on_unknown(namespace: Option<&Namespace>, is_listed: Option<bool>) -> OnUnknown {
    let value = namespace.and_then(|namespace| namespace.on_unknown.as_deref());
    match value {
        Some(keys::ON_UNKNOWN_OPEN) => OnUnknown::Open,
        Some(keys::ON_UNKNOWN_CLOSED) => OnUnknown::Closed,
        Some(_) | None if is_listed == Some(false) => OnUnknown::Open,
        Some(_) | None => OnUnknown::Closed,
    }
}

/// Why a pod stays out whatever its labels.
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

/// A pod that an injector has been at is never ambient.
fn by_injection(pod: &Pod, policy: &Policy<'_>) -> Option<Reason> {
    let injection = pod.injection.as_ref()?;
    Some(if policy.sidecars && injection.skip().is_none() {
        Reason::SidecarInjected
    } else {
        Reason::HasSidecar
    })
}

/// Nobody joins a node that is left, and nobody has to wait there until more is known.
fn during_uninstall(reason: Reason) -> Reason {
    let joins_or_may = matches!(
        reason,
        Reason::LabelOnPod
            | Reason::LabelOnNamespace
            | Reason::SidecarInjected
            | Reason::NamespaceUnknown
    );
    if joins_or_may {
        Reason::NodeLeaves
    } else {
        reason
    }
}

fn by_labels(pod: &Pod, selected: Selected) -> Reason {
    let mode = pod.labels.get(keys::DATAPLANE_MODE).map(String::as_str);
    match selected {
        Selected::By { by_namespace, .. } if by_namespace => Reason::LabelOnNamespace,
        Selected::By { .. } => Reason::LabelOnPod,
        Selected::Unknown => Reason::NamespaceUnknown,
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
