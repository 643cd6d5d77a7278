//! Services and ztunnels restart or die while pods run.

use std::{thread, time::Duration};

use crate::common::mesh::{Mesh, PORT};
use anyhow::ensure;
use integration::{App, Node, SERVICES, Spec, TIMEOUT, eventually, exchange};
use nix::sys::signal::Signal;

use crate::netns::lifecycle::open;

/// Three enrolled pods, each with a connection that sends data every tenth of a second, must survive `happens`.
fn survives(happens: impl FnOnce(&Node)) {
    let mesh = Mesh::new().unwrap();
    let c = mesh.node.pod(Spec::new("c").ambient()).unwrap();
    let _app = App::start(&c.netns, PORT).unwrap();
    let pairs = [(&mesh.a, &mesh.b), (&mesh.b, &c), (&mesh.outsider, &mesh.a)];
    let mut live: Vec<_> = pairs
        .iter()
        .map(|(from, to)| open(from, to).unwrap())
        .collect();
    let done = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        let talk = scope.spawn(|| {
            let mut words = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                live.iter_mut()
                    .for_each(|stream| exchange(stream, "still here").unwrap());
                words += 1;
                thread::sleep(Duration::from_millis(100));
            }
            words
        });
        happens(&mesh.node);
        mesh.node.ready().unwrap();
        for pod in [&mesh.a, &mesh.b, &c] {
            mesh.node.until_whole(&pod.spec).unwrap();
        }
        mesh.node.pod(Spec::new("d").ambient()).unwrap();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(talk.join().unwrap() > 0);
    });
    mesh.between_enrolled_pods().unwrap();
    mesh.reached_from_outside().unwrap();
}

fn restart(node: &Node, services: &[&str], signal: Signal) {
    services
        .iter()
        .for_each(|service| node.stop(service, signal).unwrap());
    services
        .iter()
        .for_each(|service| node.start(service).unwrap());
}

#[test]
fn live_connections_survive_a_restart_of_pod_events() {
    survives(|node| restart(node, &["pod-events"], Signal::SIGTERM));
}

#[test]
fn live_connections_survive_a_restart_of_netconfig() {
    survives(|node| restart(node, &["netconfig"], Signal::SIGTERM));
}

#[test]
fn live_connections_survive_a_restart_of_the_broker() {
    survives(|node| restart(node, &["ztunnel-broker"], Signal::SIGTERM));
}

#[test]
fn live_connections_survive_a_restart_of_all_three_at_once() {
    survives(|node| restart(node, &SERVICES, Signal::SIGTERM));
}

// scenario: 50
#[test]
fn live_connections_survive_the_sudden_death_of_each_service_and_of_all_at_once() {
    survives(|node| {
        for service in SERVICES {
            restart(node, &[service], Signal::SIGKILL);
            node.ready().unwrap();
        }
        restart(node, &SERVICES, Signal::SIGKILL);
    });
}

// scenario: 7
#[test]
fn a_restarted_ztunnel_is_given_every_pod_again() {
    let mesh = Mesh::new().unwrap();
    restart_ztunnel(&mesh.node);
    mesh.between_enrolled_pods().unwrap();
    mesh.reached_from_outside().unwrap();
}

fn restart_ztunnel(node: &Node) {
    node.stop("ztunnel", Signal::SIGKILL).unwrap();
    node.start_ztunnel(&[]).unwrap();
    eventually("ztunnel is ready again", TIMEOUT, || {
        let state = node.ztunnel_state()?;
        ensure!(
            state["ready"] == true && state["pods"].as_array().is_some_and(|pods| pods.len() == 2),
            "{state}"
        );
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn rules_that_were_lost_while_netconfig_was_away_are_repaired_when_it_is_back() {
    let mesh = Mesh::new().unwrap();
    mesh.node.stop("netconfig", Signal::SIGKILL).unwrap();
    mesh.b.exec(&["nft", "flush", "ruleset"]).unwrap();
    mesh.node.start("netconfig").unwrap();
    // Until netconfig has read the rules, pod-events tells what it knew before.
    eventually("the rules are repaired", TIMEOUT, || {
        mesh.reached_from_outside()
    })
    .unwrap();
    mesh.node.until_whole(&mesh.b.spec).unwrap();
}

#[test]
fn a_sandbox_that_ended_while_pod_events_was_away_is_forgotten_when_it_is_back() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    node.stop("netconfig", Signal::SIGKILL).unwrap();
    pod.unmount().unwrap();
    node.start("netconfig").unwrap();
    node.start("pod-events").unwrap();
    eventually("it is forgotten", TIMEOUT, || {
        ensure!(node.explain(&pod.spec)?.sandbox.is_none(), "it is recorded");
        ensure!(
            node.api().workloads()?.workloads.is_empty(),
            "ztunnel is to serve it"
        );
        anyhow::Ok(())
    })
    .unwrap();
}
