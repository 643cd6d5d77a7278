//! Limits of what the calls for a running pod cost, in counts that do not depend on the machine.

use std::collections::BTreeMap;

use inpod_proto::netconfig::v1::{
    ApplyRulesRequest, InspectNetnsRequest, RemovePhase, RemoveRulesRequest,
    inspect_netns_request::Target,
};

use crate::harness::{Netconfig, ambient, pod_netns, wire};
use crate::support::Fresh;

/// The counts of which a call has limits.
const COUNTS: [&str; 4] = [
    "netns_visits",
    "netlink_requests",
    "conntrack_dumps",
    "process_walks",
];

/// netconfig also sends one request every 2 s, which compares the probe set.
const TIMER_REQUESTS: u64 = 1;

pub(super) async fn counts(netconfig: &Netconfig) -> BTreeMap<String, u64> {
    let text = inpod_service::metrics::fetch(&netconfig.socket()).await;
    let text = text.unwrap();
    let lines = text.lines().filter_map(|line| line.rsplit_once(' '));
    let count = |(name, value): (&str, &str)| {
        let name = name.strip_prefix("inpod_netconfig_")?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    lines.filter_map(count).collect()
}

/// Returns the median of each count over the pods.
fn medians(mut found: Vec<[u64; 4]>) -> [u64; 4] {
    [0, 1, 2, 3].map(|column| {
        found.sort_by_key(|counts| counts[column]);
        found[found.len() / 2][column]
    })
}

async fn cost(netconfig: &mut Netconfig, work: impl AsyncFnOnce(&mut Netconfig)) -> [u64; 4] {
    let before = counts(netconfig).await;
    work(netconfig).await;
    let after = counts(netconfig).await;
    COUNTS.map(|name| after[name] - before[name])
}

async fn join(netconfig: &mut Netconfig, fresh: &Fresh, name: &str) {
    netconfig.claim(name, fresh).await.unwrap();
    let request = ApplyRulesRequest {
        sandbox: wire(name),
        redirection: ambient(),
        probe_addresses: vec!["10.9.0.1".to_owned()],
        require_listeners: false,
    };
    netconfig.client.apply_rules(request).await.unwrap();
}

async fn remove(netconfig: &mut Netconfig, name: &str, phase: RemovePhase) {
    let request = RemoveRulesRequest {
        sandbox: wire(name),
        phase: phase.into(),
    };
    netconfig.client.remove_rules(request).await.unwrap();
}

/// Makes the calls of pod-events for a pod that loses the mesh's label.
async fn leave(netconfig: &mut Netconfig, name: &str) {
    remove(netconfig, name, RemovePhase::Drain).await;
    let request = InspectNetnsRequest {
        target: wire(name).map(Target::Sandbox),
        captured_flows_only: true,
        ..InspectNetnsRequest::default()
    };
    netconfig.client.inspect_netns(request).await.unwrap();
    remove(netconfig, name, RemovePhase::Final).await;
    assert!(netconfig.release(name).await);
}

#[tokio::test]
async fn leaving_visits_the_netns_once_per_call() {
    let mut netconfig = Netconfig::start().await;
    let (mut joins, mut leaves) = (Vec::new(), Vec::new());
    for number in 0..9 {
        let (fresh, name) = (pod_netns(), format!("c{number}"));
        let joining = async |it: &mut Netconfig| join(it, &fresh, &name).await;
        joins.push(cost(&mut netconfig, joining).await);
        let leaving = async |it: &mut Netconfig| leave(it, &name).await;
        leaves.push(cost(&mut netconfig, leaving).await);
        assert_eq!(fresh.nft("list ruleset"), "");
    }
    let (joining, leaving) = (medians(joins), medians(leaves));
    eprintln!("{COUNTS:?}: joining {joining:?}, leaving {leaving:?}");
    assert!(joining[1] <= 16 + TIMER_REQUESTS, "{joining:?}");
    let [visits, requests, dumps, walks] = leaving;
    assert_eq!((visits, dumps, walks), (3, 0, 0));
    assert!(requests <= 43 + TIMER_REQUESTS, "{requests} requests");
}
