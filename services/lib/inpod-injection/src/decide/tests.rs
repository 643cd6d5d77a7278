use serde_json::json;

use super::*;
use crate::Config;

fn pod(label: Option<&str>, annotation: Option<&str>) -> Value {
    let mut pod = json!({"metadata": {"labels": {"app": "web"}, "annotations": {}}, "spec": {}});
    if let Some(requested) = label {
        pod["metadata"]["labels"][keys::SIDECAR_INJECT] = requested.into();
    }
    if let Some(requested) = annotation {
        pod["metadata"]["annotations"][keys::SIDECAR_INJECT] = requested.into();
    }
    pod
}

fn config(text: &str) -> Config {
    Config::parse(text).unwrap()
}

const NEVER: &str = "neverInjectSelector: [{matchLabels: {app: web}}]";
const ALWAYS: &str = "alwaysInjectSelector: [{matchExpressions: [{key: app, operator: Exists}]}]";

/// The cases are Istio's own policy matrix (services/docs/facts/istio-sidecar.md, 10.1): configuration, label,
/// annotation, outcome.
#[test]
fn labels_of_the_pod_beat_selectors_which_beat_the_policy() {
    use Decision::{Inject, Skip};
    use SkipReason::{NeverSelected, OptedOut, Policy};
    let disabled_always = format!("policy: disabled\n{ALWAYS}");
    let both = format!("{NEVER}\n{ALWAYS}");
    let rows: &[(&str, Option<&str>, Option<&str>, Decision)] = &[
        ("policy: enabled", None, None, Inject),
        ("policy: enabled", None, Some("false"), Skip(OptedOut)),
        ("policy: enabled", Some("false"), None, Skip(OptedOut)),
        (
            "policy: enabled",
            Some("false"),
            Some("true"),
            Skip(OptedOut),
        ),
        ("policy: enabled", Some("true"), Some("false"), Inject),
        ("policy: disabled", None, None, Skip(Policy)),
        ("policy: disabled", None, Some("true"), Inject),
        ("policy: disabled", Some("true"), None, Inject),
        ("policy: disabled", Some("true"), Some("false"), Inject),
        ("policy: enabled", Some("yes"), None, Inject),
        ("policy: disabled", Some("yes"), None, Skip(Policy)),
        ("policy: disabled", Some("True"), None, Skip(Policy)),
        ("policy: enabled", Some(""), Some("false"), Inject),
        (NEVER, None, None, Skip(NeverSelected)),
        (NEVER, Some("true"), None, Inject),
        (NEVER, Some("on"), None, Skip(NeverSelected)),
        (&disabled_always, None, None, Inject),
        (&disabled_always, Some("false"), None, Skip(OptedOut)),
        (&both, None, None, Skip(NeverSelected)),
        ("neverInjectSelector: [{}]", None, None, Inject),
        (
            "policy: disabled\nalwaysInjectSelector: [{}]",
            None,
            None,
            Skip(Policy),
        ),
    ];
    for (text, label, annotation, expected) in rows {
        let found = decide(&config(text), &pod(*label, *annotation), "shop");
        assert_eq!(found, *expected, "{text} {label:?} {annotation:?}");
    }
}

#[test]
fn host_network_and_the_systems_namespaces_come_first() {
    let mut host = pod(Some("true"), None);
    host["spec"]["hostNetwork"] = true.into();
    let config = Config::default();
    assert_eq!(
        decide(&config, &host, "shop"),
        Decision::Skip(SkipReason::HostNetwork)
    );
    for namespace in SYSTEM_NAMESPACES {
        let found = decide(&config, &pod(Some("true"), None), namespace);
        assert_eq!(found, Decision::Skip(SkipReason::SystemNamespace));
    }
    let mut own = pod(Some("true"), None);
    own["metadata"]["namespace"] = "kube-system".into();
    assert_eq!(
        decide(&config, &own, "shop"),
        Decision::Skip(SkipReason::SystemNamespace)
    );
}

#[test]
fn what_is_no_pod_asks_for_nothing_and_is_no_trouble() {
    let off = config("policy: disabled");
    for odd in [
        json!(null),
        json!(7),
        json!([]),
        json!({"metadata": 3, "spec": "x"}),
    ] {
        assert_eq!(decide(&off, &odd, ""), Decision::Skip(SkipReason::Policy));
    }
}
