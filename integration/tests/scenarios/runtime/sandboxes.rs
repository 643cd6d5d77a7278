//! A real containerd's sandboxes start, survive restarts, are replaced and end.

use std::net::{IpAddr, SocketAddr};

use inpod_linux::Netns;
use inpod_proto::podevents::v1::PodState;
use integration::{App, Pod, Spec, ask, connect, exchange, source_seen};

use crate::runtime::{
    PORT,
    chain::{NETWORK, within},
    containerd::Runtime,
    cri::PodSandboxConfig,
};

pub(crate) const NOTHING: [String; 0] = [];

/// Calls from another netns and expects the path through 15006.
pub(crate) fn reached_through_ztunnel(
    runtime: &Runtime,
    pod: &Pod,
    from: &Netns,
    to: SocketAddr,
) -> IpAddr {
    let before = runtime.node.accesses().unwrap().len();
    let source = ask(from, to).unwrap();
    let accesses = runtime.node.accesses().unwrap();
    let taken = accesses
        .iter()
        .skip(before)
        .filter(|access| access.event == "accepted");
    let taken: Vec<_> = taken
        .map(|access| (access.uid.as_str(), access.listener))
        .collect();
    assert_eq!(taken, [(pod.spec.uid.as_str(), 15006)]);
    source
}

/// Expects every source to report the pod in the mesh, without waiting.
pub(crate) fn in_the_mesh(runtime: &Runtime, pod: &Pod) {
    let known = runtime.node.explain(&pod.spec).unwrap();
    assert_eq!(known.state(), PodState::Enrolled, "{known:?}");
    let sandbox = known.sandbox.unwrap();
    assert_eq!(
        (sandbox.container_id.as_str(), sandbox.network_name.as_str()),
        (pod.container_id.as_str(), NETWORK)
    );
    assert_eq!(known.rules.unwrap().differences, NOTHING);
    let traces = pod.traces().unwrap().join("\n");
    assert!(traces.contains("inpod-nat"), "{traces}");
    let state = runtime.node.ztunnel_state().unwrap().to_string();
    assert!(state.contains(&pod.spec.uid), "{state}");
}

#[test]
fn a_sandbox_of_an_enrolled_pod_comes_up_in_the_mesh_and_leaves_nothing() {
    let runtime = Runtime::running().unwrap();
    let pod = runtime.pod(Spec::new("web").ambient()).unwrap();
    in_the_mesh(&runtime, &pod);
    assert_eq!(runtime.chain.addresses().unwrap().len(), 2);
    let outsider = runtime.node.sandbox(Spec::new("outsider")).unwrap();
    let app = App::start(&pod.netns, PORT).unwrap();
    for (from, to) in outsider.addresses().into_iter().zip(pod.addresses()) {
        let to = SocketAddr::new(to, PORT);
        assert_eq!(
            reached_through_ztunnel(&runtime, &pod, &outsider.netns, to),
            from
        );
    }
    drop(app);
    runtime.cri.stop(&pod.container_id).unwrap();
    assert_eq!(runtime.node.api().claims().unwrap(), []);
    assert!(!runtime.node.has_veth(&pod));
    runtime.cri.remove(&pod.container_id).unwrap();
    outsider.unmount().unwrap();
    drop(outsider);
    runtime.until_empty().unwrap();
    let state = runtime.node.ztunnel_state().unwrap().to_string();
    assert!(!state.contains(&pod.spec.uid), "{state}");
}

/// containerd runs `loopback` beside the pod's network, and may do so last.
#[test]
fn a_sandbox_whose_loopback_is_set_up_last_comes_up_in_the_mesh() {
    let runtime = Runtime::running().unwrap();
    let waits = "if [ \"$CNI_COMMAND\" = ADD ]; then for _ in $(seq 200); do \
                 nsenter --net=\"$CNI_NETNS\" nft list tables </dev/null | grep -q inpod-nat && break; \
                 sleep 0.02; done; fi";
    runtime.chain.precede("loopback", waits).unwrap();
    let pod = runtime.pod(Spec::new("web").ambient()).unwrap();
    in_the_mesh(&runtime, &pod);
    runtime.end(&pod.container_id).unwrap();
    runtime.until_empty().unwrap();
}

