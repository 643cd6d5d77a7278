//! Without a ztunnel no pod starts past the mesh, and none of its traffic goes past it.

use integration::{App, Call, connect};
use nix::sys::signal::Signal;

use super::*;

#[test]
fn without_a_ztunnel_an_add_fails_by_that_name_and_leaves_nothing_and_enrolled_pods_stay_closed() {
    let deployed = running();
    let [before, outsider] = start(&deployed, [Mesh::Inside, Mesh::Outside]);
    let _app = App::start(&outsider.pod.netns, PORT).unwrap();
    deployed.node.stop("ztunnel", Signal::SIGKILL).unwrap();
    let pods = deployed.sandboxes(&[Mesh::Inside]).unwrap();
    let (pod, add) = (&pods[0], deployed.call(Call::add, &pods[0]).unwrap());
    let (code, text) = add.run().unwrap().refusal().unwrap();
    assert!(code == 11 && text.contains("ZTUNNEL_LOST"), "{code} {text}");
    assert_eq!(pod.traces().unwrap(), NOTHING);
    let claims = deployed.node.api().claims().unwrap();
    let claimed: Vec<_> = claims.iter().filter_map(|it| it.sandbox.as_ref()).collect();
    assert_eq!(claimed.len(), 1, "{claimed:?}");
    let workloads = deployed.node.api().workloads().unwrap().workloads;
    assert_eq!(workloads.len(), 1, "{workloads:?}");
    for address in outsider.pod.addresses() {
        connect(&before.pod.netns, SocketAddr::new(address, PORT)).unwrap_err();
    }

    deployed.start_ztunnel().unwrap();
    deployed.node.ready().unwrap();
    add.succeed().unwrap();
    for pod in [pod, &before.pod] {
        assert_path(&deployed, pod, &outsider.pod, &[(pod, 15001)]);
    }
}
