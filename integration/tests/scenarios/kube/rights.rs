//! With the chart's roles, policy and a node's token, pod-events may change one annotation and one condition of the node's
//! pods and report Events about pods, nothing else.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::ensure;
use integration::{ApiServer, eventually};
use serde_json::{Value, json};

static NEXT: AtomicU32 = AtomicU32::new(1);

/// Until a new server enforces a policy on a busy machine.
const IN_FORCE: Duration = Duration::from_secs(120);

const PATCH: (&str, &str) = ("PATCH", "application/merge-patch+json");

/// A node's token, a namespace, and the node's pod.
struct Agent {
    server: Arc<ApiServer>,
    token: String,
    node: String,
    namespace: String,
}

impl Agent {
    fn new() -> Self {
        let server = ApiServer::shared().unwrap();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let (node, namespace) = (format!("rights-{number}"), format!("rights-{number}"));
        let object =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        server.create("/api/v1/namespaces", &object).unwrap();
        let token = server.token(&node).unwrap();
        let agent = Self {
            server,
            token,
            node,
            namespace,
        };
        agent.make_pod("web", &agent.node);
        eventually("the policy is in force", IN_FORCE, || {
            // A change without effect is allowed: each value differs.
            let value = NEXT.fetch_add(1, Ordering::Relaxed).to_string();
            let probe = agent.status("web", &annotation("probe", Some(&value)));
            ensure!(probe.is_err(), "not yet");
            anyhow::Ok(())
        })
        .unwrap();
        let clean = json!({"metadata": {"annotations": {"probe": null}}});
        agent.server.patch(&agent.path("web"), &clean).unwrap();
        agent
    }

    fn make_pod(&self, name: &str, node: &str) {
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, "annotations": {"mine": "1"}},
            "spec": {"nodeName": node, "containers": [{"name": "app", "image": "app"}]},
        });
        let path = format!("/api/v1/namespaces/{}/pods", self.namespace);
        self.server.create(&path, &pod).unwrap();
    }

    fn path(&self, name: &str) -> String {
        format!("/api/v1/namespaces/{}/pods/{name}", self.namespace)
    }

    fn status(&self, name: &str, change: &Value) -> anyhow::Result<Value> {
        let path = format!("{}/status", self.path(name));
        self.server.ask_as(&self.token, PATCH, &path, change)
    }

    /// Expects the policy's refusal with this text.
    fn refuses(&self, name: &str, change: &Value, words: &str) {
        let refused = self.status(name, change).unwrap_err().to_string();
        assert!(refused.contains(words), "{change}: {refused}");
    }

    fn event(&self, change: &Value) -> anyhow::Result<Value> {
        self.event_in(&self.namespace, change)
    }

    fn event_in(&self, namespace: &str, change: &Value) -> anyhow::Result<Value> {
        let name = format!("web.{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let mut event = json!({
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": self.namespace},
            "eventTime": "2026-01-01T00:00:00.000000Z",
            "reportingController": "inpod.io/pod-events",
            "reportingInstance": self.node,
            "action": "Redirect",
            "reason": "ZtunnelRefused",
            "type": "Warning",
            "regarding": {"apiVersion": "v1", "kind": "Pod", "name": "web", "namespace": self.namespace},
        });
        let more = change.as_object().unwrap().clone();
        event.as_object_mut().unwrap().extend(more);
        let path = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events");
        let how = ("POST", "application/json");
        self.server.ask_as(&self.token, how, &path, &event)
    }
}

fn annotation(key: &str, value: Option<&str>) -> Value {
    json!({"metadata": {"annotations": {key: value}}})
}

fn redirection(value: Option<&str>) -> Value {
    annotation("ambient.istio.io/redirection", value)
}

#[test]
fn the_annotation_of_a_pod_of_the_node_is_set_changed_and_removed() {
    let agent = Agent::new();
    for value in [Some("pending"), Some("enabled"), None] {
        let pod = agent.status("web", &redirection(value)).unwrap();
        let found = pod.pointer("/metadata/annotations/ambient.istio.io~1redirection");
        assert_eq!(found.and_then(Value::as_str), value);
    }
}

#[test]
fn a_pod_of_another_node_is_refused() {
    let agent = Agent::new();
    agent.make_pod("far", "another-node");
    agent.refuses("far", &redirection(Some("enabled")), "its own node only");
}

#[test]
fn a_token_that_names_no_node_changes_nothing() {
    let agent = Agent::new();
    let path = "/api/v1/namespaces/inpod-system/serviceaccounts/pod-events/token";
    let request =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
    let answer = agent.server.create(path, &request).unwrap();
    let token = answer.pointer("/status/token").and_then(Value::as_str);
    let path = format!("{}/status", agent.path("web"));
    let change = redirection(Some("enabled"));
    let refused = agent.server.ask_as(token.unwrap(), PATCH, &path, &change);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("must name that node"), "{refused}");
}

#[test]
fn another_annotation_is_neither_set_nor_changed_nor_removed() {
    let agent = Agent::new();
    let words = "no annotation but";
    agent.refuses(
        "web",
        &annotation("sidecar.istio.io/status", Some("{}")),
        words,
    );
    agent.refuses("web", &annotation("mine", Some("2")), words);
    agent.refuses("web", &annotation("mine", None), words);
}

#[test]
fn another_value_of_the_annotation_is_refused() {
    let agent = Agent::new();
    agent.refuses("web", &redirection(Some("disabled")), "enabled or pending");
}

