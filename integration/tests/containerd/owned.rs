//! The chain after a reboot: whose file is first, and who writes it when the agent is not there yet.

use std::net::SocketAddr;

use integration::{App, Pod, Spec, ask};

use crate::{
    PORT,
    absent::uid,
    chain::PRIMARY,
    failures::{assert_told, come_back, enrol_shop, go_away},
    runtime::Runtime,
    sandboxes::{NOTHING, in_the_mesh, reached_through_ztunnel},
};

/// Ours, ahead of the primary's.
const OWNED: &str = "00-inpod.conflist";

/// A node whose namespace shop is enrolled, without its agent.
fn without_agent() -> Runtime {
    let runtime = Runtime::running().unwrap();
    enrol_shop(&runtime);
    go_away(&runtime);
    runtime
}

/// The primary's component starts, and writes its own list as it knows it.
fn primary_writes(runtime: &Runtime) {
    let list = runtime.chain.list("1.0.0", None);
    runtime.chain.write(PRIMARY, &list).unwrap();
}

/// A pod that nobody labelled, of a namespace that is.
fn web() -> Spec {
    Spec {
        uid: uid(1),
        ..Spec::new("web")
    }
}

#[test]
fn where_our_list_is_first_a_pod_waits_for_the_agent_whatever_the_primarys_owner_writes() {
    let runtime = without_agent();
    let owned = runtime.chain.list("1.0.0", Some(&[]));
    runtime.chain.write(OWNED, &owned).unwrap();
    primary_writes(&runtime);
    runtime.restart_containerd().unwrap();
    runtime.until_chained(true).unwrap();
    runtime.node.write_manifest(&web()).unwrap();
    for _ in 0..2 {
        let refused = runtime.cri.run(runtime.config(&web())).unwrap_err();
        assert_told(refused.message(), &["the pod waits", "[AGENT_UNAVAILABLE]"]);
        primary_writes(&runtime);
    }
    come_back(&runtime);
    let pod = runtime.pod(web()).unwrap();
    in_the_mesh(&runtime, &pod);
    runtime.end(&pod.container_id).unwrap();
    runtime.until_empty().unwrap();
}

#[test]
fn where_we_stand_in_the_primarys_list_a_pod_slips_past_when_its_owner_writes_it_anew_and_is_found_late()
 {
    let runtime = without_agent();
    primary_writes(&runtime);
    runtime.restart_containerd().unwrap();
    runtime.until_chained(false).unwrap();
    let pod = runtime.pod(web()).unwrap();
    let spec = Spec {
        addresses: pod.addresses().into(),
        ..pod.spec.clone()
    };
    runtime.node.write_manifest(&spec).unwrap();
    let pod = Pod { spec, ..pod };
    let _app = App::start(&pod.netns, PORT).unwrap();
    let outsider = runtime.node.sandbox(Spec::new("outsider")).unwrap();
    let to = SocketAddr::new(pod.v4.into(), PORT);
    let before = runtime.node.accesses().unwrap().len();
    ask(&outsider.netns, to).unwrap();
    assert_eq!(runtime.node.accesses().unwrap().len(), before);
    assert_eq!(pod.traces().unwrap(), NOTHING);
    come_back(&runtime);
    runtime.node.until_whole(&pod.spec).unwrap();
    let source = reached_through_ztunnel(&runtime, &pod, &outsider.netns, to);
    assert_eq!(source, outsider.v4);
    // Its DELs do not pass us either.
    outsider.unmount().unwrap();
    drop(outsider);
    runtime.end(&pod.container_id).unwrap();
    runtime.until_empty().unwrap();
}
