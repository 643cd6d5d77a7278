//! `decide::tests::oracle` compares the conditions on random pods with the reference, but not which one is reported.

use serde_json::{Value, json};

use super::*;

fn injection(change: impl FnOnce(&mut Value)) -> Option<Injection> {
    let mut pod = json!({
        "metadata": {"labels": {}, "annotations": {"sidecar.istio.io/status": "{}"}},
        "spec": {"containers": [{"name": "app"}, {"name": "istio-proxy"}]},
    });
    change(&mut pod);
    let pod: k8s::Pod = serde_json::from_value(pod).unwrap();
    let (meta, spec) = (pod.metadata, pod.spec.unwrap());
    Injection::detect(meta.labels.as_ref(), meta.annotations.as_ref(), &spec)
}

fn proxy(pod: &mut Value) -> &mut Value {
    &mut pod["spec"]["containers"][1]
}

fn annotate(pod: &mut Value, name: &str, value: &str) {
    pod["metadata"]["annotations"][name] = value.into();
}

#[test]
fn conditions_are_checked_in_order_and_each_is_reported() {
    type Change = fn(&mut Value);
    let conditions: [(Change, &str); 5] = [
        (
            |pod| pod["spec"]["containers"][0]["name"] = "istio-init".into(),
            "its container istio-init sets up the redirection itself",
        ),
        (
            |pod| proxy(pod)["env"] = json!([{"name": "DISABLE_ENVOY", "value": "true"}]),
            "DISABLE_ENVOY is set: its proxy takes no traffic",
        ),
        (
            |pod| proxy(pod)["args"] = json!(["proxy", "router"]),
            "its proxy does not have the arguments of a sidecar",
        ),
        (
            |pod| pod["metadata"]["labels"][keys::SIDECAR_INJECT] = "false".into(),
            "its label or annotation sidecar.istio.io/inject is false",
        ),
        (
            |pod| annotate(pod, keys::INTERCEPTION_MODE, "NONE"),
            "its annotation sidecar.istio.io/interceptionMode is NONE",
        ),
    ];
    for (first, (_, expected)) in conditions.iter().enumerate() {
        let later = &conditions[first..];
        let found = injection(|pod| later.iter().for_each(|(change, _)| change(pod)));
        let found = found.unwrap();
        assert_eq!(found.skip(), Some(*expected));
        let inputs = found.inputs();
        let mut reasons = inputs.iter().filter(|(name, _)| name.starts_with("reason"));
        assert_eq!(reasons.next().unwrap().1, *expected);
    }
    // The third condition needs a pod without a proxy.
    let none = injection(|pod| {
        proxy(pod)["name"] = "other".into();
        pod["metadata"]["labels"][keys::SIDECAR_INJECT] = "false".into();
    });
    assert_eq!(
        none.unwrap().skip(),
        Some("it has no container istio-proxy")
    );
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
