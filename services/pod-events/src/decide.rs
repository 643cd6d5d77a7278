//! Whether a pod belongs to the mesh: a pure function of what is known of it.

mod inputs;
mod selector;

use workload::{Enrollment, NamespaceName, Reason, keys};

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
    /// Whether inpod is being taken off the node: no pod joins then.
    pub is_left: bool,
}

impl Policy<'_> {
    fn excludes(&self, namespace: &Namespace) -> bool {
        self.excluded.contains(&namespace.name)
    }
}

/// Decides of a pod from all that is known: never with the node's network, never with a sidecar, then as the selectors
/// say. Unknown only where the labels of its namespace would decide, and nothing is known of them.
pub fn decide_from(inventory: &Inventory, pod: &Pod, policy: &Policy<'_>) -> Decision {
    let namespace = inventory.namespace(&pod.pod.namespace);
    let is_known = !inventory.is_silent_on(&namespace.name);
    decide(pod, &namespace, is_known, policy)
}

/// Where the namespace is not known, `namespace` is a bare one.
fn decide(pod: &Pod, namespace: &Namespace, is_known: bool, policy: &Policy<'_>) -> Decision {
    let selected = policy.selectors.select(&pod.labels, namespace, is_known);
    let reason = never(pod, namespace, policy).unwrap_or_else(|| by_labels(pod, selected));
    let reason = if policy.is_left {
        staying_out(reason)
    } else {
        reason
    };
    let joins = matches!(reason, Reason::LabelOnPod | Reason::LabelOnNamespace);
    Decision {
        enrollment: if joins {
            Enrollment::Ambient
        } else if reason == Reason::NamespaceUnknown {
            Enrollment::Unknown
        } else {
            Enrollment::None
        },
        reason,
        inputs: inputs::of(pod, namespace, is_known, selected, policy),
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
    let said = namespace.and_then(|namespace| namespace.on_unknown.as_deref());
    match said {
        Some(keys::ON_UNKNOWN_OPEN) => OnUnknown::Open,
        Some(keys::ON_UNKNOWN_CLOSED) => OnUnknown::Closed,
        Some(_) | None if is_listed == Some(false) => OnUnknown::Open,
        Some(_) | None => OnUnknown::Closed,
    }
}

/// Why a pod stays out whatever its labels.
fn never(pod: &Pod, namespace: &Namespace, policy: &Policy<'_>) -> Option<Reason> {
    if pod.host_network {
        Some(Reason::HostNetwork)
    } else if pod.terminal {
        Some(Reason::PodTerminal)
    } else if policy.excludes(namespace) {
        Some(Reason::NamespaceExcluded)
    } else if pod.has_sidecar {
        Some(Reason::HasSidecar)
    } else {
        None
    }
}

/// Nobody joins a node that is left, and nobody has to wait there until more is known.
fn staying_out(reason: Reason) -> Reason {
    let joins_or_may = matches!(
        reason,
        Reason::LabelOnPod | Reason::LabelOnNamespace | Reason::NamespaceUnknown
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
        Selected::Depends => Reason::NamespaceUnknown,
        Selected::Not { but_for_the_pod }
            if but_for_the_pod && mode == Some(keys::DATAPLANE_MODE_NONE) =>
        {
            Reason::OptedOut
        }
        Selected::Not { .. } => Reason::NotSelected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{namespace, pod};

    fn istio() -> Selectors {
        keys::ISTIO_SELECTORS.parse().unwrap()
    }

    fn decided(pod: &Pod, namespace: &Namespace, selectors: &Selectors) -> Decision {
        let policy = Policy {
            selectors,
            excluded: &["kube-system".parse().unwrap()],
            pods_may: Permissions::default(),
            is_left: false,
        };
        decide(pod, namespace, true, &policy)
    }

    fn reason_of(change: impl FnOnce(&mut Pod, &mut Namespace)) -> (Enrollment, Reason) {
        let (mut pod, mut namespace) = (pod("shop", "web"), namespace("shop"));
        change(&mut pod, &mut namespace);
        let decision = decided(&pod, &namespace, &istio());
        (decision.enrollment, decision.reason)
    }

    fn set(labels: &mut Labels, mode: &str) {
        labels.insert(keys::DATAPLANE_MODE.to_owned(), mode.to_owned());
    }

    #[test]
    fn a_pod_without_labels_stays_out() {
        assert_eq!(
            reason_of(|_, _| ()),
            (Enrollment::None, Reason::NotSelected)
        );
    }

    #[test]
    fn a_label_on_the_pod_or_on_its_namespace_enrolls() {
        let on_pod = reason_of(|pod, _| set(&mut pod.labels, "ambient"));
        assert_eq!(on_pod, (Enrollment::Ambient, Reason::LabelOnPod));
        let on_namespace = reason_of(|_, namespace| set(&mut namespace.labels, "ambient"));
        assert_eq!(
            on_namespace,
            (Enrollment::Ambient, Reason::LabelOnNamespace)
        );
    }

    #[test]
    fn none_on_the_pod_beats_ambient_on_the_namespace() {
        let decided = reason_of(|pod, namespace| {
            set(&mut namespace.labels, "ambient");
            set(&mut pod.labels, "none");
        });
        assert_eq!(decided, (Enrollment::None, Reason::OptedOut));
    }

    #[test]
    fn nobody_joins_a_node_that_is_left_and_who_would_not_have_joined_keeps_the_reason() {
        let left = |pod: &Pod, is_known| {
            let policy = Policy {
                selectors: &istio(),
                excluded: &[],
                pods_may: Permissions::default(),
                is_left: true,
            };
            let decision = decide(pod, &namespace("shop"), is_known, &policy);
            (decision.enrollment, decision.reason)
        };
        let mut asks = pod("shop", "web");
        set(&mut asks.labels, "ambient");
        assert_eq!(left(&asks, true), (Enrollment::None, Reason::NodeLeaves));
        let plain = pod("shop", "web");
        assert_eq!(left(&plain, true), (Enrollment::None, Reason::NotSelected));
        assert_eq!(left(&plain, false), (Enrollment::None, Reason::NodeLeaves));
    }

    #[test]
    fn any_other_value_on_the_pod_lets_the_namespace_decide() {
        let decided = reason_of(|pod, namespace| {
            set(&mut namespace.labels, "ambient");
            set(&mut pod.labels, "sidecar");
        });
        assert_eq!(decided.1, Reason::LabelOnNamespace);
        let alone = reason_of(|pod, _| set(&mut pod.labels, "Ambient"));
        assert_eq!(alone.1, Reason::NotSelected);
    }

    #[test]
    fn none_is_an_opt_out_only_where_the_namespace_is_selected_and_the_pod_is_not() {
        let text = "[{podSelector: {matchLabels: {mesh: wanted}}, namespaceSelector: {matchLabels: {team: a}}}]";
        let selectors = text.parse().unwrap();
        let (mut pod, mut namespace) = (pod("shop", "web"), namespace("shop"));
        set(&mut pod.labels, "none");
        let reason = |pod: &Pod, namespace: &Namespace| decided(pod, namespace, &selectors).reason;
        assert_eq!(reason(&pod, &namespace), Reason::NotSelected);
        namespace.labels.insert("team".to_owned(), "a".to_owned());
        assert_eq!(reason(&pod, &namespace), Reason::OptedOut);
        // These selectors do not ask for the label.
        pod.labels.insert("mesh".to_owned(), "wanted".to_owned());
        assert_eq!(reason(&pod, &namespace), Reason::LabelOnNamespace);
        pod.labels.clear();
        assert_eq!(reason(&pod, &namespace), Reason::NotSelected);
    }

    #[test]
    fn a_pod_of_an_unknown_fate_waits_where_its_namespace_may_be_in_the_mesh_or_says_so() {
        use OnUnknown::{Closed, Open};
        for (said, is_listed, expected) in [
            (None, Some(true), Closed),
            (None, Some(false), Open),
            // Nobody has ever known anything here.
            (None, None, Closed),
            (Some("open"), Some(true), Open),
            (Some("open"), None, Open),
            (Some("closed"), Some(false), Closed),
            // What cannot be understood says nothing.
            (Some("Open"), Some(true), Closed),
            (Some("no"), Some(false), Open),
        ] {
            let mut namespace = namespace("shop");
            namespace.on_unknown = said.map(str::to_owned);
            let decided = on_unknown(Some(&namespace), is_listed);
            assert_eq!(decided, expected, "{said:?} {is_listed:?}");
            if said.is_none() {
                assert_eq!(on_unknown(None, is_listed), expected, "{is_listed:?}");
            }
        }
    }

    #[test]
    fn the_labels_of_a_namespace_that_nobody_knows_are_unknown_only_where_they_would_decide() {
        let silent = Inventory {
            namespaces_exist: true,
            ..Inventory::default()
        };
        let decided = |inventory: &Inventory, pod: &Pod, excluded: &[NamespaceName]| {
            let policy = Policy {
                selectors: &istio(),
                excluded,
                pods_may: Permissions::default(),
                is_left: false,
            };
            decide_from(inventory, pod, &policy).enrollment
        };
        let plain = pod("shop", "web");
        assert_eq!(decided(&silent, &plain, &[]), Enrollment::Unknown);
        let mut asks = plain.clone();
        set(&mut asks.labels, "ambient");
        assert_eq!(decided(&silent, &asks, &[]), Enrollment::Ambient);
        let mut opts_out = plain.clone();
        set(&mut opts_out.labels, "none");
        assert_eq!(decided(&silent, &opts_out, &[]), Enrollment::None);
        let excluded = ["shop".parse().unwrap()];
        assert_eq!(decided(&silent, &plain, &excluded), Enrollment::None);
        // A whole directory without a manifest of the namespace says that it has no labels.
        let whole = Inventory::default();
        assert_eq!(decided(&whole, &plain, &[]), Enrollment::None);
    }

    #[test]
    fn what_cannot_be_captured_stays_out_whatever_its_labels() {
        let labelled = |change: fn(&mut Pod, &mut Namespace)| {
            reason_of(|pod, namespace| {
                set(&mut pod.labels, "ambient");
                change(pod, namespace);
            })
        };
        assert_eq!(
            labelled(|pod, _| pod.host_network = true).1,
            Reason::HostNetwork
        );
        assert_eq!(
            labelled(|pod, _| pod.has_sidecar = true).1,
            Reason::HasSidecar
        );
        assert_eq!(
            labelled(|pod, _| pod.terminal = true).1,
            Reason::PodTerminal
        );
        let excluded = labelled(|_, namespace| namespace.name = "kube-system".parse().unwrap());
        assert_eq!(excluded, (Enrollment::None, Reason::NamespaceExcluded));
    }
}
