//! Many callers of the service at once.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
    time::{Duration, Instant},
};

use inpod_proto::netconfig::v1::{
    AmbientRedirection, ApplyRulesRequest, Redirection, VerifyRulesRequest, redirection::Mode,
};
use tokio::task::JoinSet;

use crate::harness::{Netconfig, netns_ref, pod_netns, wire};
use crate::support::Fresh;

const CALLERS: usize = 32;
const PODS: usize = 48;

/// Every other number captures DNS.
fn redirection(number: usize) -> Option<Redirection> {
    let ambient = AmbientRedirection {
        dns_capture: number % 2 == 1,
        ..AmbientRedirection::default()
    };
    Some(Redirection {
        mode: Some(Mode::Ambient(ambient)),
    })
}

fn name(number: usize) -> String {
    format!("c{number}")
}

fn proc(netconfig: &Netconfig, entry: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{}/{entry}", netconfig.process.id()))
}

fn descriptors(netconfig: &Netconfig) -> usize {
    fs::read_dir(proc(netconfig, "fd")).unwrap().count()
}

/// Returns netconfig's threads in other netns. A thread may end during the scan.
fn strays(netconfig: &Netconfig) -> usize {
    let home = fs::metadata(proc(netconfig, "ns/net")).unwrap().ino();
    let tasks = fs::read_dir(proc(netconfig, "task")).unwrap();
    let netns = tasks.filter_map(|task| fs::metadata(task.unwrap().path().join("ns/net")).ok());
    netns.filter(|netns| netns.ino() != home).count()
}

pub(crate) async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Each caller handles its pods in order, as a runtime does.
#[tokio::test]
async fn many_callers_lose_no_update_and_leave_no_thread_abroad_and_no_descriptor() {
    let mut netconfig = Netconfig::start().await;
    let pods: Vec<_> = (0..PODS).map(|_| pod_netns()).collect();
    // Not counted: descriptors that the first calls open for good.
    netconfig.claim(&name(0), &pods[0]).await.unwrap();
    apply(&netconfig, 0, 0).await;
    assert!(netconfig.release(&name(0)).await);
    eventually("a thread is in a foreign netns", || strays(&netconfig) == 0).await;
    let before = descriptors(&netconfig);
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let numbers: Vec<_> = (caller..PODS).step_by(CALLERS).collect();
        let netns: Vec<_> = numbers
            .iter()
            .map(|number| netns_ref(&pods[*number]))
            .collect();
        let client = netconfig.client.clone();
        callers.spawn(async move {
            let mut netconfig = client;
            for (number, netns) in numbers.into_iter().zip(netns) {
                let request = inpod_proto::netconfig::v1::ClaimNetnsRequest {
                    sandbox: wire(&name(number)),
                    netns: Some(netns),
                    addresses: vec!["10.9.0.1".to_owned()],
                    ..inpod_proto::netconfig::v1::ClaimNetnsRequest::default()
                };
                netconfig.claim_netns(request).await.unwrap();
                for kind in [number + 1, number] {
                    netconfig
                        .apply_rules(request_of(number, kind))
                        .await
                        .unwrap();
                }
            }
        });
    }
    while let Some(done) = callers.join_next().await {
        done.unwrap();
    }
    for number in 0..PODS {
        assert_eq!(
            differences(&netconfig, number, number).await,
            [""; 0],
            "{number}"
        );
        assert_ne!(
            differences(&netconfig, number, number + 1).await,
            [""; 0],
            "{number}"
        );
    }
    for number in 0..PODS {
        assert!(netconfig.release(&name(number)).await);
    }
    eventually("a thread is in a foreign netns", || strays(&netconfig) == 0).await;
    eventually("descriptors were left open", || {
        descriptors(&netconfig) <= before
    })
    .await;
    // It is released, but its rules stay.
    let is_ruled = |pod: &Fresh| pod.nft("list ruleset").contains("redirect to :15001");
    assert!(pods.iter().all(is_ruled));
}

/// All callers want different rules for one pod, which ends with those of one, complete.
#[tokio::test]
async fn callers_of_one_pod_take_turns() {
    let mut netconfig = Netconfig::start().await;
    let pod = pod_netns();
    netconfig.claim(&name(0), &pod).await.unwrap();
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let mut client = netconfig.client.clone();
        callers.spawn(async move {
            for round in 0..4 {
                client
                    .apply_rules(request_of(0, caller + round))
                    .await
                    .unwrap();
            }
        });
    }
    while let Some(done) = callers.join_next().await {
        done.unwrap();
    }
    let left = [
        differences(&netconfig, 0, 0).await,
        differences(&netconfig, 0, 1).await,
    ];
    let clean = left.iter().filter(|differences| differences.is_empty());
    assert_eq!(clean.count(), 1, "{left:?}");
}

fn request_of(number: usize, kind: usize) -> ApplyRulesRequest {
    ApplyRulesRequest {
        sandbox: wire(&name(number)),
        redirection: redirection(kind),
        probe_addresses: Vec::new(),
        require_listeners: false,
    }
}

async fn apply(netconfig: &Netconfig, number: usize, kind: usize) {
    let mut client = netconfig.client.clone();
    client.apply_rules(request_of(number, kind)).await.unwrap();
}

async fn differences(netconfig: &Netconfig, number: usize, kind: usize) -> Vec<String> {
    let mut client = netconfig.client.clone();
    let request = VerifyRulesRequest {
        sandbox: wire(&name(number)),
        redirection: redirection(kind),
    };
    client
        .verify_rules(request)
        .await
        .unwrap()
        .into_inner()
        .differences
}
