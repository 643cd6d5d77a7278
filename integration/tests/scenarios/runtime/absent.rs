//! The agent is missing: pods outside the mesh start, others wait or join later.

use std::net::SocketAddr;

use inpod_proto::podevents::v1::PodState;
use integration::{App, Node, Pod, Spec};

use crate::runtime::{
    PORT,
    chain::PRIMARY,
    containerd::Runtime,
    failures::{assert_error, enrol_shop, start_agent, stop_agent},
    recorder::{record, recorded},
    sandboxes::{NOTHING, in_the_mesh, reached_through_ztunnel},
};

/// CNI's code for "try again later" (spec, Error).
const TRY_AGAIN_LATER: u64 = 11;

/// Returns a pod that every cluster has.
fn of(namespace: &str, name: &str) -> Spec {
    Spec {
        namespace: namespace.to_owned(),
        ..Spec::new(name)
    }
}

#[test]
fn while_the_agent_is_away_what_it_needs_itself_starts_and_a_pod_of_an_enrolled_namespace_waits_with_code_11()
 {
    let runtime = Runtime::running().unwrap();
    record(&runtime.chain).unwrap();
    enrol_shop(&runtime);
    stop_agent(&runtime);
    // DNS and ztunnel have their own namespaces; the agent uses the node's network.
    let dns = of("kube-system", "coredns");
    let ztunnel = of("istio-system", "ztunnel").label("istio.io/dataplane-mode", "none");
    let agent = of("istio-system", "inpod");
    for spec in [&dns, &ztunnel, &agent] {
        runtime.node.write_manifest(spec).unwrap();
    }
    let started: Vec<Pod> = [dns, ztunnel].map(|spec| runtime.pod(spec).unwrap()).into();
    let agent = runtime.host_network(&agent).unwrap();
    let waiting = of("shop", "web");
    runtime.node.write_manifest(&waiting).unwrap();
    for _ in 0..2 {
        let refused = runtime.cri.run(runtime.config(&waiting)).unwrap_err();
        let message = refused.message();
        assert_error(message, &["the pod waits", "[AGENT_UNAVAILABLE]"]);
    }
    let calls = recorded(&runtime.chain).unwrap();
    let adds = calls.iter().filter(|call| call.verb == "ADD");
    let errors: Vec<_> = adds.map(|call| call.error()).collect();
    let waits = Some(TRY_AGAIN_LATER);
    assert_eq!(errors, [None, None, waits, waits]);
    start_agent(&runtime);
    let web = runtime.pod(waiting).unwrap();
    in_the_mesh(&runtime, &web);
    for pod in &started {
        assert_eq!(pod.traces().unwrap(), NOTHING);
        let known = runtime.node.explain(&pod.spec).unwrap();
        assert_eq!(known.state(), PodState::Out);
    }
    let ids = started.iter().chain([&web]).map(|pod| &pod.container_id);
    for id in ids.chain([&agent]) {
        runtime.end(id).unwrap();
    }
    runtime.until_empty().unwrap();
}

/// A pod's cgroup name must contain a UUID.
pub(crate) fn uid(number: u8) -> String {
    format!("11111111-2222-4333-8444-5555555555{number:02x}")
}

#[test]
fn pods_that_run_before_the_first_install_on_a_node_are_enrolled_late_and_new_ones_by_their_add() {
    let runtime = Runtime::on(Node::new().unwrap()).unwrap();
    let primary = runtime.chain.list("1.0.0", None);
    runtime.chain.write(PRIMARY, &primary).unwrap();
    runtime.chain.remove_ours().unwrap();
    runtime.until_chained(false).unwrap();
    let run = |number, spec: Spec| {
        let pod = runtime
            .pod(Spec {
                uid: uid(number),
                ..spec
            })
            .unwrap();
        // The kubelet shows addresses once the pod runs.
        let addresses = pod.addresses().into();
        let spec = Spec {
            addresses,
            ..pod.spec.clone()
        };
        runtime.node.write_manifest(&spec).unwrap();
        Pod { spec, ..pod }
    };
    let early = run(1, Spec::new("early").ambient());
    let plain = run(2, Spec::new("plain"));
    let _app = App::start(&early.netns, PORT).unwrap();
    runtime.chain.install_ours().unwrap();
    runtime.chain.configure(&[]).unwrap();
    runtime.until_chained(true).unwrap();
    runtime.node.start_all().unwrap();
    runtime.node.ready().unwrap();
    let known = runtime.node.until_whole(&early.spec).unwrap();
    // Its process revealed the pod; no ADD did.
    let sandbox = known.sandbox.unwrap();
    assert_eq!(
        (sandbox.container_id.as_str(), sandbox.network_name.as_str()),
        (early.container_id.as_str(), "")
    );
    let outsider = runtime.node.sandbox(Spec::new("outsider")).unwrap();
    let to = SocketAddr::new(early.v4.into(), PORT);
    let source = reached_through_ztunnel(&runtime, &early, &outsider.netns, to);
    assert_eq!(source, outsider.v4);
    assert_eq!(plain.traces().unwrap(), NOTHING);
    let new = run(3, Spec::new("new").ambient());
    in_the_mesh(&runtime, &new);
    outsider.unmount().unwrap();
    drop(outsider);
    // Their DELs name a network that the ADDs did not.
    for pod in [early, plain, new] {
        runtime.end(&pod.container_id).unwrap();
    }
    runtime.until_empty().unwrap();
}
