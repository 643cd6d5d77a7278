//! DELs and ends of sandboxes during other work.

use std::{fs, net::SocketAddr, thread, time::Duration};

use crate::common::mesh::{Mesh, PORT};
use integration::{App, Call, Inhabitant, Node, Spec, ask, eventually};
use nix::sys::signal::Signal;

use crate::netns::adversity::{
    AMBIENT_NAMESPACE, is_out, restart, wait_for_event, without_ztunnel,
};

#[test]
fn the_release_of_an_attempt_that_failed_is_not_taken_for_the_end_of_the_sandbox() {
    let node = without_ztunnel();
    let pod = node.pod(Spec::new("a")).unwrap();
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    wait_for_event(&node, &pod, "claimed");
    // A later event interrupts the attempt: it is undone and made again.
    fs::write(node.manifests().join("namespaces.yaml"), AMBIENT_NAMESPACE).unwrap();
    wait_for_event(&node, &pod, "undone");
    node.start_ztunnel(&[]).unwrap();
    let known = eventually("it joins", Duration::from_secs(40), || {
        node.until_whole(&pod.spec)
    })
    .unwrap();
    assert_eq!(known.sandbox.unwrap().container_id, pod.container_id);
    assert_eq!(node.api().claims().unwrap().len(), 1);
}

#[test]
fn deletions_of_an_old_sandbox_that_the_broker_did_not_hear_leave_the_new_one_served() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    let newer = node.pod(mesh.b.spec.clone()).unwrap();
    let _app = App::start(&newer.netns, PORT).unwrap();
    node.until_whole(&mesh.b.spec).unwrap();
    node.signal("ztunnel-broker", Signal::SIGSTOP).unwrap();
    node.del(&mesh.b).unwrap();
    restart(node, "ztunnel-broker");
    node.ready().unwrap();
    let known = node.until_whole(&mesh.b.spec).unwrap();
    assert_eq!(known.sandbox.unwrap().container_id, newer.container_id);
    ask(&mesh.outsider.netns, SocketAddr::new(newer.v4.into(), PORT)).unwrap();
}

/// Expects that no DEL was spooled: the plugin spools one that the agent does not answer in time.
fn is_answered(node: &Node) {
    let spooled = fs::read_dir(node.state_dir().join("spool"));
    assert_eq!(spooled.map_or(0, Iterator::count), 0);
}

#[test]
fn a_del_does_not_wait_behind_an_enrollment_that_waits_for_a_ztunnel() {
    let node = without_ztunnel();
    let pod = node.pod(Spec::new("a")).unwrap();
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    wait_for_event(&node, &pod, "claimed");
    let del = node.call(Call::del, &pod).run().unwrap();
    assert_eq!(del.code, 0, "{del:?}");
    is_answered(&node);
    is_out(&node, &pod);
    assert!(node.explain(&pod.spec).unwrap().sandbox.is_none());
}

#[test]
fn a_del_while_the_runtimes_add_waits_for_a_ztunnel_ends_the_add() {
    let node = without_ztunnel();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let call = node.call(Call::add, &pod).timeout_seconds(20);
    let add = thread::spawn(move || call.run());
    wait_for_event(&node, &pod, "claimed");
    let del = node.call(Call::del, &pod).run().unwrap();
    assert_eq!(del.code, 0, "{del:?}");
    is_answered(&node);
    // A runtime kills its ADD before it sends DEL; other callers get their answer before the deadline.
    assert_eq!(add.join().unwrap().unwrap().code, 1);
    is_out(&node, &pod);
}

#[test]
fn the_del_of_a_pod_outside_the_mesh_needs_no_other_service() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a")).unwrap();
    node.stop("netconfig", Signal::SIGKILL).unwrap();
    node.stop("ztunnel-broker", Signal::SIGKILL).unwrap();
    assert_eq!(node.call(Call::del, &pod).run().unwrap().code, 0);
    assert!(node.explain(&pod.spec).unwrap().sandbox.is_none());
}

#[test]
fn a_pod_that_ends_slowly_is_served_beside_its_successor_of_the_same_name() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    let _app = Inhabitant::of(&mesh.b).unwrap();
    let successor = Spec {
        uid: "b2-0000-1111-2222-333333333333".into(),
        ..mesh.b.spec.clone()
    };
    let newer = node.pod(successor).unwrap();
    restart(node, "ztunnel-broker");
    node.ready().unwrap();
    node.until_whole(&newer.spec).unwrap();
    mesh.reached_from_outside().unwrap();
}
