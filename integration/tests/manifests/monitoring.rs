//! Dashboard and alerts use metrics that exist, by their right names.

use std::collections::BTreeSet;

use pod_events::metrics::OWN;
use serde_json::Value;

use crate::{list, read, text, yaml};

/// A metric's type determines its samples' suffixes (OpenMetrics).
#[derive(Clone, Copy)]
enum Is {
    Gauge,
    Counter,
    Histogram,
}

/// Metrics of other services and `inpod-service`: component (or all), name with unit, type, where and under which
/// name it is registered.
const OTHERS: [(&str, &str, Is, &str, &str); 22] = [
    (
        "repair",
        "pods",
        Is::Counter,
        "repair/src/metrics.rs",
        "pods",
    ),
    (
        "repair",
        "pods_amiss",
        Is::Gauge,
        "repair/src/metrics.rs",
        "pods_amiss",
    ),
    (
        "injector",
        "reviews",
        Is::Counter,
        "injector/src/metrics.rs",
        "reviews",
    ),
    (
        "injector",
        "reloads",
        Is::Counter,
        "injector/src/metrics.rs",
        "reloads",
    ),
    (
        "injector",
        "certificate_expiration_timestamp_seconds",
        Is::Gauge,
        "injector/src/metrics.rs",
        "certificate_expiration_timestamp",
    ),
    (
        "netconfig",
        "rules_duration_seconds",
        Is::Histogram,
        "netconfig/src/metrics.rs",
        "rules_duration",
    ),
    (
        "netconfig",
        "claims",
        Is::Gauge,
        "netconfig/src/metrics.rs",
        "claims",
    ),
    (
        "netconfig",
        "drift_events",
        Is::Counter,
        "netconfig/src/notifications/metrics.rs",
        "drift_events",
    ),
    (
        "netconfig",
        "drift_overruns",
        Is::Counter,
        "netconfig/src/notifications/metrics.rs",
        "drift_overruns",
    ),
    (
        "netconfig",
        "probe_restores",
        Is::Counter,
        "netconfig/src/metrics.rs",
        "probe_restores",
    ),
    (
        "netconfig",
        "probe_elements",
        Is::Gauge,
        "netconfig/src/metrics.rs",
        "probe_elements",
    ),
    (
        "ztunnel_broker",
        "sessions",
        Is::Gauge,
        "ztunnel-broker/src/metrics.rs",
        "sessions",
    ),
    (
        "ztunnel_broker",
        "workloads",
        Is::Gauge,
        "ztunnel-broker/src/metrics.rs",
        "workloads",
    ),
    (
        "ztunnel_broker",
        "descriptors",
        Is::Gauge,
        "ztunnel-broker/src/metrics.rs",
        "descriptors",
    ),
    (
        "ztunnel_broker",
        "refused_ztunnels",
        Is::Counter,
        "ztunnel-broker/src/metrics.rs",
        "refused_ztunnels",
    ),
    (
        "ztunnel_broker",
        "refusals",
        Is::Counter,
        "ztunnel-broker/src/metrics.rs",
        "refusals",
    ),
    (
        "ztunnel_broker",
        "answer_wait_seconds",
        Is::Histogram,
        "ztunnel-broker/src/metrics.rs",
        "answer_wait",
    ),
    (
        "",
        "ready",
        Is::Gauge,
        "lib/inpod-service/src/readiness.rs",
        "ready",
    ),
    (
        "",
        "condition",
        Is::Gauge,
        "lib/inpod-service/src/readiness.rs",
        "condition",
    ),
    (
        "",
        "grpc_requests",
        Is::Counter,
        "lib/inpod-service/src/metrics/calls.rs",
        "grpc_requests",
    ),
    (
        "",
        "refused_connections",
        Is::Counter,
        "lib/inpod-service/src/metrics/calls.rs",
        "refused_connections",
    ),
    (
        "",
        "refused_calls",
        Is::Counter,
        "lib/inpod-service/src/metrics/calls.rs",
        "refused_calls",
    ),
];

