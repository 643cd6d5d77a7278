use serde_json::{Value, json};

use super::*;

fn usual() -> Criteria {
    Criteria {
        annotation: Some("sidecar.istio.io/status".to_owned()),
        container: Some("istio-validation".to_owned()),
        message: None,
        exit_code: Some(126),
    }
}

fn terminated(code: i32, reason: &str, message: &str) -> Value {
    let state = json!({"exitCode": code, "reason": reason, "message": message, "startedAt": "2026-01-01T00:00:10Z"});
    json!({"terminated": state})
}

fn status(name: &str, state: &Value, last: &Value) -> Value {
    json!({"name": name, "image": "i", "imageID": "", "ready": false, "restartCount": 1, "state": state, "lastState": last})
}

fn pod(annotations: &Value, statuses: &[Value]) -> Pod {
    serde_json::from_value(json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web", "namespace": "shop", "annotations": annotations},
        "status": {"initContainerStatuses": statuses},
    }))
    .unwrap()
}

const NAME: &str = "istio-validation";

/// Returns an injected pod as the kubelet reports the pod between two attempts.
fn injected(name: &str, state: &Value, last: &Value) -> Pod {
    pod(
        &json!({"sidecar.istio.io/status": "{}"}),
        &[status(name, state, last)],
    )
}

fn waiting(reason: &str) -> Value {
    json!({"waiting": {"reason": reason}})
}

fn failed() -> Value {
    terminated(126, "Error", " redirection is missing\n")
}

/// Each row has the current state, the last state, and whether the pod counts as broken.
#[test]
fn every_state_of_the_container_is_decided_as_in_the_reference() {
    let runs = || json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}});
    let (nothing, done) = (|| json!({}), || terminated(0, "Completed", ""));
    let code = |code| terminated(code, "Error", "");
    let rows = [
        (waiting("CrashLoopBackOff"), failed(), true),
        (waiting("PodInitializing"), failed(), true),
        (runs(), failed(), true),
        (failed(), failed(), true),
        (nothing(), failed(), true),
        // The container has succeeded since, as either sign shows.
        (done(), failed(), false),
        (terminated(126, "Completed", ""), failed(), false),
        (code(0), failed(), false),
        // The container failed once and was not restarted, or never failed.
        (failed(), nothing(), false),
        (runs(), nothing(), false),
        // The container failed for another reason.
        (waiting("CrashLoopBackOff"), code(1), false),
        (waiting("CrashLoopBackOff"), done(), false),
    ];
    for (now, last, wanted) in rows {
        let found = usual().find(&injected(NAME, &now, &last));
        assert_eq!(found.is_some(), wanted, "{now} after {last}");
    }
}

#[test]
fn every_setting_is_heeded_and_none_means_any() {
    let found = |criteria: Criteria, pod: &Pod| criteria.find(pod).is_some();
    let waits = waiting("CrashLoopBackOff");
    let bare = pod(&json!({}), &[status(NAME, &waits, &failed())]);
    assert!(!found(usual(), &bare));
    let any = Criteria {
        annotation: None,
        ..usual()
    };
    assert!(found(any, &bare));
    let other = injected("init-db", &waits, &failed());
    assert!(!found(usual(), &other));
    let any = Criteria {
        container: None,
        ..usual()
    };
    assert!(found(any, &other));
    let one = injected(NAME, &waits, &terminated(1, "Error", ""));
    let any = Criteria {
        exit_code: None,
        ..usual()
    };
    assert!(found(any, &one));
    let saying = |words: &str| Criteria {
        message: Some(words.to_owned()),
        ..usual()
    };
    let usual = injected(NAME, &waits, &failed());
    assert!(found(saying("redirection is missing"), &usual));
    assert!(!found(saying("redirection"), &usual));
    let silent = json!({"terminated": {"exitCode": 126}});
    assert!(!found(saying("x"), &injected(NAME, &waits, &silent)));
}

#[test]
fn a_pod_without_init_containers_is_not_broken() {
    let annotations = json!({"sidecar.istio.io/status": ""});
    assert_eq!(usual().find(&pod(&annotations, &[])), None);
}

#[test]
fn a_pod_without_a_status_is_not_broken() {
    let mut pod = injected(NAME, &json!({}), &terminated(126, "Error", ""));
    pod.status = None;
    assert_eq!(usual().find(&pod), None);
}

#[test]
fn one_of_several_containers_is_enough_and_is_named_with_its_start() {
    let annotations = json!({"sidecar.istio.io/status": "{}"});
    let waits = json!({"waiting": {"reason": "CrashLoopBackOff"}});
    let statuses = [
        status("first", &terminated(0, "Completed", ""), &json!({})),
        status(NAME, &waits, &terminated(126, "Error", " no \n")),
    ];
    let broken = usual().find(&pod(&annotations, &statuses)).unwrap();
    // 2026-01-01T00:00:10Z
    let began = SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_610);
    let wanted = FailedInit {
        container: NAME.to_owned(),
        exit_code: 126,
        message: "no".to_owned(),
        started_at: Some(began),
    };
    assert_eq!(broken, wanted);
}
