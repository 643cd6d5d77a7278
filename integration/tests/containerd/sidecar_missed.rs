//! A sidecar pod that started without the plugin waits in its init container and serves once the agent discovers it.

use integration::{Node, TIMEOUT, eventually};

use crate::{
    api_server::ApiServer,
    chain::PRIMARY,
    kubelet::{Resident, Role, Shape, Stage, import},
    runtime::Runtime,
    sandboxes::NOTHING,
    sidecar::{end, outsider, passes_its_proxy, until_redirected},
    sidecar_repair::{report, start_repair, until_counted},
    unprivileged::assert_unprivileged,
};

/// Returns a node with only the primary's plugins; nothing of inpod runs.
pub(crate) fn without_us() -> Runtime {
    let runtime = Runtime::on(Node::new().unwrap()).unwrap();
    let primary = runtime.chain.list("1.0.0", None);
    runtime.chain.write(PRIMARY, &primary).unwrap();
    runtime.chain.remove_ours().unwrap();
    runtime.until_chained(false).unwrap();
    import(&runtime);
    runtime
}

pub(crate) fn install(runtime: &Runtime) {
    runtime.chain.install_ours().unwrap();
    runtime.chain.configure(&[]).unwrap();
    runtime.until_chained(true).unwrap();
}

/// A kubelet's round in which validation fails and nothing after it starts; returns the termination message.
pub(crate) fn fails(pod: &mut Resident<'_>) -> String {
    let (code, message) = pod.sync().unwrap().failure();
    assert_eq!(code, 126, "{message}");
    for words in [
        "this pod is not redirected (IPv4: a connection to 127.0.0.6:15002 was refused; IPv6: a connection to ",
        "tried as uid 1337 for 2 s",
        "recreate the pod",
    ] {
        assert!(message.contains(words), "{words}: {message}");
    }
    assert_eq!(pod.started(), [Role::Validation]);
    message
}

#[test]
fn a_pod_that_started_without_the_plugin_fails_validation_is_redirected_in_place_and_serves() {
    let runtime = without_us();
    let outsider = outsider(&runtime);
    let shape = Shape::Plain;
    let mut early = Resident::new(&runtime, shape, shape.spec("early", 1)).unwrap();
    let message = fails(&mut early);
    let server = ApiServer::start(runtime.node.netns()).unwrap();
    report(&server, &early, &message);
    assert_eq!(early.pod.traces().unwrap(), NOTHING);
    install(&runtime);
    runtime.node.start_all().unwrap();
    runtime.node.ready().unwrap();
    start_repair(&runtime, &server, &[]);
    // A process of the sandbox revealed the pod; its network is not known yet.
    let known = until_redirected(&runtime, &early.pod);
    let sandbox = known.sandbox.unwrap();
    assert_eq!(sandbox.network_name, "");
    assert_eq!(sandbox.container_id, early.pod.container_id);
    assert_eq!(early.sync().unwrap(), Stage::Running);
    assert_unprivileged(&early);
    passes_its_proxy(&early, &outsider);
    // `repair` only had to wait.
    until_counted(&runtime, "repair", "success", 1);
    let reported = eventually("it is reported", TIMEOUT, || {
        server.event("RepairBrokenPod")
    });
    let reported = reported.unwrap();
    assert!(reported.contains("redirected now"), "{reported}");
    assert_eq!(server.asked(), NOTHING);
    let late = shape.spec("late", 2);
    let late = Resident::running(&runtime, shape, late).unwrap();
    until_redirected(&runtime, &late.pod);
    passes_its_proxy(&late, &outsider);
    end(&runtime, &[&early, &late, &outsider]);
}
