//! Invariants of the tree, from `cargo metadata` and the files. Needs no privileges.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};

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
        assert!(
            users_of(&metadata, service).is_subset(&set(&["integration"])),
            "{service} is used"
        );
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

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
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
fn only_netconfig_the_installer_and_doctor_execute_programs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut all = Vec::new();
    sources(&root.join("plugin/src"), &mut all);
    sources(&root.join("services"), &mut all);
    let found: BTreeSet<_> = all.into_iter().filter(|it| executes_programs(it)).collect();
    // The plugin, for its versions; iptables programs, and before them netconfig itself.
    let allowed = [
        "services/inpod/src/doctor/collect/runtime.rs",
        "services/installer/src/binary.rs",
        "services/netconfig/src/iptables/child.rs",
        "services/netconfig/src/iptables/run.rs",
    ];
    assert_eq!(found, allowed.map(|it| root.join(it)).into());
}

#[test]
fn kubernetes_is_known_to_pod_events_repair_and_the_client_for_people_alone() {
    let metadata = metadata();
    for name in ["kube", "k8s-openapi"] {
        assert!(
            users_of(&metadata, name).is_subset(&set(&[
                "inpod-kube",
                "pod-events",
                "repair",
                "inpod"
            ])),
            "{name}"
        );
    }
    let agents = set(&["pod-events", "repair"]);
    assert!(users_of(&metadata, "inpod-kube").is_subset(&agents));
}

#[test]
fn the_client_for_people_has_no_right_and_knows_only_the_contracts() {
    let metadata = metadata();
    let ours: BTreeSet<_> = members(&metadata)
        .into_iter()
        .map(|package| package.name.to_string())
        .collect();
    let client = members(&metadata)
        .into_iter()
        .find(|package| package.name == "inpod")
        .unwrap();
    let used: BTreeSet<_> = direct(client).intersection(&ours).cloned().collect();
    let known = [
        "inpod-proto",
        "inpod-types",
        "inpod-service",
        "inpod-cni-config",
        "inpod-injection",
    ];
    assert_eq!(used, set(&known));
    assert!(!direct(client).contains("nix"));
    assert!(users_of(&metadata, "inpod").is_empty());
}

#[test]
fn what_runs_in_every_pod_of_the_mesh_is_small() {
    let metadata = metadata();
    let validate = members(&metadata)
        .into_iter()
        .find(|package| package.name == "validate")
        .unwrap();
    assert_eq!(direct(validate), set(&["nix", "socket2", "thiserror"]));
}

#[test]
fn what_is_injected_is_a_value_and_two_programs_make_it() {
    let metadata = metadata();
    let inject = members(&metadata)
        .into_iter()
        .find(|package| package.name == "inpod-injection")
        .unwrap();
    let allowed = [
        "json-patch",
        "serde",
        "serde-saphyr",
        "serde_json",
        "thiserror",
        "inpod-types",
    ];
    assert!(direct(inject).is_subset(&set(&allowed)));
    assert!(users_of(&metadata, "inpod-injection").is_subset(&set(&["injector", "inpod"])));
}

#[test]
fn the_vocabulary_is_free_of_io_and_of_the_wire() {
    let metadata = metadata();
    let workload = members(&metadata)
        .into_iter()
        .find(|package| package.name == "inpod-types")
        .unwrap();
    assert_eq!(direct(workload), set(&["thiserror"]));
}

#[test]
fn the_directory_of_a_crate_has_its_name() {
    for package in members(&metadata()) {
        let directory = package.manifest_path.parent().unwrap().file_name().unwrap();
        let own_names = [("proto", "inpod-proto"), ("plugin", "inpod-cni")];
        let expected = own_names
            .iter()
            .find(|(dir, _)| *dir == directory)
            .map_or(directory, |(_, name)| *name);
        assert_eq!(package.name, expected);
    }
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

#[test]
fn the_main_of_every_service_is_a_paragraph() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for service in SERVICES.iter().chain(&["inpod"]) {
        let main =
            fs::read_to_string(root.join("services").join(service).join("src/main.rs")).unwrap();
        assert!(main.lines().count() <= 40, "{service}");
    }
}

#[test]
fn the_top_level_holds_what_the_design_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let entries = fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let visible: BTreeSet<_> = entries
        .filter(|name| !name.starts_with('.') && name != "target")
        .collect();
    let designed = [
        "CHANGELOG.md",
        "Cargo.lock",
        "Cargo.toml",
        "LICENSE",
        "README.md",
        "buf.yaml",
        "deny.toml",
        "deploy",
        "integration",
        "plugin",
        "proto",
        "rustfmt.toml",
        "services",
    ];
    assert_eq!(visible, set(&designed));
}
