//! Manifests that break, disappear or are replaced.

use std::{fs, os::unix::fs::symlink, path::Path};

use crate::common::mesh::Mesh;
use inpod_proto::{podevents::v1::PodState, types::v1::Reason};
use integration::{Call, Node, Spec, TIMEOUT, eventually};
use nix::{
    sys::{signal::Signal, stat::Mode},
    unistd::mkfifo,
};

use crate::netns::adversity::{AMBIENT_NAMESPACE, wait_until_gone};

#[test]
fn a_manifest_that_is_away_for_a_moment_changes_nothing() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    let manifest = node.manifests().join("shop-b.yaml");
    // As editors do: rename, then write a new file.
    fs::rename(&manifest, manifest.with_extension("yaml~")).unwrap();
    wait_until_gone(node, &mesh.b);
    fs::copy(manifest.with_extension("yaml~"), &manifest).unwrap();
    node.until_whole(&mesh.b.spec).unwrap();
    let known = node.explain(&mesh.b.spec).unwrap();
    assert!(
        !known
            .timeline
            .iter()
            .any(|entry| entry.event.contains("left")),
        "{:?}",
        known.timeline
    );
    mesh.reached_from_outside().unwrap();
}

#[test]
fn manifests_that_cannot_be_read_at_start_leave_every_pod_as_it_is() {
    let node = Node::running().unwrap();
    let namespaces = node.manifests().join("namespaces.yaml");
    fs::write(&namespaces, AMBIENT_NAMESPACE).unwrap();
    let pod = node.pod(Spec::new("a")).unwrap();
    node.until_whole(&pod.spec).unwrap();
    node.stop("pod-events", Signal::SIGTERM).unwrap();
    fs::write(&namespaces, AMBIENT_NAMESPACE.replace('}', "")).unwrap();
    fs::write(
        node.manifests().join("shop-a.yaml"),
        "kind: Pod\nmetadata: [",
    )
    .unwrap();
    node.start("pod-events").unwrap();
    node.ready().unwrap();
    let known = node.until_whole(&pod.spec).unwrap();
    assert_eq!(known.state(), PodState::Enrolled);
    // Another pod gets the reason why it must wait.
    let other = node.sandbox(Spec::new("b")).unwrap();
    let error = node
        .call(Call::add, &other)
        .run()
        .unwrap()
        .error()
        .unwrap()
        .to_string();
    assert!(error.contains("NAMESPACE_UNKNOWN"), "{error}");
    fs::write(&namespaces, AMBIENT_NAMESPACE).unwrap();
    node.write_manifest(&pod.spec).unwrap();
    eventually("it can be added", TIMEOUT, || node.add(&other)).unwrap();
}

#[test]
fn a_manifest_that_is_cut_to_nothing_keeps_what_it_said() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    fs::write(node.manifests().join("shop-b.yaml"), "").unwrap();
    // Another file shows when the directory was read.
    node.write_manifest(&Spec::new("other")).unwrap();
    eventually("the directory was read", TIMEOUT, || {
        node.explain(&Spec::new("other"))
    })
    .unwrap();
    assert_eq!(
        node.explain(&mesh.b.spec).unwrap().reason(),
        Reason::LabelOnPod
    );
}

#[test]
fn a_directory_of_manifests_that_is_replaced_is_followed() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a")).unwrap();
    let (directory, aside) = (node.manifests(), node.manifests().with_extension("old"));
    fs::rename(&directory, &aside).unwrap();
    fs::create_dir(&directory).unwrap();
    fs::copy(
        aside.join("namespaces.yaml"),
        directory.join("namespaces.yaml"),
    )
    .unwrap();
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    node.until_whole(&pod.spec).unwrap();
}

/// Creates files that block their reader, never end, or are too large, and a directory with the name of a file.
fn obstruct(directory: &Path, extension: &str) {
    fs::create_dir_all(directory).unwrap();
    let path = |name: &str| directory.join(format!("{name}{extension}"));
    mkfifo(&path("0-fifo"), Mode::S_IRWXU).unwrap();
    symlink("/dev/zero", path("0-endless")).unwrap();
    let hole = fs::File::create(path("0-hole")).unwrap();
    hole.set_len(300 << 20).unwrap();
    fs::create_dir(path("0-directory")).unwrap();
}

/// Starts pod-events with a limit that protects the machine.
fn start_limited(node: &Node) {
    let within = ["prlimit", "--data=1073741824"];
    let settings = ["--peer", "uid"];
    node.start_within(&within, &node.run_dir(), "pod-events", &settings)
        .unwrap();
    node.ready().unwrap();
}

fn is_small(node: &Node) {
    let peak = node.kib("pod-events", "VmHWM:").unwrap();
    assert!(peak < 96 << 10, "{peak} KiB");
}

#[test]
fn pod_events_skips_manifests_that_are_no_small_files() {
    let node = Node::running().unwrap();
    node.stop("pod-events", Signal::SIGTERM).unwrap();
    start_limited(&node);
    obstruct(&node.manifests(), ".yaml");
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    node.until_whole(&pod.spec).unwrap();
    is_small(&node);
}

#[test]
fn pod_events_starts_with_state_that_is_no_small_files() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    node.until_whole(&pod.spec).unwrap();
    node.stop("pod-events", Signal::SIGTERM).unwrap();
    obstruct(&node.manifests(), ".yaml");
    obstruct(&node.run_dir().join("pod-events/pods"), ".json");
    obstruct(&node.run_dir().join("pod-events/pods"), ".tmp");
    obstruct(&node.state_dir().join("spool"), "");
    start_limited(&node);
    node.until_whole(&pod.spec).unwrap();
    let later = node.pod(Spec::new("b").ambient()).unwrap();
    node.until_whole(&later.spec).unwrap();
    is_small(&node);
}
