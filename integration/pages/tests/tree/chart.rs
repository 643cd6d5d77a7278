//! The chart's files, and proof that the manifests were rendered from them.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use ring::digest::{SHA256, digest};
use serde_json::Value;

use crate::{manifests, read, root, yaml};

const CHART: &str = "deploy/helm/inpod";

fn hex(bytes: &[u8]) -> String {
    let digest = digest(&SHA256, bytes);
    digest
        .as_ref()
        .iter()
        .fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").unwrap();
            text
        })
}

fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// The digest that `deploy/render` writes: of sha256sum's output for each file.
fn digest_of_chart() -> String {
    let chart = root().join(CHART);
    let mut found = Vec::new();
    files(&chart, &mut found);
    let names = found.iter().map(|path| path.strip_prefix(&chart).unwrap());
    let mut names: Vec<_> = names.map(|name| format!("./{}", name.display())).collect();
    names.sort();
    let lines = names.iter().map(|name| {
        let bytes = fs::read(chart.join(name)).unwrap();
        format!("{}  {name}\n", hex(&bytes))
    });
    hex(lines.collect::<String>().as_bytes())
}

#[test]
fn every_manifest_was_made_from_the_chart_as_it_is() {
    let wanted = format!("sha256 of the chart: {}", digest_of_chart());
    for name in manifests() {
        let text = read(&format!("deploy/manifests/{name}.yaml"));
        assert!(
            text.lines().take(2).any(|line| line.ends_with(&wanted)),
            "{name}: run ./deploy/render"
        );
    }
}

/// The chart fixes these to match its mounts and probes.
const FIXED: [&str; 15] = [
    "run_dir",
    "health_address",
    "peer",
    "node_name",
    "pods_from",
    "kubeconfig",
    "plugin_state_dir",
    "zds_socket",
    "leave_file",
    "receipt_file",
    "host_root",
    "conf_dir",
    "bin_dir",
    "record_dir",
    "agent_socket",
];

/// Settings of the previous release, which the chart refuses with a message.
const REMOVED: [(&str, &str); 6] = [
    ("podEvents", "inbound_capture"),
    ("podEvents", "istio_metrics"),
    ("ztunnelBroker", "ztunnel_capabilities"),
    ("injector", "reload_seconds"),
    ("injector", "max_connections"),
    ("injector", "linger_seconds"),
];

/// The same for a setting that every service had.
const REMOVED_COMMON: &str = "otlp_endpoint";

fn settings(path: &str) -> BTreeSet<String> {
    let text = read(path);
    let code = text.split("#[cfg(test)]").next().unwrap();
    let names = code.split("Key {").skip(1).filter_map(|rest| {
        let name = rest.split("name: \"").nth(1)?.split('"').next()?;
        Some(name.to_owned())
    });
    names.collect()
}

fn schema() -> Value {
    serde_json::from_str(&read(&format!("{CHART}/values.schema.json"))).unwrap()
}

fn keys(value: &Value) -> BTreeSet<String> {
    value.as_object().unwrap().keys().cloned().collect()
}

#[test]
fn the_schema_has_every_setting_of_every_service_and_no_other() {
    let mut common = settings("services/lib/inpod-service/src/config.rs");
    assert!(common.contains("log_level"));
    common.insert(REMOVED_COMMON.to_owned());
    let schema = schema();
    let fixed: BTreeSet<_> = FIXED.iter().map(|name| (*name).to_owned()).collect();
    for (value, service) in [
        ("podEvents", "pod-events"),
        ("netconfig", "netconfig"),
        ("ztunnelBroker", "ztunnel-broker"),
        ("installer", "installer"),
        ("repair", "repair"),
        ("injector", "injector"),
    ] {
        let path = format!("services/{service}/src/config.rs");
        let mut own = settings(&path);
        let removed = REMOVED.iter().filter(|(of, _)| *of == value);
        own.extend(removed.map(|(_, name)| (*name).to_owned()));
        let wanted: BTreeSet<_> = own.union(&common).chain(&fixed).cloned().collect();
        let place = format!("/properties/{value}/properties/settings/properties");
        assert_eq!(keys(schema.pointer(&place).unwrap()), wanted, "{service}");
    }
    let of_all: BTreeSet<_> = common.union(&fixed).cloned().collect();
    assert_eq!(
        keys(&schema["properties"]["settings"]["properties"]),
        of_all
    );
}

/// istio-cni's values that are only refused with a message, without a default.
const REFUSED: [&str; 6] = [
    "env",
    "image",
    "ownerName",
    "provider",
    "revision",
    "variant",
];

#[test]
fn every_value_is_in_the_schema_and_every_word_of_the_schema_is_a_value() {
    let values = keys(&yaml(&read(&format!("{CHART}/values.yaml"))));
    let refused = REFUSED.iter().map(|name| (*name).to_owned());
    let wanted: BTreeSet<_> = values.into_iter().chain(refused).collect();
    assert_eq!(keys(&schema()["properties"]), wanted);
}

#[test]
fn every_value_is_documented() {
    let text = read(&format!("{CHART}/values.yaml"));
    let lines: Vec<_> = text.lines().collect();
    // A comment above a value covers those that follow without an empty line.
    let mut is_told = false;
    for (number, line) in lines.iter().enumerate() {
        match line.trim_start().chars().next() {
            None => is_told = false,
            Some('#') => is_told = true,
            Some(_) => assert!(is_told, "line {}: nothing is said of {line}", number + 1),
        }
    }
}

#[test]
fn a_platform_changes_nothing_that_is_not_a_value() {
    let known = keys(&schema()["properties"]);
    for entry in fs::read_dir(root().join(CHART).join("profiles")).unwrap() {
        let path = entry.unwrap().path();
        let profile = yaml(&fs::read_to_string(&path).unwrap());
        assert!(keys(&profile).is_subset(&known), "{}", path.display());
    }
}

#[test]
fn the_chart_has_the_version_of_the_workspace() {
    let chart = yaml(&read(&format!("{CHART}/Chart.yaml")));
    for field in ["version", "appVersion"] {
        assert_eq!(chart[field], env!("CARGO_PKG_VERSION"), "{field}");
    }
}
