//! Checks which crates a crate depends on, which sources execute programs, and which sources are mutated.
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};

use crate::{read, root};

const SERVICES: [&str; 7] = [
    "pod-events",
    "netconfig",
    "ztunnel-broker",
    "installer",
    "repair",
    "validate",
    "injector",
];

fn metadata() -> Metadata {
    MetadataCommand::new().no_deps().exec().unwrap()
}

fn members(metadata: &Metadata) -> Vec<&Package> {
    metadata.workspace_packages()
}

fn direct(package: &Package) -> BTreeSet<String> {
    let normal = package
        .dependencies
        .iter()
        .filter(|dependency| dependency.kind == DependencyKind::Normal);
    normal.map(|dependency| dependency.name.clone()).collect()
}

fn users_of(metadata: &Metadata, name: &str) -> BTreeSet<String> {
    let users = members(metadata)
        .into_iter()
        .filter(|package| direct(package).contains(name));
    users.map(|package| package.name.to_string()).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn no_service_depends_on_another() {
    let metadata = metadata();
    for service in SERVICES {
        // The client's doctor reads the CNI files with the installer's reader.
        let allowed = match service {
            "installer" => set(&["pages", "inpod"]),
            _ => set(&["pages"]),
        };
        let users = users_of(&metadata, service);
        assert!(users.is_subset(&allowed), "{users:?} use {service}");
    }
}

#[test]
fn only_netconfig_can_enter_a_netns() {
    // The reference ztunnel, a peer that is not shipped, must enter netns too.
    let allowed = set(&["netconfig", "integration", "reference-ztunnel"]);
    assert!(users_of(&metadata(), "inpod-linux").is_subset(&allowed));
}

/// Returns whether product code can execute a program: tests are at the end of a file, or in one of their own.
fn executes_programs(path: &Path) -> bool {
    let text = fs::read_to_string(path).unwrap();
    let product = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let mut imports = product.split("process::").skip(1);
    let spawns = |rest: &str| {
        rest.split(';')
            .next()
            .unwrap_or_default()
            .contains("Command")
    };
    imports.any(spawns)
        || ["execv(", "execve(", "posix_spawn("]
            .iter()
            .any(|it| product.contains(it))
}

pub(crate) fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default();
        let is_test = ["tests", "tests.rs", "examples"]
            .iter()
            .any(|it| name == *it);
        if path.is_dir() && !is_test {
            sources(&path, found);
        } else if path.extension().is_some_and(|it| it == "rs") && !is_test {
            found.push(path);
        }
    }
}

#[test]
fn only_the_installer_and_doctor_execute_programs() {
    let root = root();
    let mut all = Vec::new();
    sources(&root.join("plugin/src"), &mut all);
    sources(&root.join("services"), &mut all);
    let found: BTreeSet<_> = all.into_iter().filter(|it| executes_programs(it)).collect();
    // The plugin, for its versions.
    let allowed = [
        "services/inpod/src/doctor/collect/runtime.rs",
        "services/installer/src/binary.rs",
    ];
    assert_eq!(found, allowed.map(|it| root.join(it)).into());
}

#[test]
fn kubernetes_is_known_to_pod_events_repair_and_the_client_alone() {
    let metadata = metadata();
    let agents = ["pod-events", "repair"];
    assert!(users_of(&metadata, "inpod-kube").is_subset(&set(&agents)));
    let others = ["inpod-kube", "inpod"];
    for name in ["kube", "k8s-openapi"] {
        let allowed = set(&[agents, others].concat());
        assert!(users_of(&metadata, name).is_subset(&allowed), "{name}");
    }
}

/// `validate` runs in every pod with a sidecar, two others decide without input and output, the client knows contracts.
#[test]
fn crates_that_promise_it_depend_on_little() {
    let metadata = metadata();
    let direct = |name: &str| {
        let mut members = members(&metadata).into_iter();
        direct(members.find(|package| package.name == name).unwrap())
    };
    let parser_and_sockets = ["lexopt", "nix", "socket2", "thiserror"];
    assert_eq!(direct("validate"), set(&parser_and_sockets));
    assert_eq!(direct("inpod-types"), set(&["ipnet", "serde", "thiserror"]));
    let injection = [
        "json-patch",
        "serde",
        "serde-saphyr",
        "serde_json",
        "thiserror",
        "inpod-types",
    ];
    assert!(direct("inpod-injection").is_subset(&set(&injection)));
    let privileged = set(&["nix", "inpod-linux", "inpod-kube"]);
    assert!(direct("inpod").is_disjoint(&privileged));
}

#[test]
fn every_crate_obeys_the_lints_of_the_workspace_and_forbids_unsafe_code() {
    for package in members(&metadata()) {
        let manifest = fs::read_to_string(&package.manifest_path).unwrap();
        let inherits = manifest.contains("[lints]\nworkspace = true");
        // The contracts' crate is mostly generated: it has its own lint table.
        let own = package.name == "inpod-proto" && manifest.contains("unsafe_code = \"forbid\"");
        assert!(inherits || own, "{}", package.name);
    }
}

/// Expands the braces of a pattern.
fn expand(pattern: &str) -> Vec<String> {
    let Some((before, rest)) = pattern.split_once('{') else {
        return vec![pattern.to_owned()];
    };
    let (names, after) = rest.split_once('}').unwrap();
    let names = names.split(',');
    names.map(|it| format!("{before}{it}{after}")).collect()
}

/// Code that no pattern names is not mutated, and the tier passes without it.
#[test]
fn every_pattern_of_mutated_code_names_files() {
    let config = read("integration/mutants.toml");
    let quoted = |line: &str| {
        Some(
            line.trim()
                .strip_prefix('"')?
                .strip_suffix("\",")?
                .to_owned(),
        )
    };
    let patterns: Vec<String> = config.lines().filter_map(quoted).collect();
    assert!(patterns.len() > 5, "{patterns:?}");
    for path in patterns.iter().flat_map(|pattern| expand(pattern)) {
        let without_wildcard = path.split('*').next().unwrap_or_default();
        assert!(root().join(without_wildcard).exists(), "{path}");
    }
}
