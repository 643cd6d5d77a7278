//! An ADD whose claim prepares the probe addresses: what stays of it, and what ApplyRules still asks for.

use std::time::Duration;

use inpod_proto::netconfig::v1::{
    AmbientRedirection, ApplyRulesRequest, ClaimNetnsRequest, ProbeExemption, Redirection,
    VerifyRulesRequest, redirection::Mode,
};
use tokio::time::{Instant, sleep};

use super::{costs::counts, probes::elements};
use crate::{
    harness::{Netconfig, netns_ref, pod_netns, wire},
    support::Fresh,
};

const ADDRESS: &str = "10.9.0.1";

/// Returns a redirection that netconfig has not tried at its start.
fn capturing_dns() -> Option<Redirection> {
    let ambient = AmbientRedirection {
        dns_capture: true,
        ..AmbientRedirection::default()
    };
    let mode = Some(Mode::Ambient(ambient));
    Some(Redirection { mode })
}

/// Claims a netns, and waits until its probe address is set.
async fn claim(netconfig: &mut Netconfig, name: &str, fresh: &Fresh) {
    let request = ClaimNetnsRequest {
        sandbox: wire(name),
        netns: Some(netns_ref(fresh)),
        addresses: vec![ADDRESS.to_owned()],
        probe_exemption: ProbeExemption::Prepare.into(),
    };
    netconfig.client.claim_netns(request).await.unwrap();
    let element = format!("net/{name}/eth0");
    wait_until(
        async |it| elements(it.netns()).contains(&element),
        netconfig,
    )
    .await;
}

async fn wait_until(is_met: impl AsyncFn(&Netconfig) -> bool, netconfig: &Netconfig) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_met(netconfig).await {
        assert!(Instant::now() < deadline, "the condition was never met");
        sleep(Duration::from_millis(5)).await;
    }
}

async fn apply(netconfig: &mut Netconfig, name: &str) {
    let request = ApplyRulesRequest {
        sandbox: wire(name),
        redirection: capturing_dns(),
        probe_addresses: vec![ADDRESS.to_owned()],
        require_listeners: false,
    };
    let applied = netconfig.client.apply_rules(request).await.unwrap();
    assert!(applied.into_inner().changed);
}

async fn differences(netconfig: &mut Netconfig, name: &str) -> Vec<String> {
    let request = VerifyRulesRequest {
        sandbox: wire(name),
        redirection: capturing_dns(),
    };
    let verified = netconfig.client.verify_rules(request).await.unwrap();
    verified.into_inner().differences
}

#[tokio::test]
async fn a_prepared_probe_address_goes_with_the_claim() {
    let mut netconfig = Netconfig::start().await;
    let fresh = pod_netns();
    let lists = ["-4 rule", "-6 rule", "-4 route show table all"];
    let routing = || lists.map(|list| fresh.ip(list));
    let before = routing();
    claim(&mut netconfig, "c1", &fresh).await;
    assert_eq!(
        (fresh.nft("list ruleset"), routing()),
        (String::new(), before)
    );
    assert!(netconfig.release("c1").await);
    assert_eq!(elements(netconfig.netns()), "");
}

/// The first pod's rules are read back one by one, the second pod's by the generation of nf_tables.
#[tokio::test]
async fn an_apply_of_known_rules_writes_and_asks_for_the_generation() {
    let mut netconfig = Netconfig::start().await;
    let (mut pods, mut requests) = (Vec::new(), Vec::new());
    for name in ["c1", "c2", "c3", "c4", "c5", "c6"] {
        let fresh = pod_netns();
        claim(&mut netconfig, name, &fresh).await;
        let before = counts(&netconfig).await["netlink_requests"];
        apply(&mut netconfig, name).await;
        requests.push(counts(&netconfig).await["netlink_requests"] - before);
        assert_eq!(differences(&mut netconfig, name).await, [""; 0]);
        pods.push(fresh);
    }
    eprintln!("netlink requests of each apply: {requests:?}");
    // netconfig also sends one request every 2 s, which compares the probe set.
    assert!(requests.iter().skip(1).all(|count| (6..=8).contains(count)));
    assert!(requests[0] > 12, "the rules were not read back");
}

#[tokio::test]
async fn what_another_program_changed_after_the_claim_is_read_again() {
    let mut netconfig = Netconfig::start().await;
    let known = pod_netns();
    claim(&mut netconfig, "c1", &known).await;
    apply(&mut netconfig, "c1").await;
    for (name, program, change) in [
        ("c2", "ip", "-4 rule add pref 100 lookup main"),
        ("c3", "ip", "-4 route add 10.77.0.0/16 dev lo table 10500"),
        ("c4", "nft", "add table inet foreign"),
    ] {
        let fresh = pod_netns();
        claim(&mut netconfig, name, &fresh).await;
        let events = async |it: &Netconfig| {
            let found = counts(it).await;
            found
                .get("drift_events_total{netns=\"claimed\"}")
                .copied()
                .unwrap_or(0)
        };
        let before = events(&netconfig).await;
        fresh.command(program, &change.split(' ').collect::<Vec<_>>());
        wait_until(async |it| events(it).await > before, &netconfig).await;
        apply(&mut netconfig, name).await;
        assert_eq!(differences(&mut netconfig, name).await, [""; 0], "{name}");
    }
}
