//! Pods that ztunnel cannot serve.

use integration::{App, Call, TIMEOUT, eventually};
use nix::sys::signal::Signal;

use crate::ztunnel::mesh::{FIRST, HBONE, Mesh};

#[test]
fn an_add_that_ztunnel_refuses_fails_in_its_words_and_neither_it_nor_others_are_held_up() {
    let mesh = Mesh::without_pods().unwrap();
    let node = &mesh.scene.node;
    let squatter = App::start(&mesh.next.netns, HBONE).unwrap();
    let call = node.call(Call::add, &mesh.next).timeout_seconds(8);
    let outcome = call.run().unwrap();
    let (code, words) = outcome.refusal().unwrap();
    assert_eq!(code, 11, "{words}");
    assert!(words.contains("failure to start proxy"), "{words}");
    assert!(mesh.next.traces().unwrap().is_empty());
    // A pending pod would be retried and make ztunnel unready.
    mesh.until_served(FIRST, 0).unwrap();
    node.add(&mesh.client).unwrap();
    node.add(&mesh.server).unwrap();
    mesh.until_served(FIRST, 2).unwrap();
    mesh.reached_by_hbone(&mesh.client, &mesh.server).unwrap();

    drop(squatter);
    eventually("the runtime's next attempt succeeds", TIMEOUT, || {
        node.add(&mesh.next).map(drop)
    })
    .unwrap();
    mesh.until_served(FIRST, 3).unwrap();
    mesh.reached_by_hbone(&mesh.next, &mesh.server).unwrap();
}

#[test]
fn a_pod_whose_port_is_taken_when_ztunnel_comes_back_holds_up_no_other_and_is_served_later() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.scene.node;
    node.add(&mesh.next).unwrap();
    mesh.until_served(FIRST, 3).unwrap();
    node.stop(FIRST, Signal::SIGKILL).unwrap();
    let squatter = App::start(&mesh.next.netns, HBONE).unwrap();
    mesh.start(FIRST).unwrap();
    mesh.until_served(FIRST, 2).unwrap();
    mesh.reached_by_hbone(&mesh.client, &mesh.server).unwrap();
    drop(squatter);
    eventually("it is served again", 2 * TIMEOUT, || {
        let served = mesh.served(FIRST)?;
        anyhow::ensure!(served.len() == 3, "{served:?}");
        anyhow::Ok(())
    })
    .unwrap();
    mesh.until_served(FIRST, 3).unwrap();
    mesh.reached_by_hbone(&mesh.next, &mesh.server).unwrap();
}
