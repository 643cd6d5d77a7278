use serde_json::json;

use super::*;
use crate::{Config, Injector, Outcome, Request, revert};

fn inject(pod: &Value) -> Value {
    let injector = Injector::new(Config::default()).unwrap();
    let request = Request {
        pod,
        namespace: "shop",
        environment: &[],
    };
    match injector.inject(&request).unwrap() {
        Outcome::Injected { pod, .. } => pod,
        Outcome::Skipped(why) => panic!("{why:?}"),
    }
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "a test hands over what it made"
)]
fn with(container: Value) -> Value {
    json!({"metadata": {"name": "web"}, "spec": {"containers": [container]}})
}

fn excerpt(pod: &Value) -> Value {
    let text = proxy_container(pod).and_then(|it| json::env_value(it, PROBERS));
    serde_json::from_str(text.unwrap_or("null")).unwrap()
}

#[test]
fn probes_of_three_kinds_and_hooks_of_two_are_asked_of_the_agent() {
    let pod = with(json!({
        "name": "app",
        "ports": [{"name": "web", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/ok", "port": "web", "scheme": "HTTPS", "httpHeaders": [{"name": "a", "value": "b"}]}, "timeoutSeconds": 7},
        "livenessProbe": {"tcpSocket": {"port": 8081}, "periodSeconds": 2},
        "startupProbe": {"grpc": {"port": 8082, "service": "x"}},
        "lifecycle": {"preStop": {"httpGet": {"path": "/bye", "port": 8080}}, "postStart": {"exec": {"command": ["x"]}}},
    }));
    let injected = inject(&pod);
    let app = &injected["spec"]["containers"][0];
    let expected = json!({
        "httpGet": {"path": "/app-health/app/readyz", "port": 15020, "scheme": "HTTP", "httpHeaders": [{"name": "a", "value": "b"}]},
        "timeoutSeconds": 7,
    });
    assert_eq!(app["readinessProbe"], expected);
    let expected =
        json!({"httpGet": {"path": "/app-health/app/livez", "port": 15020}, "periodSeconds": 2});
    assert_eq!(app["livenessProbe"], expected);
    assert_eq!(
        app["startupProbe"]["httpGet"]["path"],
        "/app-health/app/startupz"
    );
    assert_eq!(
        app["lifecycle"]["preStop"]["httpGet"]["path"],
        "/app-lifecycle/app/prestopz"
    );
    assert_eq!(
        app["lifecycle"]["postStart"],
        pod["spec"]["containers"][0]["lifecycle"]["postStart"]
    );
    let expected = json!({
        "/app-health/app/readyz": {
            "httpGet": {"path": "/ok", "port": 8080, "scheme": "HTTPS", "httpHeaders": [{"name": "a", "value": "b"}]},
            "timeoutSeconds": 7,
        },
        "/app-health/app/livez": {"tcpSocket": {"port": 8081}},
        "/app-health/app/startupz": {"grpc": {"port": 8082, "service": "x"}},
        "/app-lifecycle/app/prestopz": {"httpGet": {"path": "/bye", "port": 8080}},
    });
    assert_eq!(excerpt(&injected), expected);
    assert_eq!(revert::original_pod(&injected), pod);
}

#[test]
fn a_port_with_an_unknown_name_leaves_its_probe_alone() {
    let probe = json!({"httpGet": {"path": "/", "port": "nobody"}});
    let pod = with(
        json!({"name": "app", "readinessProbe": probe, "livenessProbe": {"tcpSocket": {"port": 1}}}),
    );
    let injected = inject(&pod);
    assert_eq!(injected["spec"]["containers"][0]["readinessProbe"], probe);
    let message = excerpt(&injected);
    assert_eq!(message.as_object().unwrap().len(), 1, "{message}");
}

#[test]
fn a_probe_of_the_agents_own_port_and_one_that_executes_are_left_alone() {
    let pod = with(json!({
        "name": "app",
        "readinessProbe": {"httpGet": {"path": "/healthz/ready", "port": 15020}},
        "livenessProbe": {"exec": {"command": ["true"]}},
    }));
    let injected = inject(&pod);
    assert_eq!(
        injected["spec"]["containers"][0],
        pod["spec"]["containers"][0]
    );
    assert_eq!(excerpt(&injected), Value::Null);
}

#[test]
fn a_pod_may_keep_its_probes_or_have_them_asked_elsewhere() {
    let probe = json!({"httpGet": {"path": "/", "port": 80}});
    let mut pod = with(json!({"name": "app", "readinessProbe": probe}));
    pod["metadata"]["annotations"] = json!({"sidecar.istio.io/rewriteAppHTTPProbers": "false"});
    assert_eq!(
        inject(&pod)["spec"]["containers"][0]["readinessProbe"],
        probe
    );
    pod["metadata"]["annotations"] = json!({"status.sidecar.istio.io/port": "16000"});
    assert_eq!(
        inject(&pod)["spec"]["containers"][0]["readinessProbe"]["httpGet"]["port"],
        16000
    );
    pod["metadata"]["annotations"] = json!({"status.sidecar.istio.io/port": "0"});
    assert_eq!(
        inject(&pod)["spec"]["containers"][0]["readinessProbe"],
        probe
    );
}

#[test]
fn a_second_injection_adds_new_probes_and_keeps_those_of_the_first() {
    let pod =
        with(json!({"name": "app", "readinessProbe": {"httpGet": {"path": "/", "port": 80}}}));
    let mut injected = inject(&pod);
    let more = json!({"name": "late", "livenessProbe": {"tcpSocket": {"port": 9}}});
    injected["spec"]["containers"]
        .as_array_mut()
        .unwrap()
        .push(more);
    let again = inject(&injected);
    let expected = json!({
        "/app-health/app/readyz": {"httpGet": {"path": "/", "port": 80}},
        "/app-health/late/livez": {"tcpSocket": {"port": 9}},
    });
    assert_eq!(excerpt(&again), expected);
    // Without the variable, the entries are computed anew.
    let mut lost = inject(&pod);
    let env = lost
        .pointer_mut("/spec/containers/1/env")
        .unwrap()
        .as_array_mut()
        .unwrap();
    env.retain(|it| it["name"] != PROBERS);
    lost["spec"]["containers"][0]["livenessProbe"] = json!({"tcpSocket": {"port": 5}});
    assert_eq!(
        excerpt(&inject(&lost)),
        json!({"/app-health/app/livez": {"tcpSocket": {"port": 5}}})
    );
}

#[test]
fn unreadable_probes_of_another_injector_are_rejected() {
    let mut pod = with(json!({"name": "app", "readinessProbe": {"httpGet": {"port": 80}}}));
    let proxy = json!({"name": "istio-proxy", "env": [{"name": PROBERS, "value": "{"}]});
    pod["spec"]["containers"]
        .as_array_mut()
        .unwrap()
        .push(proxy);
    let injector = Injector::new(Config::default()).unwrap();
    let request = Request {
        pod: &pod,
        namespace: "shop",
        environment: &[],
    };
    let message = injector.inject(&request).unwrap_err().to_string();
    assert!(message.contains(PROBERS), "{message}");
}