#[test]
fn labels_finalizers_owners_and_status_are_refused() {
    let agent = Agent::new();
    for change in [
        json!({"metadata": {"labels": {"app": "bank"}}}),
        json!({"metadata": {"finalizers": ["example.com/stay"]}}),
    ] {
        agent.refuses("web", &change, "nothing of a pod but an annotation");
    }
    for status in [
        json!({"phase": "Failed"}),
        json!({"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}),
        json!({"conditions": [{"type": "Ready", "status": "True"}]}),
    ] {
        let words = "nothing of a pod's status but the condition";
        agent.refuses("web", &json!({"status": status}), words);
    }
}

/// Returns a strategic merge patch of a pod's conditions, which merges by type.
fn conditions(all: &Value) -> ((&'static str, &'static str), Value) {
    let how = ("PATCH", "application/strategic-merge-patch+json");
    (how, json!({"status": {"conditions": all}}))
}

#[test]
fn only_the_condition_of_the_mesh_is_set_changed_and_removed() {
    let agent = Agent::new();
    let path = format!("{}/status", agent.path("web"));
    let ready = conditions(&json!([{"type": "Ready", "status": "False"}]));
    let as_kubelet = agent.server.ask_as("admin", ready.0, &path, &ready.1);
    as_kubelet.unwrap();
    let ask = |all: Value| {
        let (how, change) = conditions(&all);
        agent.server.ask_as(&agent.token, how, &path, &change)
    };
    let kind = "inpod.io/InMesh";
    for status in ["False", "True"] {
        let pod = ask(json!([{"type": kind, "status": status}])).unwrap();
        let all = pod["status"]["conditions"].as_array().unwrap();
        let shown = |of: &str| all.iter().find(|it| it["type"] == of).unwrap()["status"].clone();
        assert_eq!(shown(kind), status);
        assert_eq!(shown("Ready"), "False");
        for other in [
            json!([{"type": "Ready", "status": "True"}]),
            json!([{"type": "Ready", "$patch": "delete"}]),
            json!([{"type": "example.com/Other", "status": "True"}]),
            json!([{"type": kind, "status": "Unknown"}, {"type": "Ready", "status": "True"}]),
        ] {
            let refused = ask(other.clone()).unwrap_err().to_string();
            let words = "nothing of a pod's status but the condition";
            assert!(refused.contains(words), "{other}: {refused}");
        }
    }
    let pod = ask(json!([{"type": kind, "$patch": "delete"}])).unwrap();
    assert_eq!(pod["status"]["conditions"].as_array().unwrap().len(), 1);
}

#[test]
fn the_spec_is_out_of_reach() {
    let agent = Agent::new();
    let change = json!({"spec": {"activeDeadlineSeconds": 1}});
    // The server drops other changes through the status.
    let pod = agent.status("web", &change).unwrap();
    assert_eq!(pod.pointer("/spec/activeDeadlineSeconds"), None);
    for change in [change, redirection(Some("enabled"))] {
        let path = agent.path("web");
        let refused = agent.server.ask_as(&agent.token, PATCH, &path, &change);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("cannot patch resource"), "{refused}");
    }
}

#[test]
fn events_are_about_pods_of_their_namespace_and_say_whose_they_are() {
    let agent = Agent::new();
    agent.event(&json!({})).unwrap();
    let about = |kind: &str, namespace: &str| json!({"regarding": {"apiVersion": "v1", "kind": kind, "name": "web", "namespace": namespace}});
    for (change, words) in [
        (about("Service", &agent.namespace), "are about pods"),
        (
            json!({"reportingController": "example.com/other"}),
            "say that they are its",
        ),
    ] {
        let refused = agent.event(&change).unwrap_err().to_string();
        assert!(refused.contains(words), "{refused}");
    }
    // The server requires agreeing namespaces.
    assert!(agent.event(&about("Pod", "default")).is_err());
}

#[test]
fn events_are_about_the_node_of_the_token_and_no_other_node() {
    let agent = Agent::new();
    let about = |node: &str| {
        json!({
            "metadata": {"name": format!("node.{}", NEXT.fetch_add(1, Ordering::Relaxed))},
            "regarding": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        })
    };
    agent.event_in("default", &about(&agent.node)).unwrap();
    for (namespace, node) in [("default", "another-node"), ("kube-system", &agent.node)] {
        let refused = agent.event_in(namespace, &about(node));
        assert!(refused.is_err(), "{namespace} {node}");
    }
}

#[test]
fn whoever_is_not_pod_events_is_not_held_by_the_policy() {
    let agent = Agent::new();
    let change = json!({"metadata": {"labels": {"app": "bank"}}, "status": {"phase": "Running"}});
    let path = format!("{}/status", agent.path("web"));
    agent.server.patch(&path, &change).unwrap();
}

#[test]
fn the_broker_has_no_rights_and_mounts_no_token() {
    let server = ApiServer::shared().unwrap();
    let account = "/api/v1/namespaces/inpod-system/serviceaccounts/ztunnel-broker";
    let account = server.get(account).unwrap();
    assert_eq!(account["automountServiceAccountToken"], false, "{account}");
    for (verb, resource) in [("get", "pods"), ("list", "secrets"), ("patch", "pods")] {
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": "system:serviceaccount:inpod-system:ztunnel-broker",
                "resourceAttributes": {"verb": verb, "resource": resource, "namespace": "default"},
            },
        });
        let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
        let answer = server.create(path, &review).unwrap();
        assert_eq!(answer["status"]["allowed"], false, "{verb} {resource}");
    }
}
