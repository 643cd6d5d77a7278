use serde_json::json;

use super::*;

#[expect(
    clippy::needless_pass_by_value,
    reason = "a test hands over what it made"
)]
fn merged(mut base: Value, over: Value) -> Value {
    merge(&mut base, &over);
    base
}

#[test]
fn items_are_matched_by_the_merge_keys_of_kubernetes() {
    let base = json!({
        "containers": [{"name": "app", "image": "a"}],
        "env": [{"name": "A", "value": "1"}],
        "ports": [{"containerPort": 53, "protocol": "UDP"}],
        "volumeMounts": [{"mountPath": "/x", "name": "v"}],
    });
    let over = json!({
        "containers": [{"name": "app", "tty": true}, {"name": "more"}],
        "env": [{"name": "A", "value": "2"}],
        "ports": [{"containerPort": 53}, {"containerPort": 53, "protocol": "UDP", "name": "dns"}],
        "volumeMounts": [{"mountPath": "/x", "readOnly": true}],
    });
    let expected = json!({
        "containers": [{"name": "app", "image": "a", "tty": true}, {"name": "more"}],
        "env": [{"name": "A", "value": "2"}],
        "ports": [{"containerPort": 53, "protocol": "UDP", "name": "dns"}, {"containerPort": 53}],
        "volumeMounts": [{"mountPath": "/x", "name": "v", "readOnly": true}],
    });
    assert_eq!(merged(base, over), expected);
}

#[test]
fn a_port_without_a_protocol_is_of_tcp() {
    let base = json!({"ports": [{"containerPort": 80, "protocol": "TCP"}]});
    let over = json!({"ports": [{"containerPort": 80, "name": "http"}]});
    let expected = json!({"ports": [{"containerPort": 80, "protocol": "TCP", "name": "http"}]});
    assert_eq!(merged(base, over), expected);
}

#[test]
fn what_has_one_of_several_forms_never_has_two() {
    let base = json!({
        "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "livenessProbe": {"httpGet": {"path": "/"}, "periodSeconds": 3},
    });
    let over = json!({
        "env": [{"name": "A", "value": "1"}],
        "volumes": [{"name": "v", "configMap": {"name": "c"}}],
        "livenessProbe": {"exec": {"command": ["x"]}},
    });
    let expected = json!({
        "env": [{"name": "A", "value": "1"}],
        "volumes": [{"name": "v", "configMap": {"name": "c"}}],
        "livenessProbe": {"exec": {"command": ["x"]}, "periodSeconds": 3},
    });
    assert_eq!(merged(base, over), expected);
}

#[test]
fn null_and_directives_take_away_and_replace() {
    let base = json!({
        "securityContext": {"runAsUser": 1, "privileged": true},
        "affinity": {"nodeAffinity": 1},
        "containers": [{"name": "a"}, {"name": "b", "args": ["1"]}],
        "dnsPolicy": "None",
    });
    let over = json!({
        "securityContext": {"$patch": "replace", "runAsUser": 2},
        "affinity": {"$patch": "delete"},
        "containers": [{"name": "a", "$patch": "delete"}, {"name": "b", "args": null}, {"name": "z", "$patch": "delete"}],
        "dnsPolicy": null,
    });
    let expected = json!({"securityContext": {"runAsUser": 2}, "containers": [{"name": "b"}]});
    assert_eq!(merged(base, over), expected);
}

#[test]
fn nothing_of_a_directive_is_left_in_what_is_new() {
    let over =
        json!({"spec": {"x": {"$patch": "replace", "a": [{"$patch": "delete"}, {"b": null}]}}});
    assert_eq!(merged(json!({}), over), json!({"spec": {"x": {"a": [{}]}}}));
}

#[test]
fn a_list_that_is_none_gives_way() {
    let over = json!({"containers": [{"name": "a"}]});
    assert_eq!(merged(json!({"containers": null}), over.clone()), over);
    assert_eq!(merged(json!({"containers": 3}), over.clone()), over);
    assert_eq!(merged(json!(null), over.clone()), over);
}

#[test]
fn what_the_api_server_has_filled_in_stays() {
    let base = json!({
        "volumes": [{"name": "v", "downwardAPI": {"defaultMode": 420, "items": [{"path": "a", "fieldRef": {"apiVersion": "v1", "fieldPath": "x"}}]}}],
        "env": [{"name": "A", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "x"}}}],
    });
    let over = json!({
        "volumes": [{"name": "v", "downwardAPI": {"items": [{"path": "a", "fieldRef": {"fieldPath": "x"}}]}}],
        "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
    });
    assert_eq!(merged(base.clone(), over), base);
}
