//! A pod in the mesh: its listeners, the sources that applications see, and uncaptured traffic.

use std::net::SocketAddr;

use crate::common::mesh::{Mesh, PORT};
use anyhow::{Context as _, ensure};
use integration::{TIMEOUT, ask, connect_marked, counters, eventually, source_seen};
use nix::sys::signal::Signal;

#[test]
fn between_two_enrolled_pods_traffic_passes_15001_of_the_one_and_15006_of_the_other() {
    let mesh = Mesh::new().unwrap();
    mesh.between_enrolled_pods().unwrap();
}

/// A pod that no ztunnel serves is the negative control: it comes in by 15006, without an identity.
#[test]
fn by_hbone_traffic_passes_15001_and_15008_and_both_ends_prove_who_they_are() {
    let mesh = Mesh::by_hbone().unwrap();
    mesh.a_reaches_b_by(15008).unwrap();
    mesh.reached_from_outside().unwrap();
    let peers = || {
        let all = mesh.node.accesses()?.into_iter();
        let peers = all.filter(|it| it.event == "closed" && it.listener != 15006);
        let peers: Vec<_> = peers.map(|it| (it.uid, it.peer)).collect();
        ensure!(peers.len() == 4, "{peers:?}");
        anyhow::Ok(peers)
    };
    let peers = eventually("the connections have ended", TIMEOUT, peers).unwrap();
    let (a, b) = (&mesh.a.spec, &mesh.b.spec);
    for (own, other) in [(a, b), (b, a)] {
        let (namespace, name) = (&other.namespace, &other.name);
        let name = format!("spiffe://cluster.local/ns/{namespace}/sa/sa-{name}");
        let wanted = (own.uid.clone(), Some(name));
        assert_eq!(
            peers.iter().filter(|it| **it == wanted).count(),
            2,
            "{peers:?}"
        );
    }
}

#[test]
fn from_outside_the_mesh_traffic_passes_15006() {
    let mesh = Mesh::new().unwrap();
    mesh.reached_from_outside().unwrap();
}

#[test]
fn to_outside_the_mesh_traffic_passes_15001() {
    let mesh = Mesh::new().unwrap();
    mesh.to_outside().unwrap();
}

#[test]
fn loopback_is_not_captured() {
    let mesh = Mesh::new().unwrap();
    mesh.loopback().unwrap();
}

#[test]
fn a_pod_that_calls_itself_by_its_own_address_is_not_captured() {
    let mesh = Mesh::new().unwrap();
    mesh.itself().unwrap();
}

#[test]
fn marked_packets_are_not_captured_on_their_way_out() {
    let mesh = Mesh::new().unwrap();
    let before = mesh.node.accesses().unwrap().len();
    for address in mesh.outsider.addresses() {
        let to = SocketAddr::new(address, PORT);
        let stream = connect_marked(&mesh.a.netns, to, Some(0x539)).unwrap();
        let (source, _stream) = source_seen(stream).unwrap();
        assert!(mesh.a.addresses().contains(&source));
    }
    assert_eq!(
        mesh.node.accesses().unwrap().len(),
        before,
        "a listener took a marked connection"
    );
}

#[test]
fn the_nft_counters_agree_with_the_access_log() {
    let mesh = Mesh::new().unwrap();
    for address in mesh.b.addresses() {
        ask(&mesh.a.netns, SocketAddr::new(address, PORT)).unwrap();
    }
    // Only a connection's first packet traverses a nat rule.
    assert_eq!(counters(&mesh.a, "redirect to :15001").unwrap(), 2);
    assert_eq!(counters(&mesh.a, "redirect to :15006").unwrap(), 0);
    assert_eq!(counters(&mesh.b, "redirect to :15006").unwrap(), 2);
    assert_eq!(counters(&mesh.b, "redirect to :15001").unwrap(), 0);
    let taken = |uid: &str, listener| {
        let accesses = mesh.node.accesses().unwrap();
        accesses
            .iter()
            .filter(|access| {
                access.event == "accepted" && access.uid == uid && access.listener == listener
            })
            .count()
    };
    assert_eq!(
        (
            taken(&mesh.a.spec.uid, 15001),
            taken(&mesh.b.spec.uid, 15006)
        ),
        (2, 2)
    );
}

#[test]
fn a_pod_without_a_label_costs_no_rules_and_no_word_to_ztunnel() {
    let mesh = Mesh::new().unwrap();
    assert_eq!(mesh.outsider.traces().unwrap(), Vec::<String>::new());
    let state = mesh.node.ztunnel_state().unwrap().to_string();
    assert!(
        state.contains(&mesh.a.spec.uid) && !state.contains(&mesh.outsider.spec.uid),
        "{state}"
    );
    assert_eq!(mesh.node.api().claims().unwrap().len(), 2);
    assert_eq!(mesh.node.api().workloads().unwrap().workloads.len(), 2);
}

/// Breaks one thing in both enrolled pods, so that the named check fails. Before, the checks pass, also without
/// pod-events, which would repair it.
fn breaks(what: &[&[&str]], check: fn(&Mesh) -> anyhow::Result<()>) {
    let mesh = Mesh::new().unwrap();
    mesh.node.stop("pod-events", Signal::SIGKILL).unwrap();
    check(&mesh).unwrap();
    for pod in [&mesh.a, &mesh.b] {
        for command in what {
            pod.exec(command).unwrap();
        }
    }
    assert!(check(&mesh).is_err(), "nobody noticed");
}

