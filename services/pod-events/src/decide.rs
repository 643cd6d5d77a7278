//! Whether a pod belongs to the mesh: a pure function of what is known of it.

use workload::{Enrollment, NamespaceName, Reason, keys};

use crate::{
    pod::{Namespace, Pod},
    source::Inventory,
};

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

/// Decides by the incumbent's rules: never with the node's network, never with a sidecar, then the pod's label, then
/// its namespace's.
pub fn decide(pod: &Pod, namespace: &Namespace, excluded: &[NamespaceName]) -> Decision {
    let reason = reason(pod, namespace, excluded);
    let joins = matches!(reason, Reason::LabelOnPod | Reason::LabelOnNamespace);
    Decision {
        enrollment: if joins {
            Enrollment::Ambient
        } else {
            Enrollment::None
        },
        reason,
        inputs: inputs(pod, namespace, excluded),
    }
}

/// Decides of a pod from all that is known. Unknown only where the labels of its namespace would decide, and nothing
/// is known of them.
pub fn decide_from(inventory: &Inventory, pod: &Pod, excluded: &[NamespaceName]) -> Decision {
    let namespace = inventory.namespace(&pod.pod.namespace);
    let decision = decide(pod, &namespace, excluded);
    if decision.reason == Reason::NotSelected && inventory.is_silent_on(&namespace.name) {
        return Decision {
            enrollment: Enrollment::Unknown,
            reason: Reason::NamespaceUnknown,
            ..decision
        };
    }
    decision
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

fn reason(pod: &Pod, namespace: &Namespace, excluded: &[NamespaceName]) -> Reason {
    let asks = |mode: &Option<String>| mode.as_deref() == Some(keys::DATAPLANE_MODE_AMBIENT);
    if pod.host_network {
        Reason::HostNetwork
    } else if pod.terminal {
        Reason::PodTerminal
    } else if excluded.contains(&namespace.name) {
        Reason::NamespaceExcluded
    } else if pod.has_sidecar {
        Reason::HasSidecar
    } else if asks(&pod.dataplane_mode) {
        Reason::LabelOnPod
    } else if pod.dataplane_mode.as_deref() == Some(keys::DATAPLANE_MODE_NONE) {
        Reason::OptedOut
    } else if asks(&namespace.dataplane_mode) {
        Reason::LabelOnNamespace
    } else {
        Reason::NotSelected
    }
}

fn inputs(pod: &Pod, namespace: &Namespace, excluded: &[NamespaceName]) -> Vec<(String, String)> {
    let label = |owner: &str, value: &Option<String>| {
        let name = format!("{owner} label {}", keys::DATAPLANE_MODE);
        (name, value.clone().unwrap_or_default())
    };
    vec![
        label("pod", &pod.dataplane_mode),
        label("namespace", &namespace.dataplane_mode),
        (
            format!("namespace annotation {}", keys::ON_UNKNOWN),
            namespace.on_unknown.clone().unwrap_or_default(),
        ),
        ("pod hostNetwork".to_owned(), pod.host_network.to_string()),
        (
            format!("pod annotation {}", keys::SIDECAR_STATUS),
            pod.has_sidecar.to_string(),
        ),
        ("pod is terminal".to_owned(), pod.terminal.to_string()),
        (
            "namespace is excluded".to_owned(),
            excluded.contains(&namespace.name).to_string(),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{namespace, pod};

    fn reason_of(change: impl FnOnce(&mut Pod, &mut Namespace)) -> (Enrollment, Reason) {
        let (mut pod, mut namespace) = (pod("shop", "web"), namespace("shop"));
        change(&mut pod, &mut namespace);
        let decision = decide(&pod, &namespace, &["kube-system".parse().unwrap()]);
        (decision.enrollment, decision.reason)
    }

    fn ambient() -> Option<String> {
        Some("ambient".into())
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
        let on_pod = reason_of(|pod, _| pod.dataplane_mode = ambient());
        assert_eq!(on_pod, (Enrollment::Ambient, Reason::LabelOnPod));
        let on_namespace = reason_of(|_, namespace| namespace.dataplane_mode = ambient());
        assert_eq!(
            on_namespace,
            (Enrollment::Ambient, Reason::LabelOnNamespace)
        );
    }

    #[test]
    fn none_on_the_pod_beats_ambient_on_the_namespace() {
        let decided = reason_of(|pod, namespace| {
            namespace.dataplane_mode = ambient();
            pod.dataplane_mode = Some("none".into());
        });
        assert_eq!(decided, (Enrollment::None, Reason::OptedOut));
    }

    #[test]
    fn any_other_value_on_the_pod_lets_the_namespace_decide() {
        let decided = reason_of(|pod, namespace| {
            namespace.dataplane_mode = ambient();
            pod.dataplane_mode = Some("sidecar".into());
        });
        assert_eq!(decided.1, Reason::LabelOnNamespace);
        let alone = reason_of(|pod, _| pod.dataplane_mode = Some("Ambient".into()));
        assert_eq!(alone.1, Reason::NotSelected);
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
        let inventory = Inventory {
            namespaces_exist: true,
            ..Inventory::default()
        };
        let mut web = pod("shop", "web");
        assert_eq!(
            decide_from(&inventory, &web, &[]).enrollment,
            Enrollment::Unknown
        );
        web.dataplane_mode = ambient();
        assert_eq!(
            decide_from(&inventory, &web, &[]).enrollment,
            Enrollment::Ambient
        );
        let excluded = ["shop".parse().unwrap()];
        assert_eq!(
            decide_from(&inventory, &web, &excluded).enrollment,
            Enrollment::None
        );
        // A whole directory without a manifest of the namespace says that it has no labels.
        let plain = pod("shop", "web");
        assert_eq!(
            decide_from(&Inventory::default(), &plain, &[]).enrollment,
            Enrollment::None
        );
    }

    #[test]
    fn what_cannot_be_captured_stays_out_whatever_its_labels() {
        let labelled = |change: fn(&mut Pod, &mut Namespace)| {
            reason_of(|pod, namespace| {
                pod.dataplane_mode = ambient();
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
