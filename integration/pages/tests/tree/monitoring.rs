//! Dashboard and alerts use metrics that exist, by their right names.

use std::{collections::BTreeSet, fs};

use pod_events::metrics::OWN;
use serde_json::Value;

use crate::{crates::sources, list, read, root, text, yaml};

/// Metrics of other services and of `inpod-service`: component (or all), name with unit, type.
const OTHERS: &str = "
repair pods counter
repair pods_amiss gauge
injector reviews counter
injector reloads counter
injector certificate_expiration_timestamp_seconds gauge
netconfig rules_duration_seconds histogram
netconfig claims gauge
netconfig drift_events counter
netconfig drift_overruns counter
netconfig probe_restores counter
netconfig probe_elements gauge
ztunnel_broker sessions gauge
ztunnel_broker workloads gauge
ztunnel_broker descriptors gauge
ztunnel_broker refused_ztunnels counter
ztunnel_broker refusals counter
ztunnel_broker answer_wait_seconds histogram
all ready gauge
all condition gauge
all grpc_requests counter
all refused_connections counter
all refused_calls counter
";

const COMPONENTS: [&str; 6] = [
    "pod_events",
    "netconfig",
    "ztunnel_broker",
    "installer",
    "repair",
    "injector",
];

/// Returns the samples of a metric, whose type determines their suffixes (OpenMetrics).
fn samples(name: &str, kind: &str) -> Vec<String> {
    match kind {
        "gauge" => vec![name.to_owned()],
        "counter" => vec![format!("{name}_total")],
        "histogram" => ["bucket", "sum", "count"]
            .map(|part| format!("{name}_{part}"))
            .to_vec(),
        other => panic!("{other} is no type of a metric"),
    }
}

fn known() -> BTreeSet<String> {
    let mut known = BTreeSet::from(
        [
            "up",
            "kube_daemonset_status_number_unavailable",
            "process_resident_memory_bytes",
            "inpod_component_up",
        ]
        .map(str::to_owned),
    );
    for (metric, ending) in OWN {
        let name = format!("inpod_pod_events_{}", metric.name);
        known.extend(match *ending {
            "_total" => samples(&name, "counter"),
            "_seconds" => samples(&format!("{name}_seconds"), "histogram"),
            "" => samples(&name, "gauge"),
            other => panic!("{other} is no ending that is known here"),
        });
    }
    for (component, name, kind) in others() {
        let of = COMPONENTS
            .into_iter()
            .filter(|it| ["all", *it].contains(&component));
        of.for_each(|component| known.extend(samples(&format!("inpod_{component}_{name}"), kind)));
    }
    known
}

fn others() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    OTHERS.trim().lines().map(|line| {
        let mut words = line.split(' ');
        let mut next = || words.next().unwrap();
        (next(), next(), next())
    })
}

fn named(expression: &str) -> BTreeSet<String> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let is_metric = |word: &&str| {
        let prefixes = ["inpod_", "process_", "kube_"];
        // A pattern for names of metrics has the prefix alone.
        let is_prefixed = |prefix: &&str| word.len() > prefix.len() && word.starts_with(*prefix);
        *word == "up" || prefixes.iter().any(is_prefixed)
    };
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
    for (component, name, _) in others() {
        let directory = match component {
            "all" => "services/lib/inpod-service/src".to_owned(),
            component => format!("services/{}/src", component.replace('_', "-")),
        };
        let name = name.strip_suffix("_seconds").unwrap_or(name);
        let registered = format!("\"{name}\"");
        let mut files = Vec::new();
        sources(&root().join(directory), &mut files);
        let found = files
            .iter()
            .any(|path| fs::read_to_string(path).unwrap().contains(&registered));
        assert!(found, "{component} registers no {name}");
    }
}

#[test]
fn dashboard_panels_have_descriptions_units_and_known_metrics() {
    let known = known();
    for name in ["fleet", "node"] {
        let file = read(&format!("deploy/helm/inpod/dashboards/inpod-{name}.json"));
        let dashboard: Value = serde_json::from_str(&file).unwrap();
        for panel in list(&dashboard, "panels") {
            assert!(!text(panel, "/description").is_empty(), "{panel}");
            assert!(
                !text(panel, "/fieldConfig/defaults/unit").is_empty(),
                "{panel}"
            );
            for target in list(panel, "targets") {
                let expression = text(target, "/expr");
                let names = named(expression);
                assert!(!names.is_empty() && names.is_subset(&known), "{target}");
                let is_of_node = expression.contains("node=\"$node\"");
                assert_eq!(is_of_node, name == "node", "{target}");
            }
        }
    }
}

#[test]
fn alerts_have_known_metrics_a_node_and_a_description() {
    let known = known();
    for alert in alerts() {
        let expression = text(&alert, "/expr");
        let names = named(expression);
        assert!(!names.is_empty() && names.is_subset(&known), "{alert}");
        assert!(!text(&alert, "/annotations/description").is_empty());
        let summary = text(&alert, "/annotations/summary");
        let is_of_cluster =
            ["InpodNotScraped", "InpodPodsUnavailable"].contains(&text(&alert, "/alert"));
        assert_ne!(is_of_cluster, summary.contains("$labels.node"), "{alert}");
        let mut labels = expression.split(" by (").skip(1);
        assert!(labels.all(|labels| labels.starts_with("node")), "{alert}");
        assert!(["critical", "warning", "info"].contains(&text(&alert, "/labels/severity")));
    }
}

#[test]
fn promtool_tests_expect_every_alert() {
    let tests = read("integration/lint/alerts.yaml");
    for alert in alerts() {
        let expected = format!("alertname=\"{}\"", text(&alert, "/alert"));
        assert!(tests.contains(&expected), "{expected}");
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
