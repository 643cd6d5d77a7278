//! The chain after a reboot: the first file and its writer while the agent is missing.

use std::net::SocketAddr;

use integration::{App, Pod, Spec, ask};

use crate::runtime::{
    PORT,
    absent::uid,
    chain::PRIMARY,
    containerd::Runtime,
    failures::{assert_error, enrol_shop, start_agent, stop_agent},
    sandboxes::{NOTHING, in_the_mesh, reached_through_ztunnel},
};

/// Our file, which sorts before the primary's.
const OWNED: &str = "00-inpod.conflist";

fn without_agent() -> Runtime {
    let runtime = Runtime::running().unwrap();
    enrol_shop(&runtime);
    stop_agent(&runtime);
    runtime
}

/// Writes the file like its component at its start.
fn primary_writes(runtime: &Runtime) {
    let list = runtime.chain.list("1.0.0", None);
    runtime.chain.write(PRIMARY, &list).unwrap();
}

/// The pod has no label, its namespace does.
fn web() -> Spec {
    Spec {
        uid: uid(1),
        ..Spec::new("web")
    }
}

// scenario: 4
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
        assert_error(refused.message(), &["the pod waits", "[AGENT_UNAVAILABLE]"]);
        primary_writes(&runtime);
    }
    start_agent(&runtime);
    let pod = runtime.pod(web()).unwrap();
    in_the_mesh(&runtime, &pod);
    runtime.end(&pod.container_id).unwrap();
    runtime.until_empty().unwrap();
}

// scenario: 4
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
    start_agent(&runtime);
    runtime.node.until_whole(&pod.spec).unwrap();
    let source = reached_through_ztunnel(&runtime, &pod, &outsider.netns, to);
    assert_eq!(source, outsider.v4);
    // Their DELs do not reach us either.
    outsider.unmount().unwrap();
    drop(outsider);
    runtime.end(&pod.container_id).unwrap();
    runtime.until_empty().unwrap();
}