const COMPONENTS: [&str; 6] = [
    "pod_events",
    "netconfig",
    "ztunnel_broker",
    "installer",
    "repair",
    "injector",
];

fn samples(name: &str, is: Is) -> Vec<String> {
    match is {
        Is::Gauge => vec![name.to_owned()],
        Is::Counter => vec![format!("{name}_total")],
        Is::Histogram => ["bucket", "sum", "count"]
            .map(|part| format!("{name}_{part}"))
            .to_vec(),
    }
}

fn known() -> BTreeSet<String> {
    let mut known = BTreeSet::from(["up".to_owned(), "process_resident_memory_bytes".to_owned()]);
    for (metric, ending) in OWN {
        let name = format!("inpod_pod_events_{}", metric.name);
        known.extend(match *ending {
            "_total" => samples(&name, Is::Counter),
            "_seconds" => samples(&format!("{name}_seconds"), Is::Histogram),
            "" => samples(&name, Is::Gauge),
            other => panic!("{other} is no ending that is known here"),
        });
    }
    for (component, name, is, _, _) in OTHERS {
        let of = COMPONENTS
            .into_iter()
            .filter(|it| component.is_empty() || *it == component);
        of.for_each(|component| known.extend(samples(&format!("inpod_{component}_{name}"), is)));
    }
    known
}

fn named(expression: &str) -> BTreeSet<String> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let is_metric =
        |word: &&str| *word == "up" || word.starts_with("inpod_") || word.starts_with("process_");
    words.filter(is_metric).map(str::to_owned).collect()
}

pub(crate) fn alerts() -> Vec<Value> {
    let file = yaml(&read("deploy/helm/inpod/alerts/inpod.yaml"));
    let groups = list(&file, "groups");
    groups
        .iter()
        .flat_map(|group| list(group, "rules").to_vec())
        .collect()
}

#[test]
fn the_metrics_of_the_list_are_registered_under_these_names() {
    for (_, name, _, file, registered) in OTHERS {
        let code = read(&format!("services/{file}"));
        assert!(
            code.contains(&format!("\"{registered}\"")),
            "{name} is not in {file}"
        );
    }
}

#[test]
fn every_query_of_the_dashboard_asks_for_metrics_that_exist() {
    let dashboard: Value =
        serde_json::from_str(&read("deploy/helm/inpod/dashboards/inpod.json")).unwrap();
    let known = known();
    let panels = list(&dashboard, "panels");
    let targets: Vec<_> = panels
        .iter()
        .flat_map(|panel| list(panel, "targets"))
        .collect();
    assert!(targets.len() > 20);
    for target in targets {
        let names = named(text(target, "/expr"));
        assert!(
            !names.is_empty() && names.is_subset(&known),
            "{target}: {names:?}"
        );
    }
}

#[test]
fn every_alert_asks_for_metrics_that_exist_and_says_what_to_do() {
    let known = known();
    let alerts = alerts();
    assert!(alerts.len() > 10);
    for alert in alerts {
        let names = named(text(&alert, "/expr"));
        assert!(
            !names.is_empty() && names.is_subset(&known),
            "{alert}: {names:?}"
        );
        assert!(!text(&alert, "/annotations/remedy").is_empty());
        assert!(!text(&alert, "/annotations/summary").is_empty());
        assert!(["critical", "warning", "info"].contains(&text(&alert, "/labels/severity")));
    }
}

#[test]
fn a_metric_that_does_not_exist_is_found_out() {
    let known = known();
    for wrong in [
        "rate(inpod_netconfig_drift_events[5m])",
        "inpod_pod_events_add_duration_seconds > 1",
        "inpod_nobody_ready == 0",
        "sum(inpod_pod_events_retries_total) + process_cpu_seconds",
    ] {
        assert!(!named(wrong).is_subset(&known), "{wrong}");
    }
}
