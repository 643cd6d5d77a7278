mod oracle;

use super::*;
use crate::{
    pod::Labels,
    testing::{namespace, pod},
};

fn istio() -> Selectors {
    keys::ISTIO_SELECTORS.parse().unwrap()
}

fn decided(pod: &Pod, namespace: &Namespace, selectors: &Selectors) -> Decision {
    let policy = Policy {
        selectors,
        excluded: &["kube-system".parse().unwrap()],
        pods_may: Permissions::default(),
        sidecars: true,
        is_uninstalling: false,
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
fn no_pod_joins_during_an_uninstall_and_one_that_would_not_have_joined_keeps_its_reason() {
    let left = |pod: &Pod, is_known| {
        let policy = Policy {
            selectors: &istio(),
            excluded: &[],
            pods_may: Permissions::default(),
            sidecars: true,
            is_uninstalling: true,
        };
        let decision = decide(pod, &namespace("shop"), is_known, &policy);
        (decision.enrollment, decision.reason)
    };
    let mut labelled = pod("shop", "web");
    set(&mut labelled.labels, "ambient");
    assert_eq!(
        left(&labelled, true),
        (Enrollment::None, Reason::NodeLeaves)
    );
    let plain = pod("shop", "web");
    assert_eq!(left(&plain, true), (Enrollment::None, Reason::NotSelected));
    assert_eq!(left(&plain, false), (Enrollment::None, Reason::NodeLeaves));
}

fn injected(change: impl FnOnce(&mut serde_json::Value)) -> Pod {
    let annotations = serde_json::json!({ keys::SIDECAR_STATUS: "{}" });
    let mut shown = serde_json::json!({
        "metadata": {"name": "web", "uid": "u", "namespace": "shop", "annotations": annotations},
        "spec": {"containers": [{"name": "istio-proxy"}]},
    });
    change(&mut shown);
    let shown: k8s_openapi::api::core::v1::Pod = serde_json::from_value(shown).unwrap();
    Pod::try_from(shown).unwrap()
}

#[test]
fn a_pod_with_a_sidecar_is_redirected_to_it_and_never_ambient() {
    let ambient = |shown: &mut serde_json::Value| {
        shown["metadata"]["labels"] = serde_json::json!({ keys::DATAPLANE_MODE: "ambient" });
    };
    let of = |pod: &Pod, sidecars, is_uninstalling| {
        let policy = Policy {
            selectors: &istio(),
            excluded: &["kube-system".parse().unwrap()],
            pods_may: Permissions::default(),
            sidecars,
            is_uninstalling,
        };
        // The namespace need not be known.
        let decision = decide(pod, &namespace("shop"), false, &policy);
        (decision.enrollment, decision.reason)
    };
    let pod = injected(ambient);
    let redirected = (Enrollment::Sidecar, Reason::SidecarInjected);
    assert_eq!(of(&pod, true, false), redirected);
    let left_alone = (Enrollment::None, Reason::HasSidecar);
    assert_eq!(of(&pod, false, false), left_alone);
    assert_eq!(of(&pod, false, true), left_alone);
    let leaves = (Enrollment::None, Reason::NodeLeaves);
    assert_eq!(of(&pod, true, true), leaves);
    let skipped = injected(|shown| {
        ambient(shown);
        shown["spec"]["containers"][0]["args"] = serde_json::json!(["proxy", "router"]);
    });
    assert_eq!(of(&skipped, true, false), left_alone);
}

#[test]
fn what_comes_before_injection_keeps_its_reason() {
    type Change = fn(&mut serde_json::Value);
    let changes: [(Change, Reason); 3] = [
        (
            |it| it["spec"]["hostNetwork"] = true.into(),
            Reason::HostNetwork,
        ),
        (
            |it| it["status"] = serde_json::json!({"phase": "Failed"}),
            Reason::PodTerminal,
        ),
        (|_| (), Reason::NamespaceExcluded),
    ];
    for (change, reason) in changes {
        let mut namespace = namespace("shop");
        if reason == Reason::NamespaceExcluded {
            namespace.name = "kube-system".parse().unwrap();
        }
        let decision = decided(&injected(change), &namespace, &istio());
        assert_eq!(
            (decision.enrollment, decision.reason),
            (Enrollment::None, reason)
        );
    }
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
    // The selectors do not ask for the label.
    pod.labels.insert("mesh".to_owned(), "wanted".to_owned());
    assert_eq!(reason(&pod, &namespace), Reason::LabelOnNamespace);
    pod.labels.clear();
    assert_eq!(reason(&pod, &namespace), Reason::NotSelected);
}

#[test]
fn a_pod_of_an_unknown_fate_waits_where_its_namespace_may_be_in_the_mesh_or_says_so() {
    use OnUnknown::{Closed, Open};
    for (value, is_listed, expected) in [
        (None, Some(true), Closed),
        (None, Some(false), Open),
        // No list was ever written in this case.
        (None, None, Closed),
        (Some("open"), Some(true), Open),
        (Some("open"), None, Open),
        (Some("closed"), Some(false), Closed),
        // An unknown value counts as absent.
        (Some("Open"), Some(true), Closed),
        (Some("no"), Some(false), Open),
    ] {
        let mut namespace = namespace("shop");
        namespace.on_unknown = value.map(str::to_owned);
        let decided = on_unknown(Some(&namespace), is_listed);
        assert_eq!(decided, expected, "{value:?} {is_listed:?}");
        if value.is_none() {
            assert_eq!(on_unknown(None, is_listed), expected, "{is_listed:?}");
        }
    }
}

#[test]
fn the_labels_of_an_unknown_namespace_are_unknown_only_where_they_would_decide() {
    let silent = Inventory {
        namespaces_required: true,
        ..Inventory::default()
    };
    let decided = |inventory: &Inventory, pod: &Pod, excluded: &[NamespaceName]| {
        let policy = Policy {
            selectors: &istio(),
            excluded,
            pods_may: Permissions::default(),
            sidecars: true,
            is_uninstalling: false,
        };
        decide_from(inventory, pod, &policy).enrollment
    };
    let plain = pod("shop", "web");
    assert_eq!(decided(&silent, &plain, &[]), Enrollment::Unknown);
    let mut labelled = plain.clone();
    set(&mut labelled.labels, "ambient");
    assert_eq!(decided(&silent, &labelled, &[]), Enrollment::Ambient);
    let mut opts_out = plain.clone();
    set(&mut opts_out.labels, "none");
    assert_eq!(decided(&silent, &opts_out, &[]), Enrollment::None);
    let excluded = ["shop".parse().unwrap()];
    assert_eq!(decided(&silent, &plain, &excluded), Enrollment::None);
    // In a complete directory, a namespace without a manifest has no labels.
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
        labelled(|pod, _| pod.terminal = true).1,
        Reason::PodTerminal
    );
    let excluded = labelled(|_, namespace| namespace.name = "kube-system".parse().unwrap());
    assert_eq!(excluded, (Enrollment::None, Reason::NamespaceExcluded));
}
