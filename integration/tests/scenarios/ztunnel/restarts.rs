//! inpod's processes end without effect on connections; after a ztunnel's end every pod is served again.

use std::net::SocketAddr;

use anyhow::ensure;
use inpod_proto::ztunnelbroker::v1::WorkloadPhase;
use integration::{Call, Pod, SERVICES, TIMEOUT, eventually};
use nix::sys::signal::Signal;

use crate::common::flows::Flow;
use crate::ztunnel::mesh::{FIRST, Mesh, PORT};

const SECOND: &str = "ztunnel-second";

/// Opens one by HBONE, one in plaintext from outside, one in plaintext to the outside.
fn flows(mesh: &Mesh) -> [Flow; 3] {
    let open = |from: &Pod, to: &Pod| Flow::open(from, SocketAddr::new(to.v4.into(), PORT));
    [
        open(&mesh.client, &mesh.server).unwrap(),
        open(&mesh.outsider, &mesh.server).unwrap(),
        open(&mesh.client, &mesh.outsider).unwrap(),
    ]
}

fn assert_go_on(flows: &[Flow]) {
    flows.iter().for_each(|flow| flow.goes_on().unwrap());
}

/// Returns proxies that a ztunnel has started: a pod that was cut and came back counts twice.
fn starts(mesh: &Mesh) -> u64 {
    let metrics = mesh.scene.node.ask_stock_ztunnel(FIRST, "15020/metrics");
    let metrics = metrics.unwrap();
    let line = metrics
        .lines()
        .find(|line| line.starts_with("workload_manager_proxies_started_total"));
    let number = line.and_then(|line| line.split(' ').next_back()?.parse().ok());
    number.expect("a count of starts")
}

fn assert_unnoticed(restart: impl FnOnce(&Mesh)) {
    let mesh = Mesh::new().unwrap();
    let (flows, before) = (flows(&mesh), starts(&mesh));
    assert_eq!(before, 2);
    restart(&mesh);
    mesh.scene.node.ready().unwrap();
    mesh.until_served(FIRST, 2).unwrap();
    assert_go_on(&flows);
    assert_eq!(starts(&mesh), before, "a pod was cut");
    mesh.scene.node.add(&mesh.next).unwrap();
    mesh.reached_by_hbone(&mesh.next, &mesh.server).unwrap();
    assert_go_on(&flows);
}

#[test]
fn a_broker_that_is_stopped_or_killed_and_comes_back_cuts_no_connection() {
    assert_unnoticed(|mesh| {
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            mesh.scene.node.stop("ztunnel-broker", signal).unwrap();
            mesh.scene.start("ztunnel-broker").unwrap();
            mesh.scene.node.ready().unwrap();
        }
    });
}

#[test]
fn the_sudden_death_of_all_of_inpod_cuts_no_connection() {
    assert_unnoticed(|mesh| {
        let node = &mesh.scene.node;
        let kill = |service: &&str| node.stop(service, Signal::SIGKILL);
        SERVICES.iter().try_for_each(kill).unwrap();
        SERVICES
            .iter()
            .try_for_each(|it| mesh.scene.start(it))
            .unwrap();
    });
}

#[test]
fn a_ztunnel_that_was_killed_is_given_every_pod_again_by_its_snapshot() {
    let mesh = Mesh::new().unwrap();
    mesh.scene.node.stop(FIRST, Signal::SIGKILL).unwrap();
    mesh.start(FIRST).unwrap();
    mesh.until_served(FIRST, 2).unwrap();
    mesh.reached_by_hbone(&mesh.client, &mesh.server).unwrap();
    mesh.scene.node.add(&mesh.next).unwrap();
    mesh.reached_by_hbone(&mesh.next, &mesh.server).unwrap();
}

#[test]
fn an_add_whose_ztunnel_is_killed_before_it_answers_succeeds_with_the_next_one() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.scene.node;
    node.until_known(&mesh.next.spec).unwrap();
    node.signal(FIRST, Signal::SIGSTOP).unwrap();
    let add = node.call(Call::add, &mesh.next).start().unwrap();
    eventually("the Add was sent and is not answered", TIMEOUT, || {
        let workloads = node.api().workloads()?.workloads;
        let mut states = workloads.iter().flat_map(|it| &it.states);
        let uid = &mesh.next.spec.uid;
        let sent = states.any(|it| it.uid == *uid && it.phase() == WorkloadPhase::Sent);
        ensure!(sent, "{workloads:?}");
        anyhow::Ok(())
    })
    .unwrap();
    node.stop(FIRST, Signal::SIGKILL).unwrap();
    mesh.start(SECOND).unwrap();
    let outcome = add.wait().unwrap();
    assert_eq!(outcome.code, 0, "{outcome:?}");
    mesh.until_served(SECOND, 3).unwrap();
    node.until_whole(&mesh.next.spec).unwrap();
}

#[test]
fn what_a_ztunnel_is_given_is_its_own_pods_and_it_runs_with_the_capabilities_of_its_chart() {
    let mesh = Mesh::new().unwrap();
    let pid = mesh.scene.node.pid(FIRST).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(status.contains("CapPrm:\t0000000000203000"), "{status}");
    let reported = mesh.scene.node.api().workloads().unwrap();
    let [session] = &reported.sessions[..] else {
        panic!("one session: {reported:?}")
    };
    assert_eq!(session.pod_uid, crate::common::ztunnel_pod::ZTUNNEL);
    assert_eq!(session.peer_pid, i32::try_from(pid).unwrap());
    assert!(mesh.scene.refusals().is_empty());
    let served: Vec<_> = mesh.served(FIRST).unwrap().into_iter().collect();
    assert_eq!(served, [&*mesh.client.spec.uid, &*mesh.server.spec.uid]);
}
