//! Requests over the network that are no review.

use std::fs;

use serde_json::{Value, json};

use crate::kube::injector::webhook::{Webhook, pod};

pub(super) const JSON: &str = "application/json";

pub(super) fn posted(webhook: &Webhook, path: &str, content: &str, body: &[u8]) -> (u16, String) {
    let file = tempfile::NamedTempFile::new_in(webhook.dir.path()).unwrap();
    fs::write(&file, body).unwrap();
    let header = format!("Content-Type: {content}");
    let data = format!("@{}", file.path().display());
    let url = webhook.url(path);
    let text = webhook
        .curl(&[
            "-X",
            "POST",
            "-H",
            &header,
            "--data-binary",
            &data,
            "-w",
            "\n%{http_code}",
            &url,
        ])
        .unwrap();
    let (answer, status) = text.rsplit_once('\n').unwrap();
    (status.parse().unwrap(), answer.to_owned())
}

pub(super) fn review(pod: &Value) -> Vec<u8> {
    let review = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {"uid": "u", "operation": "CREATE", "resource": {"group": "", "version": "v1", "resource": "pods"}, "namespace": "n", "object": pod},
    });
    review.to_string().into_bytes()
}

#[test]
fn garbage_is_answered_by_its_status_and_the_injector_goes_on() {
    let webhook = Webhook::start("garbage");
    let json = JSON;
    let fine = review(&pod("web"));
    let rows: [(&str, &str, Vec<u8>, u16); 8] = [
        ("/inject", json, Vec::new(), 400),
        ("/inject", "text/plain", fine.clone(), 415),
        (
            "/inject",
            "application/json; charset=utf-8",
            fine.clone(),
            415,
        ),
        ("/inject", json, vec![b'x'; 6 * 1024 * 1024 + 1], 400),
        ("/inject", json, vec![0xff; 6 * 1024 * 1024], 200),
        ("/validate", json, fine.clone(), 404),
        ("/inject/cluster/c/net", json, fine.clone(), 200),
        ("/inject?timeout=5s", json, fine.clone(), 200),
    ];
    for (path, content, body, expected) in rows {
        let (status, answer) = posted(&webhook, path, content, &body);
        assert_eq!(
            status,
            expected,
            "{path} {content} {}: {answer}",
            body.len()
        );
    }
    let (_, answer) = posted(&webhook, "/inject", json, b"{}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["response"]["allowed"], false);
    let mut huge = pod("huge");
    huge["metadata"]["annotations"] = json!({"proxy.istio.io/config": "[".repeat(200_000)});
    let (status, answer) = posted(&webhook, "/inject", json, &review(&huge));
    assert!(
        status == 200 && answer.contains("proxy.istio.io/config") && answer.len() < 2000,
        "{status} {}",
        answer.len()
    );
    let url = webhook.url("/inject");
    let got = webhook
        .curl(&["-w", "%{http_code}", "-o", "/dev/null", &url])
        .unwrap();
    assert_eq!(got, "405");
    let (_, answer) = posted(&webhook, "/inject", json, &fine);
    assert!(answer.contains("JSONPatch"), "{answer}");
    assert!(webhook.counted("bad-request") >= 5 && webhook.counted("undecodable") >= 2);
    assert_eq!(webhook.counted("failed"), 0);
}
