//! A node with 300 pods of the mesh.

use std::time::{Duration, Instant};

use crate::common::flows::Flow;
use integration::{App, Call, PluginCall, SERVICES, Verbs, number};
use nix::sys::signal::Signal;

use super::*;

const PODS: usize = 300;

/// The most that a restart may take until every pod is verified.
const VERIFIED: Duration = Duration::from_secs(15);

/// Returns netconfig's metrics.
fn metrics(deployed: &DeployedNode) -> anyhow::Result<String> {
    let socket = inpod_service::socket(&deployed.node.run_dir(), "netconfig");
    Verbs::at(&socket)?.metrics(&socket)
}

/// Returns how many rule sets this run of netconfig has verified.
fn verified(deployed: &DeployedNode) -> anyhow::Result<f64> {
    let name = "inpod_netconfig_rules_duration_seconds_count{operation=\"verify\",result=\"OK\"}";
    Ok(number(&metrics(deployed)?, name))
}

/// Returns the lines by which this run of netconfig has counted rules that differed.
fn differing(deployed: &DeployedNode) -> Vec<String> {
    let metrics = metrics(deployed).unwrap();
    let counts = |line: &&str| line.starts_with("inpod_netconfig_rules_differing_total");
    let counted = metrics
        .lines()
        .filter(counts)
        .filter(|line| !line.ends_with(" 0"));
    counted.map(str::to_owned).collect()
}

/// Waits until a ztunnel has acknowledged every pod.
fn until_served(deployed: &DeployedNode) {
    eventually("ztunnel serves every pod", VERIFIED, || {
        let state = deployed.node.ztunnel_state()?;
        let pods = state.get("pods").and_then(|pods| pods.as_array());
        let served = pods
            .into_iter()
            .flatten()
            .filter(|pod| pod["state"] == "running");
        let served = served.count();
        ensure!(served == PODS, "{served} of {PODS} are");
        anyhow::Ok(())
    })
    .unwrap();
}

/// Starts pods, four ADDs at once.
fn fill(deployed: &DeployedNode) -> Vec<Living> {
    let pods = deployed.sandboxes(&[Mesh::Inside; PODS]).unwrap();
    deployed.until_known(&pods).unwrap();
    let calls = pods.iter().map(|pod| deployed.call(Call::add, pod));
    let calls: Vec<_> = calls.collect::<Result<_, _>>().unwrap();
    PluginCall::all_succeed(&calls).unwrap();
    inhabited(deployed, pods).collect()
}

/// Restarts a service; returns once every pod is verified, of which the broker does nothing.
fn restart(deployed: &DeployedNode, service: &str) {
    let before = verified(deployed).unwrap();
    deployed.node.stop(service, Signal::SIGKILL).unwrap();
    let began = Instant::now();
    deployed.start_service(service).unwrap();
    deployed.node.ready().unwrap();
    let all = match service {
        "netconfig" => 300.0,
        "pod-events" => before + 300.0,
        _ => before,
    };
    eventually("every pod is verified", VERIFIED, || {
        let verified = verified(deployed)?;
        ensure!(verified >= all, "{verified} of {all} verified");
        anyhow::Ok(())
    })
    .unwrap();
    let took = began.elapsed();
    assert!(took < VERIFIED, "{service}: {took:?}");
    until_enrolled(deployed, PODS);
}

#[test]
fn three_hundred_pods_are_enrolled_and_verified_after_every_restart_and_no_connection_ends() {
    if !integration::is_full_run() {
        return;
    }
    let deployed = running();
    let [outsider] = start(&deployed, [Mesh::Outside]);
    let _outside = App::start(&outsider.pod.netns, PORT).unwrap();
    let living = fill(&deployed);
    until_enrolled(&deployed, PODS);
    for living in &living {
        assert_ne!(
            living.pod.ruleset().unwrap(),
            "",
            "{}",
            living.pod.spec.name
        );
    }
    let to = SocketAddr::new(outsider.pod.v4.into(), PORT);
    let some: Vec<_> = living.iter().step_by(PODS / 10).collect();
    let flows = some.iter().map(|it| Flow::open(&it.pod, to).unwrap());
    let flows: Vec<_> = flows.collect();
    for service in SERVICES {
        restart(&deployed, service);
        for (flow, living) in flows.iter().zip(&some) {
            flow.goes_on().unwrap();
            let path = [(&living.pod, 15001)];
            assert_path(&deployed, &living.pod, &outsider.pod, &path);
        }
    }
    until_served(&deployed);
    assert_eq!(differing(&deployed), [""; 0]);
}
