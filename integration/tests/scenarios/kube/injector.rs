//! The injector behind the real API server: reviewed pods, refusals, its absence, and a change of certificate
//! without a lost review.

mod again;
mod goldens;
mod http;
mod idle;
mod limits;
mod other;
mod rotation;
mod webhook;

use anyhow::{Context as _, ensure};
use integration::eventually;
use serde_json::{Value, json};
use webhook::{TIMEOUT, Webhook, pod};

const ENABLED: (&str, &str) = ("istio-injection", "enabled");

fn containers(pod: &Value) -> Vec<&str> {
    let names = pod["spec"]["containers"].as_array().unwrap().iter();
    names.map(|it| it["name"].as_str().unwrap()).collect()
}

#[test]
fn a_pod_of_a_labelled_namespace_is_injected_and_of_another_is_not() {
    let webhook = Webhook::start("fail");
    let inside = webhook.namespace("in", Some(ENABLED));
    let outside = webhook.namespace("out", None);
    webhook.register(&json!([webhook.hook("namespace", "/inject", "Fail")]));
    webhook.until_injected(&inside);
    let made = webhook.make(&inside, &pod("web")).unwrap();
    assert_eq!(containers(&made), ["app", "istio-proxy"]);
    assert_eq!(
        made["spec"]["initContainers"][0]["name"],
        "istio-validation"
    );
    let left = webhook.make(&outside, &pod("web")).unwrap();
    assert_eq!(containers(&left), ["app"]);
    // The chart's object selector prevents this call.
    let mut out = pod("opted-out");
    out["metadata"]["labels"] = json!({"sidecar.istio.io/inject": "false"});
    assert_eq!(containers(&webhook.make(&inside, &out).unwrap()), ["app"]);
}

#[test]
fn a_dry_run_shows_the_injected_pod_and_makes_none() {
    let webhook = Webhook::start("dry");
    let inside = webhook.namespace("in", Some(ENABLED));
    webhook.register(&json!([webhook.hook("namespace", "/inject", "Fail")]));
    webhook.until_injected(&inside);
    let shown = webhook.dry_run(&inside, &pod("web")).unwrap();
    assert_eq!(containers(&shown), ["app", "istio-proxy"]);
    let path = format!("/api/v1/namespaces/{inside}/pods/web");
    assert!(webhook.server.get(&path).is_err());
}

#[test]
fn a_pod_that_cannot_be_injected_is_refused_in_words_and_one_that_asked_for_nothing_is_not() {
    let webhook = Webhook::start("refused");
    let inside = webhook.namespace("in", Some(ENABLED));
    // Without an object selector, every pod is reviewed.
    let mut hook = webhook.hook("namespace", "/inject", "Fail");
    hook.as_object_mut().unwrap().remove("objectSelector");
    webhook.register(&json!([hook]));
    webhook.until_injected(&inside);
    let mut wrong = pod("wrong");
    wrong["metadata"]["annotations"] = json!({"traffic.sidecar.istio.io/excludeInboundPorts": "*"});
    let reported = webhook.make(&inside, &wrong).unwrap_err().to_string();
    assert!(
        reported.contains("excludeInboundPorts") && reported.contains("is not a valid port"),
        "{reported}"
    );
    wrong["metadata"]["labels"] = json!({"sidecar.istio.io/inject": "false"});
    assert_eq!(containers(&webhook.make(&inside, &wrong).unwrap()), ["app"]);
}

#[test]
fn without_the_injector_pods_fail_or_pass_as_the_failure_policy_says() {
    let mut webhook = Webhook::start("away");
    let [closed, open] = ["Fail", "Ignore"].map(|policy| {
        let name = policy.to_lowercase();
        let namespace = webhook.namespace(&name, Some(("policy", policy)));
        let mut hook = webhook.hook(&name, "/inject", policy);
        hook["namespaceSelector"] = json!({"matchLabels": {"policy": policy}});
        webhook.register_as(&name, &json!([hook]));
        webhook.until_injected(&namespace);
        namespace
    });
    webhook.stop();
    let reported = webhook.make(&closed, &pod("web")).unwrap_err().to_string();
    assert!(reported.contains("failed calling webhook"), "{reported}");
    assert_eq!(
        containers(&webhook.make(&open, &pod("web")).unwrap()),
        ["app"]
    );
    webhook.run();
    eventually("pods are injected again", TIMEOUT, || {
        let made = webhook.dry_run(&closed, &pod("later"))?;
        ensure!(containers(&made).len() == 2, "not yet");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn a_configuration_is_followed_and_one_that_cannot_be_used_changes_nothing() {
    let webhook = Webhook::start("config");
    let inside = webhook.namespace("in", Some(ENABLED));
    webhook.register(&json!([webhook.hook("namespace", "/inject", "Fail")]));
    webhook.until_injected(&inside);
    let revision = || {
        let made = webhook.dry_run(&inside, &pod("web"))?;
        let found = made
            .pointer("/metadata/annotations/istio.io~1rev")
            .and_then(Value::as_str);
        found.map(str::to_owned).context("no revision")
    };
    webhook.configure("revision: canary");
    eventually("the configuration is followed", TIMEOUT, || {
        ensure!(revision()? == "canary", "not yet");
        anyhow::Ok(())
    })
    .unwrap();
    webhook.configure("revision: worse\ntemplates: {x: \"{{ .Values }}\"}");
    webhook.until_reloaded("configuration", "refused");
    assert_eq!(revision().unwrap(), "canary");
    eventually(
        "it is told, and the Service keeps what still works",
        TIMEOUT,
        || {
            let text = webhook.metrics()?;
            for line in [
                "inpod_injector_condition{name=\"configuration\"} 0",
                "inpod_injector_ready 1",
            ] {
                ensure!(text.contains(line), "no {line}: {text}");
            }
            anyhow::Ok(())
        },
    )
    .unwrap();
}

#[test]
fn a_pod_of_nearly_two_megabytes_is_injected() {
    let webhook = Webhook::start("large");
    let inside = webhook.namespace("in", Some(ENABLED));
    webhook.register(&json!([webhook.hook("namespace", "/inject", "Fail")]));
    webhook.until_injected(&inside);
    let mut large = pod("large");
    let value = "x".repeat(2000);
    let env: Vec<_> = (0..950)
        .map(|number| json!({"name": format!("V{number}"), "value": value}))
        .collect();
    large["spec"]["containers"][0]["env"] = env.into();
    assert!(large.to_string().len() > 1_900_000);
    let made = webhook.dry_run(&inside, &large).unwrap();
    assert_eq!(containers(&made), ["app", "istio-proxy"]);
}
