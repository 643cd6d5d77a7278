use super::*;
use crate::{Injector, Outcome, Request, revert};

fn injected(config: &str, annotations: &Value) -> Result<Value, InjectError> {
    let injector = Injector::new(Config::parse(config).unwrap()).unwrap();
    let mut pod = json!({"metadata": {"name": "web", "annotations": annotations}, "spec": {"containers": [{"name": "app"}]}});
    pod["metadata"]["annotations"]["note"] = "mine".into();
    let request = Request {
        pod: &pod,
        namespace: "shop",
        environment: &[],
    };
    match injector.inject(&request)? {
        Outcome::Injected { pod: injected, .. } => {
            assert_eq!(revert::original_pod(&injected), pod);
            Ok(injected)
        }
        Outcome::Skipped(why) => panic!("{why:?}"),
    }
}

/// Returns the scrape annotations of an injected pod, and the settings for the agent.
fn found(config: &str, annotations: &Value) -> (Vec<String>, Option<Value>) {
    let pod = injected(config, annotations).unwrap();
    let keys_found = matching_keys(&pod).into_iter();
    let scrape_annotations =
        keys_found.map(|key| format!("{key}={}", json::annotation(&pod, &key).unwrap()));
    let message = json::env_value(proxy_container(&pod).unwrap(), SCRAPED);
    (
        scrape_annotations.collect(),
        message.map(|text| serde_json::from_str(text).unwrap()),
    )
}

const LED: [&str; 3] = [
    "prometheus.io/path=/stats/prometheus",
    "prometheus.io/port=15020",
    "prometheus.io/scrape=true",
];

#[test]
fn prometheus_is_led_to_the_agent_and_the_agent_to_the_application_in_every_spelling() {
    let nothing = found("", &json!({}));
    assert_eq!(nothing, (LED.map(str::to_owned).to_vec(), None));
    for annotations in [
        json!({"prometheus.io/scrape": "true", "prometheus.io/port": "9090", "prometheus.io/path": "/m"}),
        json!({"prometheus.io.scrape": "true", "prometheus-io/port": "9090", "prometheus/io/path": "/m"}),
    ] {
        let (scrape_annotations, message) = found("", &annotations);
        assert_eq!(scrape_annotations, LED);
        let expected = json!({"scrape": "true", "path": "/m", "port": "9090"});
        assert_eq!(message, Some(expected));
    }
}

#[test]
fn a_pod_that_is_not_to_be_scraped_or_led_keeps_its_annotations() {
    let off = "prometheus.istio.io/merge-metrics";
    let own = json!({"prometheus.io/port": "9090"});
    let kept = (vec!["prometheus.io/port=9090".to_owned()], None);
    assert_eq!(found("enablePrometheusMerge: false", &own), kept);
    let scrape_annotations = json!({"prometheus.io/port": "9090", (off): "false"});
    assert_eq!(found("", &scrape_annotations), kept);
    let scrape_annotations = json!({(off): "true"});
    assert_eq!(
        found("enablePrometheusMerge: false", &scrape_annotations).0,
        LED
    );
    for annotations in [
        json!({"prometheus.io/scrape": "false"}),
        json!({"prometheus.io.scrape": "False"}),
        json!({"prometheus.io/port": "15020"}),
        json!({"status.sidecar.istio.io/port": "0"}),
    ] {
        let (scrape_annotations, message) = found("", &annotations);
        assert!(
            scrape_annotations.len() < 2 && message.is_none(),
            "{scrape_annotations:?}"
        );
    }
}

#[test]
fn several_targets_are_passed_on_and_none_of_them_is_the_proxys() {
    let of = |targets: &str| injected("", &json!({(keys::SCRAPE_TARGETS): targets}));
    let (_, message) = found("", &json!({(keys::SCRAPE_TARGETS): "9100:/a, 9101"}));
    let targets = json!([{"port": "9100", "path": "/a"}, {"port": "9101", "path": "/metrics"}]);
    assert_eq!(message.unwrap()["targets"], targets);
    for wrong in [
        "15090:/m", "15000", "0", "x", "80:m", "80,", "-1:/m", "80:/a b", ":",
    ] {
        let message = of(wrong).unwrap_err().to_string();
        assert!(message.contains(keys::SCRAPE_TARGETS), "{wrong}: {message}");
    }
    let own = json!({(keys::SCRAPE_TARGETS): "16020:/m", "status.sidecar.istio.io/port": "16020"});
    assert!(injected("", &own).is_err());
}

#[test]
fn a_port_with_mutual_tls_is_announced_to_prometheus() {
    let config = "proxyConfig: {proxyMetadata: {ENVOY_SECURE_MERGED_METRICS_PORT: '15092'}}";
    let pod = injected(config, &json!({})).unwrap();
    assert_eq!(json::annotation(&pod, keys::SECURE_PORT), Some("15092"));
}
