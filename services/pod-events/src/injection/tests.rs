use serde_json::{Value, json};

use super::*;

const OWN_INIT: &str = "its container istio-init sets up the redirection itself";
const ENVOY_DISABLED: &str = "DISABLE_ENVOY is set: its proxy takes no traffic";
const NO_PROXY: &str = "it has no container istio-proxy";
const OTHER_ROLE: &str = "its proxy does not have the arguments of a sidecar";
const OPTED_OUT: &str = "its label or annotation sidecar.istio.io/inject is false";
const NO_INTERCEPTION: &str = "its annotation sidecar.istio.io/interceptionMode is NONE";

fn injection(change: impl FnOnce(&mut Value)) -> Option<Injection> {
    let mut pod = json!({
        "metadata": {
            "labels": {},
            "annotations": {"sidecar.istio.io/status": "{}"},
        },
        "spec": {
            "initContainers": [{"name": "istio-validation"}],
            "containers": [
                {"name": "app"},
                {
                    "name": "istio-proxy",
                    "args": ["proxy", "sidecar", "--domain"],
                    "env": [],
                    "securityContext": {"runAsUser": 1337, "runAsGroup": 1337},
                },
            ],
        },
    });
    change(&mut pod);
    let pod: k8s::Pod = serde_json::from_value(pod).unwrap();
    let (meta, spec) = (pod.metadata, pod.spec.unwrap());
    Injection::detect(meta.labels.as_ref(), meta.annotations.as_ref(), &spec)
}

fn skip(change: impl FnOnce(&mut Value)) -> Option<&'static str> {
    injection(change).unwrap().skip()
}

fn proxy(pod: &mut Value) -> &mut Value {
    &mut pod["spec"]["containers"][1]
}

fn annotate(pod: &mut Value, name: &str, value: &str) {
    pod["metadata"]["annotations"][name] = value.into();
}

#[test]
fn a_pod_that_was_injected_is_redirected_whatever_the_mark_says() {
    assert_eq!(skip(|_| ()), None);
    assert_eq!(skip(|pod| annotate(pod, keys::SIDECAR_STATUS, "")), None);
    let unmarked = injection(|pod| pod["metadata"]["annotations"] = json!({}));
    assert_eq!(unmarked, None);
}

#[test]
fn a_native_sidecar_is_one() {
    let native = injection(|pod| {
        let mut proxy = proxy(pod).take();
        proxy["restartPolicy"] = "Always".into();
        proxy["securityContext"] = json!({"runAsUser": 5, "runAsGroup": 6});
        pod["spec"]["containers"] = json!([{"name": "app"}]);
        pod["spec"]["initContainers"] = json!([proxy]);
    });
    let native = native.unwrap();
    assert_eq!(native.skip(), None);
    let proxy = native.sidecar().unwrap().proxy;
    assert_eq!((proxy.uid, proxy.gid), (5, 6));
}

#[test]
fn each_condition_leaves_the_pod_alone() {
    for list in ["initContainers", "containers"] {
        let init = |pod: &mut Value| pod["spec"][list][0]["name"] = "istio-init".into();
        assert_eq!(skip(init), Some(OWN_INIT), "{list}");
    }
    let disabled = |value: &'static str| {
        move |pod: &mut Value| {
            proxy(pod)["env"] = json!([{"name": "DISABLE_ENVOY", "value": value}]);
        }
    };
    for (value, skipped) in [
        ("true", true),
        ("1", true),
        ("T", true),
        ("yes", false),
        ("", false),
        ("false", false),
    ] {
        let expected = skipped.then_some(ENVOY_DISABLED);
        assert_eq!(skip(disabled(value)), expected, "{value}");
    }
    let renamed = |pod: &mut Value| proxy(pod)["name"] = "proxy".into();
    assert_eq!(skip(renamed), Some(NO_PROXY));
    for (args, skipped) in [
        (json!(["proxy", "router"]), true),
        (json!(["proxy", "waypoint"]), true),
        (json!(["proxy", "ztunnel", "sidecar"]), true),
        (json!(["proxy", "sidecar"]), false),
        (json!(["proxy"]), false),
        (json!([]), false),
        (json!(null), false),
        (json!(["pilot-agent", "router"]), false),
    ] {
        let expected = skipped.then_some(OTHER_ROLE);
        assert_eq!(
            skip(|pod| proxy(pod)["args"] = args.clone()),
            expected,
            "{args}"
        );
    }
    let none = |pod: &mut Value| annotate(pod, keys::INTERCEPTION_MODE, "NONE");
    assert_eq!(skip(none), Some(NO_INTERCEPTION));
}

