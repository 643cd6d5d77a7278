//! The count of UDP flows past capture, per netns and as a metric of the node.

use std::net::UdpSocket;

use inpod_proto::netconfig::v1::{InspectNetnsRequest, inspect_netns_request::Target};

use super::{
    start,
    watcher::{Watcher, eventually},
};
use crate::{
    harness::{Netconfig, pod_netns, wire},
    support::Fresh,
};

const METRIC: &str = "uncaptured_udp_flows_total";

/// Opens a flow of several packets to a neighbour that does not exist.
fn open_flow(pod: &Fresh) {
    pod.run(|| {
        let socket = UdpSocket::bind("10.9.0.1:0").unwrap();
        for _ in 0..3 {
            socket.send_to(b"?", "10.9.0.2:9").unwrap();
        }
    });
}

async fn inspected(netconfig: &mut Netconfig) -> u64 {
    let request = InspectNetnsRequest {
        target: wire("c1").map(Target::Sandbox),
        ..InspectNetnsRequest::default()
    };
    let response = netconfig.client.inspect_netns(request).await.unwrap();
    response.into_inner().uncaptured_udp_flows
}

/// Has netconfig read the netns, as a notification and the clock do, and waits until the metric has the value.
async fn await_metric(netconfig: &Netconfig, pod: &Fresh, expected: u64) {
    pod.nft("add table ip theirs");
    eventually("the metric does not follow", async || {
        netconfig.metric(METRIC).await == expected
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uncaptured_udp_is_summed_over_rewrites_and_causes_no_event() {
    let mut netconfig = start(&[]).await;
    let pod = pod_netns();
    netconfig.claim("c1", &pod).await.unwrap();
    netconfig.apply("c1").await;
    assert_eq!(inspected(&mut netconfig).await, 0);
    let (first, watcher) = Watcher::open(&mut netconfig).await;
    assert!(first[0].intact, "{first:?}");

    open_flow(&pod);
    open_flow(&pod);
    assert_eq!(inspected(&mut netconfig).await, 2);
    await_metric(&netconfig, &pod, 2).await;
    assert_eq!(netconfig.differences("c1").await, [""; 0]);
    assert_eq!(watcher.count(), 0, "a count is no change of the state");

    pod.nft("flush ruleset");
    assert!(!watcher.wait_for_states("c1", 1).await.intact);
    netconfig.apply("c1").await;
    assert_eq!(inspected(&mut netconfig).await, 0, "the rules are new");
    open_flow(&pod);
    await_metric(&netconfig, &pod, 3).await;
    assert!(netconfig.release("c1").await);
    assert_eq!(netconfig.metric(METRIC).await, 3, "the pod has ended");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uncaptured_udp_is_not_summed_again_after_a_restart() {
    let mut netconfig = start(&[]).await;
    let pod = pod_netns();
    netconfig.claim("c1", &pod).await.unwrap();
    netconfig.apply("c1").await;
    open_flow(&pod);
    drop(netconfig);
    let mut netconfig = start(&[]).await;
    netconfig.claim("c1", &pod).await.unwrap();
    let (first, _watcher) = Watcher::open(&mut netconfig).await;
    assert!(first[0].intact, "{first:?}");
    assert_eq!(netconfig.metric(METRIC).await, 0);
    assert_eq!(inspected(&mut netconfig).await, 1);
    open_flow(&pod);
    await_metric(&netconfig, &pod, 1).await;
}