#[test]
fn without_the_nat_rules_for_output_traffic_between_enrolled_pods_misses_15001() {
    breaks(
        &[&["nft", "flush", "chain", "inet", "inpod-nat", "output"]],
        Mesh::between_enrolled_pods,
    );
}

#[test]
fn without_the_nat_rules_for_prerouting_traffic_from_outside_misses_15006() {
    breaks(
        &[&["nft", "flush", "chain", "inet", "inpod-nat", "prerouting"]],
        Mesh::reached_from_outside,
    );
}

#[test]
fn without_the_mangle_rules_for_prerouting_the_answers_do_not_come_back_to_ztunnel() {
    breaks(
        &[&[
            "nft",
            "flush",
            "chain",
            "inet",
            "inpod-mangle",
            "prerouting",
        ]],
        Mesh::reached_from_outside,
    );
}

#[test]
fn without_the_mangle_rules_for_output_the_answers_do_not_come_back_to_ztunnel() {
    breaks(
        &[&["nft", "flush", "chain", "inet", "inpod-mangle", "output"]],
        Mesh::reached_from_outside,
    );
}

#[test]
fn without_the_ip_rule_the_answers_do_not_come_back_to_ztunnel() {
    breaks(
        &[&["ip", "rule", "del", "pref", "500"]],
        Mesh::reached_from_outside_v4,
    );
    breaks(
        &[&["ip", "-6", "rule", "del", "pref", "500"]],
        Mesh::reached_from_outside_v6,
    );
}

#[test]
fn without_the_route_the_answers_do_not_come_back_to_ztunnel() {
    breaks(
        &[&["ip", "route", "flush", "table", "10500"]],
        Mesh::reached_from_outside_v4,
    );
    breaks(
        &[&["ip", "-6", "route", "flush", "table", "10500"]],
        Mesh::reached_from_outside_v6,
    );
}

/// Repaired within moments: only one of many attempts sees the state in between.
#[test]
fn broken_rules_are_explained_and_fail_a_check_until_they_are_repaired() {
    let mesh = Mesh::new().unwrap();
    let tamper = || {
        let command = ["nft", "flush", "chain", "inet", "inpod-nat", "prerouting"];
        mesh.b.exec(&command)
    };
    eventually("it is explained", TIMEOUT, || {
        tamper()?;
        let rules = mesh.node.explain(&mesh.b.spec)?.rules;
        let differences = rules.context("no rules")?.differences;
        ensure!(!differences.is_empty(), "nothing differs");
        anyhow::Ok(())
    })
    .unwrap();
    eventually("a check fails", TIMEOUT, || {
        let sandbox = mesh.node.explain(&mesh.b.spec)?.sandbox;
        let sandbox = sandbox.context("no sandbox")?;
        tamper()?;
        let error = mesh.node.api().check(sandbox).err().context("no error")?;
        ensure!(format!("{error:#}").contains("inpod-nat"), "{error:#}");
        anyhow::Ok(())
    })
    .unwrap();
    mesh.node.until_whole(&mesh.b.spec).unwrap();
    mesh.reached_from_outside().unwrap();
}

// scenario: 2
#[test]
fn rules_an_ip_rule_and_a_route_that_somebody_takes_away_are_put_back_at_once_and_it_is_reported() {
    let mesh = Mesh::new().unwrap();
    for (command, reported) in [
        (
            &["nft", "flush", "ruleset"][..],
            "table inpod-nat is missing",
        ),
        (&["ip", "rule", "del", "pref", "500"], "the IPv4 ip rule"),
        (
            &["ip", "-6", "route", "flush", "table", "10500"],
            "the IPv6 route",
        ),
    ] {
        mesh.b.exec(command).unwrap();
        eventually("it is repaired", TIMEOUT, || {
            let known = mesh.node.explain(&mesh.b.spec)?;
            let differences = known.rules.context("no rules")?.differences;
            ensure!(differences.is_empty(), "{differences:?}");
            let mended = known
                .timeline
                .iter()
                .any(|entry| entry.event.contains(reported));
            ensure!(mended, "{:?}", known.timeline);
            anyhow::Ok(())
        })
        .unwrap();
        mesh.reached_from_outside().unwrap();
    }
}

#[test]
fn both_ends_of_an_enrolled_pair_may_be_asked_at_once_over_many_connections() {
    let mesh = Mesh::new().unwrap();
    let results = std::thread::scope(|scope| {
        let there = scope.spawn(|| fifty_times(&mesh.a, &mesh.b));
        let back = scope.spawn(|| fifty_times(&mesh.b, &mesh.a));
        [there.join().unwrap(), back.join().unwrap()]
    });
    results.into_iter().for_each(Result::unwrap);
}

fn fifty_times(from: &integration::Pod, to: &integration::Pod) -> anyhow::Result<()> {
    for _ in 0..50 {
        let source = ask(&from.netns, SocketAddr::new(to.v4.into(), PORT))?;
        ensure!(source == from.v4, "the application saw {source}");
    }
    Ok(())
}
