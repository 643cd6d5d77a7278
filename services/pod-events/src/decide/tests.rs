//! `oracle` covers labels of pods, sidecars and pods that cannot be captured, with a known namespace without labels.

mod oracle;

use super::*;
use crate::{
    pod::Labels,
    testing::{injection, namespace, pod, policy},
};

fn istio() -> Selectors {
    keys::ISTIO_SELECTORS.parse().unwrap()
}

fn set(labels: &mut Labels, mode: &str) {
    labels.insert(keys::DATAPLANE_MODE.to_owned(), mode.to_owned());
}

fn labelled(mode: &str) -> Pod {
    let mut pod = pod("shop", "web");
    set(&mut pod.labels, mode);
    pod
}

#[test]
fn a_namespace_label_enrolls_unless_the_pods_label_decides() {
    let mut namespace = namespace("shop");
    set(&mut namespace.labels, "ambient");
    for (pod, expected) in [
        (pod("shop", "web"), Reason::LabelOnNamespace),
        (labelled("sidecar"), Reason::LabelOnNamespace),
        (labelled("ambient"), Reason::LabelOnPod),
        (labelled("none"), Reason::OptedOut),
    ] {
        let decision = decide(&pod, &namespace, true, &policy(&istio()));
        assert_eq!(decision.reason, expected, "{:?}", pod.labels);
        let joins = expected != Reason::OptedOut;
        assert_eq!(decision.enrollment == Enrollment::Ambient, joins);
    }
}

#[test]
fn no_pod_joins_during_an_uninstall_others_keep_their_reason() {
    let selectors = istio();
    let uninstalling = Policy {
        is_uninstalling: true,
        ..policy(&selectors)
    };
    let without_sidecars = Policy {
        sidecars: false,
        ..uninstalling
    };
    let injected = Pod {
        injection: Some(injection().into()),
        ..labelled("ambient")
    };
    for (policy, pod, is_known, reason) in [
        (uninstalling, &labelled("ambient"), true, Reason::NodeLeaves),
        (uninstalling, &pod("shop", "web"), true, Reason::NotSelected),
        (uninstalling, &pod("shop", "web"), false, Reason::NodeLeaves),
        (uninstalling, &injected, false, Reason::NodeLeaves),
        (without_sidecars, &injected, false, Reason::HasSidecar),
    ] {
        let decision = decide(pod, &namespace("shop"), is_known, &policy);
        let expected = (Enrollment::None, reason);
        assert_eq!((decision.enrollment, decision.reason), expected);
    }
}

#[test]
fn a_sandboxed_runtime_keeps_out_every_pod_that_would_join() {
    let selectors = istio();
    let sandboxed = ["gvisor", "kata-*"].map(|text| text.parse().unwrap());
    let usual = Policy {
        sandboxed: &sandboxed,
        ..policy(&selectors)
    };
    let uninstalling = Policy {
        is_uninstalling: true,
        ..usual
    };
    let without_setting = policy(&selectors);
    let ambient = labelled("ambient");
    let injected = Pod {
        injection: Some(injection().into()),
        ..pod("shop", "web")
    };
    let host = Pod {
        host_network: true,
        ..labelled("ambient")
    };
    let unlabelled = pod("shop", "web");
    let out = |reason| (Enrollment::None, reason);
    let gvisor = Some("gvisor");
    let sandboxed_out = out(Reason::SandboxedRuntime);
    let joins = (Enrollment::Ambient, Reason::LabelOnPod);
    for (policy, pod, class, is_known, expected) in [
        (usual, &ambient, Some("kata-qemu"), true, sandboxed_out),
        (usual, &ambient, gvisor, true, sandboxed_out),
        (usual, &ambient, Some("runc"), true, joins),
        (usual, &ambient, None, true, joins),
        (without_setting, &ambient, gvisor, true, joins),
        (usual, &injected, gvisor, true, sandboxed_out),
        (usual, &host, gvisor, true, out(Reason::HostNetwork)),
        // A pod that asks for nothing keeps the reason by which it can join elsewhere.
        (usual, &unlabelled, gvisor, true, out(Reason::NotSelected)),
        (
            usual,
            &labelled("none"),
            gvisor,
            true,
            out(Reason::OptedOut),
        ),
        // The pod does not wait for its namespace, because no label can enroll it.
        (usual, &unlabelled, gvisor, false, sandboxed_out),
        (uninstalling, &ambient, gvisor, true, sandboxed_out),
        (
            uninstalling,
            &ambient,
            Some("runc"),
            true,
            out(Reason::NodeLeaves),
        ),
    ] {
        let pod = Pod {
            runtime_class: class.map(Into::into),
            ..pod.clone()
        };
        let decision = decide(&pod, &namespace("shop"), is_known, &policy);
        let decided = (decision.enrollment, decision.reason);
        assert_eq!(decided, expected, "{pod:?} {is_known}");
    }
}

#[test]
fn a_pod_with_a_sidecar_is_never_ambient_and_needs_no_namespace() {
    let selectors = istio();
    let injected = Pod {
        injection: Some(injection().into()),
        ..labelled("ambient")
    };
    let enrollment = |sidecars| {
        let policy = Policy {
            sidecars,
            ..policy(&selectors)
        };
        decide(&injected, &namespace("shop"), false, &policy).enrollment
    };
    assert_eq!(enrollment(true), Enrollment::Sidecar);
    assert_eq!(enrollment(false), Enrollment::None);
}

#[test]
fn none_opts_out_only_where_the_namespace_alone_is_selected() {
    let text = "[{podSelector: {matchLabels: {mesh: wanted}}, namespaceSelector: {matchLabels: {team: a}}}]";
    let selectors = text.parse().unwrap();
    let (mut pod, mut namespace) = (labelled("none"), namespace("shop"));
    let reason =
        |pod: &Pod, namespace: &Namespace| decide(pod, namespace, true, &policy(&selectors)).reason;
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
fn an_unknown_pod_waits_if_its_namespace_may_be_in_the_mesh() {
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
fn unknown_namespace_labels_matter_only_where_they_decide() {
    let selectors = istio();
    let silent = Inventory {
        namespaces_required: true,
        ..Inventory::default()
    };
    let decided = |inventory: &Inventory, pod: &Pod| {
        decide_from(inventory, pod, &policy(&selectors)).enrollment
    };
    let plain = pod("shop", "web");
    assert_eq!(decided(&silent, &plain), Enrollment::Unknown);
    assert_eq!(decided(&silent, &labelled("ambient")), Enrollment::Ambient);
    // The namespace may demand the mesh.
    assert_eq!(decided(&silent, &labelled("none")), Enrollment::Unknown);
    let excluding = Policy {
        excluded: &["shop".parse().unwrap()],
        ..policy(&selectors)
    };
    let excluded = decide_from(&silent, &plain, &excluding);
    assert_eq!(excluded.enrollment, Enrollment::None);
    // In a complete directory, a namespace without a manifest has no labels.
    assert_eq!(decided(&Inventory::default(), &plain), Enrollment::None);
}
