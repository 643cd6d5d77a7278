//! A DEL removes everything of a pod, and pods that come and go leave nothing behind.

use integration::{App, Call, State};

use super::*;

/// Pods that come and go in a row; `INPOD_TEST_CYCLES` names another number.
const CYCLES: usize = 50;

fn cycles() -> usize {
    let named = std::env::var_os("INPOD_TEST_CYCLES");
    let named = named.and_then(|number| number.to_str()?.parse().ok());
    named.unwrap_or(CYCLES)
}

/// A pod's life, as kubelet and runtime drive it.
fn live_and_end(deployed: &DeployedNode) {
    let [living] = start(deployed, [Mesh::Inside]);
    let Living { pod, process } = living;
    deployed.terminate(&[&pod]).unwrap();
    drop(process);
    deployed.call(Call::del, &pod).unwrap().succeed().unwrap();
    // The rules end with the netns, which nothing holds any more.
    let claims = deployed.node.api().claims().unwrap();
    let mut claimed = claims.iter().filter_map(|claim| claim.sandbox.as_ref());
    let is_claimed = claimed.any(|sandbox| sandbox.container_id == pod.container_id);
    assert!(!is_claimed, "{claims:?}");
    let served = deployed.node.api().workloads().unwrap().workloads;
    let mut served = served.iter().filter_map(|it| it.workload.as_ref());
    assert!(!served.any(|workload| workload.uid == pod.spec.uid));
    pod.unmount().unwrap();
    deployed
        .call(Call::del_again, &pod)
        .unwrap()
        .succeed()
        .unwrap();
    deployed.delete(&[&pod]).unwrap();
}

#[test]
fn pods_that_come_and_go_leave_nothing_in_the_kernel_or_in_any_service() {
    let deployed = running();
    let [stays, outsider] = start(&deployed, [Mesh::Inside, Mesh::Outside]);
    let _app = App::start(&outsider.pod.netns, PORT).unwrap();
    // What the first pod of a node adds, such as connections, stays.
    live_and_end(&deployed);
    let node = &deployed.node;
    let before = State::of(node, &[&stays.pod]).unwrap();
    for _ in 0..cycles() {
        live_and_end(&deployed);
    }
    before.unchanged(node, &[&stays.pod]).unwrap();
    assert_eq!(node.api().claims().unwrap().len(), 1);
    assert_eq!(node.api().workloads().unwrap().workloads.len(), 1);
    let path = [(&stays.pod, 15001)];
    assert_path(&deployed, &stays.pod, &outsider.pod, &path);
}
