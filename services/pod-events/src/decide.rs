//! Whether a pod belongs to the mesh: a pure function of what is known of it.

use workload::{Enrollment, NamespaceName, Reason, keys};

use crate::pod::{Namespace, Pod};

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