#[test]
fn a_pod_outside_the_mesh_gets_no_rules_and_is_remembered() {
    let runtime = Runtime::running().unwrap();
    let pod = runtime.pod(Spec::new("web")).unwrap();
    assert_eq!(pod.traces().unwrap(), NOTHING);
    assert_eq!(runtime.node.api().claims().unwrap(), []);
    let known = runtime.node.explain(&pod.spec).unwrap();
    assert_eq!(known.sandbox.unwrap().container_id, pod.container_id);
    // A later label finds it.
    runtime
        .node
        .write_manifest(&pod.spec.clone().ambient())
        .unwrap();
    runtime.node.until_whole(&pod.spec).unwrap();
    in_the_mesh(&runtime, &pod);
    runtime.end(&pod.container_id).unwrap();
    runtime.until_empty().unwrap();
}

#[test]
fn a_sandbox_in_the_nodes_network_never_reaches_the_plugin() {
    let runtime = Runtime::running().unwrap();
    let spec = Spec::new("web").ambient();
    runtime.node.write_manifest(&spec).unwrap();
    let id = runtime.host_network(&spec).unwrap();
    let status = runtime.cri.status(&id).unwrap();
    assert_eq!(status.status.unwrap().state, 0);
    assert_eq!(runtime.node.explain(&spec).unwrap().sandbox, None);
    assert!(runtime.chain.addresses().unwrap().is_empty());
    let tables = within(runtime.node.netns().path(), &["nft", "list", "tables"]).unwrap();
    assert!(!tables.contains("inpod"), "{tables}");
    runtime.end(&id).unwrap();
    runtime.until_empty().unwrap();
}

#[test]
fn containerd_is_restarted_under_live_sandboxes() {
    let runtime = Runtime::running().unwrap();
    let pod = runtime.pod(Spec::new("web").ambient()).unwrap();
    let outsider = runtime.node.sandbox(Spec::new("outsider")).unwrap();
    let app = App::start(&pod.netns, PORT).unwrap();
    let stream = connect(&outsider.netns, SocketAddr::new(pod.v4.into(), PORT)).unwrap();
    let (_, mut stream) = source_seen(stream).unwrap();
    runtime.restart_containerd().unwrap();
    exchange(&mut stream, "still here").unwrap();
    let again = runtime
        .sandbox(pod.spec.clone(), &pod.container_id)
        .unwrap();
    assert_eq!(again.path(), pod.path());
    in_the_mesh(&runtime, &pod);
    let next = runtime.pod(Spec::new("next").ambient()).unwrap();
    in_the_mesh(&runtime, &next);
    drop((stream, app));
    outsider.unmount().unwrap();
    drop(outsider);
    for id in [&pod.container_id, &next.container_id] {
        runtime.end(id).unwrap();
    }
    runtime.until_empty().unwrap();
}

#[test]
fn a_sandbox_that_replaces_another_of_its_pod_stays_in_the_mesh_when_the_old_one_goes() {
    let runtime = Runtime::running().unwrap();
    let old = runtime.pod(Spec::new("web").ambient()).unwrap();
    let config = runtime.config(&old.spec);
    let metadata = config
        .metadata
        .clone()
        .map(|metadata| crate::runtime::cri::Metadata {
            attempt: 1,
            ..metadata
        });
    let id = runtime
        .cri
        .run(PodSandboxConfig { metadata, ..config })
        .unwrap();
    let new = runtime.sandbox(old.spec.clone(), &id).unwrap();
    assert_ne!(old.path(), new.path());
    in_the_mesh(&runtime, &new);
    runtime.end(&old.container_id).unwrap();
    in_the_mesh(&runtime, &new);
    assert_eq!(runtime.node.api().claims().unwrap().len(), 1);
    let outsider = runtime.node.sandbox(Spec::new("outsider")).unwrap();
    let app = App::start(&new.netns, PORT).unwrap();
    let to = SocketAddr::new(new.v4.into(), PORT);
    assert_eq!(
        reached_through_ztunnel(&runtime, &new, &outsider.netns, to),
        outsider.v4
    );
    drop(app);
    outsider.unmount().unwrap();
    drop(outsider);
    runtime.end(&new.container_id).unwrap();
    runtime.until_empty().unwrap();
}
