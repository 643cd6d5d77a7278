//! The injector's manifest: no API permissions, nothing of the node, and Istio's own selection of pods.

use serde_json::{Value, json};

use crate::{list, rights::of_kind, text};

fn only(kind: &str) -> Value {
    let mut found = of_kind("injector", &[kind]);
    assert_eq!(found.len(), 1, "{kind}");
    found.remove(0)
}

#[test]
fn the_injector_has_no_right_no_token_and_nothing_of_the_node() {
    assert!(
        of_kind(
            "injector",
            &["Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"]
        )
        .is_empty()
    );
    assert_eq!(
        only("ServiceAccount")["automountServiceAccountToken"],
        false
    );
    let spec = &only("Deployment")["spec"]["template"]["spec"];
    assert_eq!(spec["automountServiceAccountToken"], false);
    for field in ["hostNetwork", "hostPID", "hostIPC", "initContainers"] {
        assert_eq!(spec[field], Value::Null, "{field}");
    }
    let container = &spec["containers"][0];
    let expected = json!({
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "runAsNonRoot": true,
        "privileged": false,
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    });
    assert_eq!(container["securityContext"], expected);
    for volume in list(spec, "volumes") {
        let kinds = ["emptyDir", "secret", "configMap"];
        assert!(
            kinds.iter().any(|kind| volume.get(*kind).is_some()),
            "{volume}"
        );
    }
}

#[test]
fn the_injectors_own_pods_wait_for_no_injector() {
    let labels = &only("Deployment")["spec"]["template"]["metadata"]["labels"];
    assert_eq!(labels["sidecar.istio.io/inject"], "false");
    for hook in list(&only("MutatingWebhookConfiguration"), "webhooks") {
        let asked = hook["objectSelector"].to_string();
        let is_opt_in = asked.contains("\"In\",\"values\":[\"true\"]");
        let elsewhere = "\"NotIn\",\"values\":[\"inpod-system\"]";
        let is_elsewhere = hook["namespaceSelector"].to_string().contains(elsewhere);
        assert!(
            asked.contains("\"NotIn\",\"values\":[\"false\"]") || is_opt_in || is_elsewhere,
            "{asked}"
        );
    }
}

/// By labels of pod and namespace (services/docs/facts/istio-sidecar.md, 6.1).
#[test]
fn webhooks_select_like_istios_and_pods_that_demand_the_mesh() {
    let is = |key: &str, operator: &str, value: &str| json!({"key": key, "operator": operator, "values": [value]});
    let absent = |key: &str| json!({"key": key, "operator": "DoesNotExist"});
    let elsewhere = is("kubernetes.io/metadata.name", "NotIn", "inpod-system");
    let demand = json!({"key": "inpod.io/require", "operator": "Exists"});
    let (injection, revision, inject) =
        ("istio-injection", "istio.io/rev", "sidecar.istio.io/inject");
    let wanted = [
        (
            "rev.namespace",
            json!([is(revision, "In", "default"), absent(injection)]),
            json!([is(inject, "NotIn", "false")]),
        ),
        (
            "rev.object",
            json!([absent(revision), absent(injection)]),
            json!([is(inject, "NotIn", "false"), is(revision, "In", "default")]),
        ),
        (
            "namespace",
            json!([is(injection, "In", "enabled")]),
            json!([is(inject, "NotIn", "false")]),
        ),
        (
            "object",
            json!([absent(injection), absent(revision)]),
            json!([is(inject, "In", "true"), absent(revision)]),
        ),
        ("gate.namespace", json!([demand, elsewhere]), json!([])),
        (
            "gate.object",
            json!([absent("inpod.io/require"), elsewhere]),
            json!([demand]),
        ),
    ];
    let configuration = only("MutatingWebhookConfiguration");
    let hooks = list(&configuration, "webhooks");
    assert_eq!(hooks.len(), wanted.len());
    for (hook, (name, namespaces, objects)) in hooks.iter().zip(wanted) {
        assert_eq!(text(hook, "/name"), format!("{name}.injector.inpod.io"));
        assert_eq!(
            hook["namespaceSelector"]["matchExpressions"], namespaces,
            "{name}"
        );
        assert_eq!(
            hook["objectSelector"]["matchExpressions"], objects,
            "{name}"
        );
        let fixed = [
            ("sideEffects", "None"),
            ("failurePolicy", "Fail"),
            ("reinvocationPolicy", "Never"),
        ];
        for (field, value) in fixed {
            assert_eq!(hook[field], value, "{name}");
        }
        let is_gate = name.starts_with("gate.");
        let path = if is_gate { "/gate" } else { "/inject" };
        assert_eq!(text(hook, "/clientConfig/service/path"), path, "{name}");
        assert_eq!(hook["rules"][0]["operations"], json!(["CREATE"]), "{name}");
    }
}

#[test]
fn the_service_leads_to_the_webhooks_port_and_the_configuration_is_one() {
    let service = only("Service");
    let port = &service["spec"]["ports"][0];
    assert_eq!(
        (&port["port"], &port["targetPort"]),
        (&json!(443), &json!(15017))
    );
    let labels = &only("Deployment")["spec"]["template"]["metadata"]["labels"];
    assert_eq!(
        labels["app.kubernetes.io/name"],
        service["spec"]["selector"]["app.kubernetes.io/name"]
    );
    let map = only("ConfigMap");
    let config = crate::yaml(map["data"]["inject.yaml"].as_str().unwrap());
    let image = format!(
        "registry.example/inpod/validate:{}",
        env!("CARGO_PKG_VERSION")
    );
    assert_eq!(config["proxy"]["validationImage"], image);
    assert_eq!(config["proxy"]["validationFamily"], "auto");
    assert_eq!(config["revision"], "default");
}
