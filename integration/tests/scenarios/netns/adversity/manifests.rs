//! Manifests that break, disappear or are replaced.

use std::fs;

use crate::common::mesh::Mesh;
use inpod_proto::{podevents::v1::PodState, types::v1::Reason};
use integration::{Call, Node, Spec, TIMEOUT, eventually};
use nix::sys::signal::Signal;

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
