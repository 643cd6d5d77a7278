use json_patch::Patch;
use serde_json::Value;

use super::*;

fn injector() -> Injector {
    Injector::new(inpod_injection::Config::default()).unwrap()
}

fn review(version: &str, object: &Value) -> Value {
    json!({
        "apiVersion": format!("admission.k8s.io/{version}"),
        "kind": "AdmissionReview",
        "request": {
            "uid": "u-1",
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "shop",
            "operation": "CREATE",
            "object": object,
        },
    })
}

fn pod() -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": {"containers": [{"name": "app", "image": "a"}]}})
}

fn answer_to(review: &Value) -> (Value, Outcome) {
    let answer = answer(
        &injector(),
        &Change::Inject(Vec::new()),
        review.to_string().as_bytes(),
    );
    (serde_json::from_str(&answer.body).unwrap(), answer.outcome)
}

fn gate(pod: &Value) -> (Value, Outcome) {
    let review = review("v1", pod).to_string();
    let answer = answer(&injector(), &Change::Gate, review.as_bytes());
    (serde_json::from_str(&answer.body).unwrap(), answer.outcome)
}

fn apply(answer: &Value, pod: &Value) -> Value {
    let patch = STANDARD
        .decode(answer["response"]["patch"].as_str().unwrap())
        .unwrap();
    let patch: Patch = serde_json::from_slice(&patch).unwrap();
    let mut pod = pod.clone();
    json_patch::patch(&mut pod, &patch.0).unwrap();
    pod
}

#[test]
fn a_review_is_answered_with_its_uid_and_a_patch() {
    let (answer, outcome) = answer_to(&review("v1", &pod()));
    assert_eq!(outcome, Outcome::Injected);
    assert_eq!(answer["apiVersion"], "admission.k8s.io/v1");
    assert_eq!(answer["kind"], "AdmissionReview");
    let response = &answer["response"];
    assert_eq!(
        (&response["uid"], &response["allowed"]),
        (&json!("u-1"), &json!(true))
    );
    assert_eq!(response["patchType"], "JSONPatch");
    let names = apply(&answer, &pod())["spec"]["containers"].clone();
    assert_eq!(names[1]["name"], "istio-proxy");
}

#[test]
fn a_pod_gets_the_readiness_gate_once_and_keeps_its_own() {
    let own = json!({"conditionType": "example.com/warm"});
    for gates in [json!([]), json!([own])] {
        let mut pod = pod();
        pod["spec"]["readinessGates"] = gates.clone();
        let (answer, outcome) = gate(&pod);
        assert_eq!(outcome, Outcome::Gated);
        let gated = apply(&answer, &pod);
        let mut expected = gates.as_array().unwrap().clone();
        expected.push(json!({"conditionType": "inpod.io/InMesh"}));
        assert_eq!(gated["spec"]["readinessGates"], json!(expected));
        let (again, outcome) = gate(&gated);
        assert_eq!(outcome, Outcome::Unchanged);
        assert_eq!(again["response"]["patch"], Value::Null);
    }
    let (answer, _) = gate(&pod());
    let gated = apply(&answer, &pod());
    assert_eq!(gated["spec"]["readinessGates"].as_array().unwrap().len(), 1);
    assert_eq!(gated["spec"]["containers"], pod()["spec"]["containers"]);
}

#[test]
fn a_second_review_of_the_same_pod_changes_nothing() {
    let (answer, _) = answer_to(&review("v1", &pod()));
    let (again, outcome) = answer_to(&review("v1", &apply(&answer, &pod())));
    assert_eq!(outcome, Outcome::Unchanged);
    assert_eq!(again["response"], json!({"uid": "u-1", "allowed": true}));
}

