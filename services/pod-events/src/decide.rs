//! Decides whether a pod belongs to the mesh: a pure function of what is known of it.

mod inputs;
mod selector;

use inpod_types::{Enrollment, NamespaceName, Reason, keys};

use crate::{
    pod::{Namespace, Pod},
    redirection::Permissions,
    source::Inventory,
};

pub use selector::{InvalidSelectors, Labels, Selected, Selectors};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub enrollment: Enrollment,
    pub reason: Reason,
    /// Everything that was considered, as name and value.
    pub inputs: Vec<(String, String)>,
}

/// The node's settings on which pods join, and how.
#[derive(Clone, Copy, Debug)]
pub struct Policy<'a> {
    pub selectors: &'a Selectors,
    pub excluded: &'a [NamespaceName],
    pub pods_may: Permissions,
    /// The setting `sidecar_redirection`: pods with a sidecar are redirected to it.
    pub sidecars: bool,
    /// During an uninstall no pod joins.
    pub is_uninstalling: bool,
}

impl Policy<'_> {
    fn excludes(&self, namespace: &Namespace) -> bool {
        self.excluded.contains(&namespace.name)
    }
}

/// Decides on a pod: pods on the host network never join, pods with a sidecar are redirected to that or not at all, and
/// the selectors decide on the others. Unknown only if the labels of the namespace would decide and are not known.
pub fn decide_from(inventory: &Inventory, pod: &Pod, policy: &Policy<'_>) -> Decision {
    let namespace = inventory.namespace(&pod.pod.namespace);
    let is_known = !inventory.is_namespace_unknown(&namespace.name);
    decide(pod, &namespace, is_known, policy)
}

/// If the namespace is not known, `namespace` has no labels.
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

/// The policy for pods of which it is unknown whether it is to be in the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnUnknown {
    /// It is admitted unenrolled, and recorded.
    Open,
    Closed,
}

/// Decides on a pod whose decision is unknown: by its namespace's annotation if one was ever seen; otherwise
/// the pod waits if its namespace may have pods in the mesh. `is_listed` is `None` if no list of such
/// namespaces was ever written.
pub fn on_unknown(namespace: Option<&Namespace>, is_listed: Option<bool>) -> OnUnknown {
    let value = namespace.and_then(|namespace| namespace.on_unknown.as_deref());
    match value {
        Some(keys::ON_UNKNOWN_OPEN) => OnUnknown::Open,
        Some(keys::ON_UNKNOWN_CLOSED) => OnUnknown::Closed,
        Some(_) | None if is_listed == Some(false) => OnUnknown::Open,
        Some(_) | None => OnUnknown::Closed,
    }
}

/// Returns why a pod stays outside whatever its labels.
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

/// Decides on a pod that an injector has processed; it is never ambient.
fn by_injection(pod: &Pod, policy: &Policy<'_>) -> Option<Reason> {
    let injection = pod.injection.as_ref()?;
    Some(if policy.sidecars && injection.skip().is_none() {
        Reason::SidecarInjected
    } else {
        Reason::HasSidecar
    })
}

/// No pod joins during an uninstall, and none waits until more is known.
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
