//! The service as a process: every call, on real network namespaces. Needs root.

pub(crate) mod cgroups;
mod claims;
mod costs;
mod crowded;
mod discover;
mod look;
mod prepared;
mod probes;
mod refusals;
mod storm;

use std::{
    io::Read as _,
    os::unix::net::UnixStream,
    process::Command,
    time::{Duration, Instant},
};

use inpod_proto::{
    netconfig::v1::{
        ApplyRulesRequest, InspectNetnsRequest, RemovePhase, RemoveRulesRequest, WatchDriftRequest,
        fetch_netns_response, inspect_netns_request::Target, watch_drift_response::Event,
    },
    types::v1::NetnsId,
};
use inpod_types::Reason;
use tonic::Code;

use crate::{
    harness::{Netconfig, ambient, fetch_on, is_closed, netns_ref, pod_netns, refusal, wire},
    support::Fresh,
};

#[tokio::test]
async fn a_claimed_netns_is_programmed_verified_and_cleaned() {
    let mut netconfig = Netconfig::start().await;
    let fresh = pod_netns();
    let claimed = netconfig.claim("c1", &fresh).await.unwrap();
    assert_eq!(claimed.netns, Some(fresh.netns.id().into()));
    let request = ApplyRulesRequest {
        sandbox: wire("c1"),
        redirection: ambient(),
        probe_addresses: Vec::new(),
        require_listeners: false,
    };
    let first = netconfig
        .client
        .apply_rules(request.clone())
        .await
        .unwrap()
        .into_inner();
    let second = netconfig
        .client
        .apply_rules(request)
        .await
        .unwrap()
        .into_inner();
    assert_eq!((first.changed, second.changed), (true, false));
    assert_eq!(netconfig.differences("c1").await, [""; 0]);
    for phase in [RemovePhase::Drain, RemovePhase::Final, RemovePhase::Final] {
        let request = RemoveRulesRequest {
            sandbox: wire("c1"),
            phase: phase.into(),
        };
        netconfig.client.remove_rules(request).await.unwrap();
    }
    assert_eq!(fresh.nft("list ruleset"), "");
    assert!(!netconfig.differences("c1").await.is_empty());
}

/// ztunnel, which gets the pod before the rules are written, listens for DNS on 127.0.0.1.
#[tokio::test]
async fn a_loopback_that_is_down_is_set_up_by_the_claim_of_its_pod_alone() {
    let mut netconfig = Netconfig::start().await;
    let fresh = Fresh::down();
    fresh.ip("link add eth0 type veth peer name peer");
    fresh.ip("addr add 10.9.0.1/24 dev eth0");
    let wanted = netns_ref(&fresh);
    let refused = netconfig.claim_at("c1", wanted, &["10.9.0.2"]).await;
    assert_eq!(refusal(&refused.unwrap_err()).1, Reason::AddressMismatch);
    assert!(!fresh.ip("addr show lo").contains("127.0.0.1"));
    netconfig.claim("c1", &fresh).await.unwrap();
    assert!(fresh.ip("addr show lo").contains("inet 127.0.0.1/8"));
}

#[tokio::test]
async fn without_a_claim_nothing_is_done() {
    let mut netconfig = Netconfig::start().await;
    let request = ApplyRulesRequest {
        sandbox: wire("c1"),
        redirection: ambient(),
        probe_addresses: Vec::new(),
        require_listeners: false,
    };
    let status = netconfig.client.apply_rules(request).await.unwrap_err();
    assert_eq!(
        refusal(&status),
        (Code::FailedPrecondition, Reason::ClaimUnknown)
    );
    let request = RemoveRulesRequest {
        sandbox: wire("c1"),
        phase: RemovePhase::Unspecified.into(),
    };
    let status = netconfig.client.remove_rules(request).await.unwrap_err();
    assert_eq!(
        refusal(&status),
        (Code::InvalidArgument, Reason::InvalidField)
    );
}

#[tokio::test]
async fn the_broker_gets_the_descriptor_of_the_claimed_netns_and_of_no_other() {
    let mut netconfig = Netconfig::start().await;
    let fresh = pod_netns();
    netconfig.claim("c1", &fresh).await.unwrap();
    let id: NetnsId = fresh.netns.id().into();
    let (response, descriptor) = netconfig.fetch("c1", id);
    assert_eq!(
        response.result,
        Some(fetch_netns_response::Result::Netns(id))
    );
    let found = nix::sys::stat::fstat(descriptor.unwrap()).unwrap();
    assert_eq!((found.st_dev, found.st_ino), (id.device, id.inode));
    let other = NetnsId { cookie: 1, ..id };
    for (name, netns, wanted) in [
        ("c1", other, Reason::NetnsMismatch),
        ("c2", id, Reason::ClaimUnknown),
        ("c1", NetnsId::default(), Reason::InvalidField),
    ] {
        let (response, descriptor) = netconfig.fetch(name, netns);
        let Some(fetch_netns_response::Result::Failure(failure)) = response.result else {
            panic!("{response:?}");
        };
        let reason = failure.failure.unwrap().reason;
        assert_eq!(
            (reason, failure.message.is_empty()),
            (wanted.number(), false)
        );
        assert!(descriptor.is_none());
    }
}