#[test]
fn a_pod_that_opts_out_is_allowed_whatever_is_in_it() {
    let mut odd = pod();
    odd["metadata"]["labels"] = json!({"sidecar.istio.io/inject": "false"});
    odd["metadata"]["annotations"] =
        json!({"sidecar.istio.io/proxyCPU": "nonsense", "sidecar.istio.io/interceptionMode": "x"});
    odd["spec"]["containers"] = json!("none");
    let (answer, outcome) = answer_to(&review("v1", &odd));
    assert_eq!(outcome, Outcome::Skipped(SkipReason::OptedOut));
    assert_eq!(answer["response"], json!({"uid": "u-1", "allowed": true}));
}

#[test]
fn a_pod_that_cannot_be_injected_is_refused_with_the_field() {
    let mut wrong = pod();
    wrong["metadata"]["annotations"] = json!({"sidecar.istio.io/proxyCPU": "nonsense"});
    let (answer, outcome) = answer_to(&review("v1", &wrong));
    assert_eq!(outcome, Outcome::Refused);
    let message = answer["response"]["status"]["message"].as_str().unwrap();
    assert!(
        message.contains("sidecar.istio.io/proxyCPU") && answer["response"]["allowed"] == false,
        "{message}"
    );
}

#[test]
fn what_is_not_a_new_pod_is_allowed_with_a_warning() {
    let change = |pointer: &str, value: Value| {
        let mut review = review("v1", &pod());
        *review.pointer_mut(pointer).unwrap() = value;
        review
    };
    let mut part = review("v1", &pod());
    part["request"]["subResource"] = "ephemeralcontainers".into();
    for other in [
        change("/request/operation", "UPDATE".into()),
        change("/request/resource/resource", "deployments".into()),
        change("/request/resource/group", "apps".into()),
        part,
    ] {
        let (answer, outcome) = answer_to(&other);
        assert_eq!(outcome, Outcome::OtherKind);
        assert!(answer["response"]["allowed"] == true && answer["response"]["warnings"].is_array());
    }
}

#[test]
fn what_is_no_review_is_answered_with_what_is_wrong() {
    let wrong_version = review("v1beta1", &pod());
    let mut wrong_kind = review("v1", &pod());
    wrong_kind["kind"] = "Pod".into();
    let nothing = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"});
    let bodies = [
        b"\xff\xfe".to_vec(),
        b"[[[[".to_vec(),
        b"{}".to_vec(),
        b"null".to_vec(),
        br#"{"request": 3}"#.to_vec(),
        wrong_version.to_string().into_bytes(),
        wrong_kind.to_string().into_bytes(),
        nothing.to_string().into_bytes(),
        // The body is nested deeper than any pod.
        format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)).into_bytes(),
    ];
    for body in bodies {
        let answer = answer(&injector(), &Change::Inject(Vec::new()), &body);
        assert_eq!(answer.outcome, Outcome::Undecodable);
        let response: Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!(response["response"]["allowed"], false);
        let message = response["response"]["status"]["message"].as_str().unwrap();
        assert!(!message.is_empty() && message.len() < 500, "{message}");
    }
}

#[test]
fn a_pod_that_is_none_is_refused_and_no_panic() {
    for odd in [
        json!(null),
        json!(3),
        json!({}),
        json!({"spec": {"containers": [3]}}),
        json!({"metadata": [], "spec": {"containers": [{"name": "a"}]}}),
    ] {
        let (answer, outcome) = answer_to(&review("v1", &odd));
        assert_eq!(
            (outcome, &answer["response"]["allowed"]),
            (Outcome::Refused, &json!(false)),
            "{odd}"
        );
    }
}

#[test]
fn the_webhooks_path_names_cluster_and_network() {
    let body = review("v1", &pod()).to_string();
    let change = crate::path::change("/inject/cluster/far/net/n1").unwrap();
    let answer = answer(&injector(), &change, body.as_bytes());
    let response: Value = serde_json::from_str(&answer.body).unwrap();
    let pod = apply(&response, &pod());
    assert_eq!(pod["metadata"]["labels"]["topology.istio.io/network"], "n1");
    let env = pod["spec"]["containers"][1]["env"].as_array().unwrap();
    assert!(env.contains(&json!({"name": "ISTIO_META_CLUSTER_ID", "value": "far"})));
}