#[test]
fn a_pod_opts_out_by_the_one_value_that_the_injector_takes_and_the_label_beats_the_annotation() {
    for (label, annotation, skipped) in [
        (Some("false"), None, true),
        (None, Some("false"), true),
        (Some("true"), Some("false"), false),
        (Some("false"), Some("true"), true),
        (Some(""), Some("false"), false),
        // The injector ignores the following values, and has injected.
        (Some("False"), None, false),
        (Some("0"), None, false),
        (None, Some("f"), false),
    ] {
        let value = skip(|pod| {
            if let Some(label) = label {
                pod["metadata"]["labels"][keys::SIDECAR_INJECT] = label.into();
            }
            if let Some(annotation) = annotation {
                annotate(pod, keys::SIDECAR_INJECT, annotation);
            }
        });
        assert_eq!(
            value,
            skipped.then_some(OPTED_OUT),
            "{label:?} {annotation:?}"
        );
    }
}

#[test]
fn conditions_are_checked_in_order_and_each_is_reported() {
    type Change = fn(&mut Value);
    let conditions: [(Change, &str); 6] = [
        (
            |pod| pod["spec"]["initContainers"][0]["name"] = "istio-init".into(),
            OWN_INIT,
        ),
        (
            |pod| proxy(pod)["env"] = json!([{"name": "DISABLE_ENVOY", "value": "true"}]),
            ENVOY_DISABLED,
        ),
        (
            |pod| proxy(pod)["args"] = json!(["proxy", "router"]),
            OTHER_ROLE,
        ),
        (
            |pod| pod["metadata"]["labels"][keys::SIDECAR_INJECT] = "false".into(),
            OPTED_OUT,
        ),
        (
            |pod| annotate(pod, keys::INTERCEPTION_MODE, "NONE"),
            NO_INTERCEPTION,
        ),
        (|_| (), NO_INTERCEPTION),
    ];
    for first in 0..5 {
        let found = injection(|pod| {
            conditions[first..]
                .iter()
                .for_each(|(change, _)| change(pod));
        });
        let (found, expected) = (found.unwrap(), conditions[first].1);
        assert_eq!(found.skip(), Some(expected));
        let inputs = found.inputs();
        let why = inputs
            .iter()
            .find(|(name, _)| name.starts_with("reason for"));
        assert_eq!(why.unwrap().1, expected);
    }
    // The third condition needs a pod without a proxy.
    let none = skip(|pod| {
        proxy(pod)["name"] = "other".into();
        pod["metadata"]["labels"][keys::SIDECAR_INJECT] = "false".into();
    });
    assert_eq!(none, Some(NO_PROXY));
}

#[test]
fn root_and_an_unspecified_user_run_as_1337() {
    for (context, uid, gid) in [
        (json!({"runAsUser": 2000, "runAsGroup": 3000}), 2000, 3000),
        (json!({"runAsUser": 0, "runAsGroup": 1338}), 1337, 1338),
        (json!({"runAsUser": 7}), 7, 1337),
        (json!({}), 1337, 1337),
        (json!(null), 1337, 1337),
        (
            json!({"runAsUser": -1, "runAsGroup": 4_294_967_296_i64}),
            1337,
            1337,
        ),
    ] {
        let found = injection(|pod| {
            proxy(pod)["securityContext"] = context.clone();
            // The pod's own security context does not count.
            pod["spec"]["securityContext"] = json!({"runAsUser": 9, "runAsGroup": 9});
        });
        let proxy = found.unwrap().sidecar().unwrap().proxy;
        assert_eq!((proxy.uid, proxy.gid), (uid, gid), "{context}");
    }
}

#[test]
fn truth_values_of_the_proxy_are_gos_and_the_last_of_a_name_counts() {
    let dns = |env: Value| {
        let found = injection(|pod| proxy(pod)["env"] = env);
        found.unwrap().sidecar().unwrap().proxy.dns
    };
    let one = |value: &str| json!([{"name": "ISTIO_META_DNS_CAPTURE", "value": value}]);
    for (text, is_true) in [
        ("true", true),
        ("1", true),
        ("TRUE", true),
        ("on", false),
        ("", false),
    ] {
        assert_eq!(dns(one(text)), is_true, "{text}");
    }
    let twice = json!([
        {"name": "ISTIO_META_DNS_CAPTURE", "value": "true"},
        {"name": "ISTIO_META_DNS_CAPTURE", "value": "false"},
    ]);
    assert!(!dns(twice));
    let from = json!([{"name": "ISTIO_META_DNS_CAPTURE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]);
    assert!(!dns(from));
    let drops =
        injection(|pod| proxy(pod)["env"] = json!([{"name": "INVALID_DROP", "value": "t"}]));
    assert!(drops.unwrap().sidecar().unwrap().proxy.drop_invalid);
}

#[test]
fn what_is_malformed_is_reported_where_it_would_be_redirected() {
    let ports = keys::SIDECAR_EXCLUDE_INBOUND_PORTS;
    let malformed = |mode| {
        let found = injection(|pod| {
            annotate(pod, ports, "http");
            annotate(pod, keys::INTERCEPTION_MODE, mode);
        });
        let inputs = found.unwrap().inputs();
        inputs.into_iter().find(|(name, _)| name.ends_with(ports))
    };
    let (_, why) = malformed("REDIRECT").unwrap();
    assert!(
        why.starts_with("malformed") && why.contains("http"),
        "{why}"
    );
    assert_eq!(malformed("NONE"), None);
}