#[tokio::test]
async fn a_connection_to_netns_sock_serves_many_requests_and_idle_ones_keep_no_client_away() {
    let mut netconfig = Netconfig::start().await;
    let fresh = pod_netns();
    netconfig.claim("c1", &fresh).await.unwrap();
    let id: NetnsId = fresh.netns.id().into();
    let fetch = |stream: &mut UnixStream| {
        let (response, descriptor) = fetch_on(stream, "c2", id);
        assert!(matches!(
            response.result,
            Some(fetch_netns_response::Result::Failure(_))
        ));
        assert!(descriptor.is_none());
        let (response, descriptor) = fetch_on(stream, "c1", id);
        assert_eq!(
            response.result,
            Some(fetch_netns_response::Result::Netns(id))
        );
        let found = nix::sys::stat::fstat(descriptor.unwrap()).unwrap();
        assert_eq!((found.st_dev, found.st_ino), (id.device, id.inode));
    };
    let mut idle: Vec<_> = (0..16).map(|_| netconfig.connect_to_netns_sock()).collect();
    for _ in 0..3 {
        idle.iter_mut().for_each(fetch);
    }
    // Beyond the limit, a connection is closed after one response.
    let mut one_more = netconfig.connect_to_netns_sock();
    assert!(fetch_on(&mut one_more, "c1", id).1.is_some());
    assert!(is_closed(&mut one_more));
    assert!(netconfig.fetch("c1", id).1.is_some());
    drop(idle.pop());
    storm::eventually("a connection may stay again", || {
        let mut stream = netconfig.connect_to_netns_sock();
        fetch_on(&mut stream, "c1", id);
        let timeout = Some(Duration::from_millis(50));
        stream.set_read_timeout(timeout).unwrap();
        stream.read(&mut [0]).is_err()
    })
    .await;
}

#[tokio::test]
async fn a_watcher_sees_the_state_then_changes_then_the_end_of_a_claim() {
    let mut netconfig = Netconfig::start().await;
    let mut fresh = pod_netns();
    netconfig.claim("c1", &fresh).await.unwrap();
    let watch = netconfig
        .client
        .watch_drift(WatchDriftRequest {})
        .await
        .unwrap();
    let mut events = watch.into_inner();
    let mut next = async || {
        let event = tokio::time::timeout(Duration::from_secs(20), events.message()).await;
        event.unwrap().unwrap().unwrap().event.unwrap()
    };
    assert!(matches!(next().await, Event::InstanceId(id) if !id.is_empty()));
    assert!(matches!(next().await, Event::State(state) if state.fingerprint.is_empty()));
    assert!(matches!(next().await, Event::StateComplete(_)));
    let request = ApplyRulesRequest {
        sandbox: wire("c1"),
        redirection: ambient(),
        probe_addresses: Vec::new(),
        require_listeners: false,
    };
    let applied = netconfig
        .client
        .apply_rules(request)
        .await
        .unwrap()
        .into_inner();
    assert!(
        matches!(next().await, Event::State(state) if state.fingerprint == applied.fingerprint)
    );
    fresh.abandon();
    assert!(matches!(next().await, Event::ClaimReleased(gone) if gone.sandbox == wire("c1")));
    assert!(netconfig.claims().await.is_empty());
}

#[tokio::test]
async fn a_process_in_a_netns_is_seen_and_keeps_the_claim() {
    let mut netconfig = Netconfig::start().await;
    let mut fresh = pod_netns();
    netconfig.claim("c1", &fresh).await.unwrap();
    let mut command = Command::new("sleep");
    command.arg("60");
    let mut sleeper = fresh.run(move || command.spawn()).unwrap();
    let _listener = fresh.run(|| std::net::TcpListener::bind("10.9.0.1:15006").unwrap());
    fresh.abandon();
    let request = InspectNetnsRequest {
        target: Some(Target::Sandbox(wire("c1").unwrap())),
        ..InspectNetnsRequest::default()
    };
    let seen = netconfig
        .client
        .inspect_netns(request)
        .await
        .unwrap()
        .into_inner();
    let processes: Vec<_> = seen.processes.iter().map(|process| process.pid).collect();
    assert_eq!(processes, [sleeper.id()]);
    assert_eq!(
        (seen.addresses, seen.listening_ports),
        (vec!["10.9.0.1".to_owned()], vec![15006])
    );
    assert!(!seen.path_intact);
    // Longer than the sweeps' interval.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(netconfig.claims().await.len(), 1);
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !netconfig.claims().await.is_empty() {
        assert!(
            Instant::now() < deadline,
            "the claim of a dead netns is held"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn an_apply_whose_caller_goes_away_is_finished() {
    let mut netconfig = Netconfig::start().await;
    let fresh = pod_netns();
    netconfig.claim("c1", &fresh).await.unwrap();
    for timeout in (0..40).map(|step| Duration::from_micros(step * 100)) {
        let request = RemoveRulesRequest {
            sandbox: wire("c1"),
            phase: RemovePhase::Final.into(),
        };
        netconfig.client.remove_rules(request).await.unwrap();
        let request = ApplyRulesRequest {
            sandbox: wire("c1"),
            redirection: ambient(),
            probe_addresses: Vec::new(),
            require_listeners: false,
        };
        drop(tokio::time::timeout(timeout, netconfig.client.apply_rules(request)).await);
        // All of it, or nothing if the request never arrived: two tables, two routes, two ip rules and a sysctl.
        let left = netconfig.differences("c1").await.len();
        assert!(left == 0 || left == 7, "after {timeout:?}: {left}");
    }
}
