//! A netns is validated when claimed.

use std::process::{Child, Command};

use inpod_proto::{
    failure_of,
    netconfig::v1::{InspectNetnsRequest, inspect_netns_request::Target},
    types::v1::NetnsRef,
};
use inpod_types::Reason;
use tonic::{Code, Status};

use crate::harness::{Netconfig, at, netns_ref, pod_netns, refusal};
use crate::name::Name;
use crate::support::{Fresh, sandbox};

struct Sleeper(Child);

impl Sleeper {
    fn inside(fresh: &Fresh) -> Self {
        let mut command = Command::new("sleep");
        command.arg("60");
        Self(fresh.run(move || command.spawn()).unwrap())
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A claim by path and an inspection by path must be refused alike.
async fn refused(netconfig: &mut Netconfig, netns: NetnsRef) -> (Code, Reason) {
    let claim = netconfig.claim_at("c1", netns.clone(), &["10.9.0.1"]).await;
    let request = InspectNetnsRequest {
        target: Some(Target::Netns(netns)),
        ..InspectNetnsRequest::default()
    };
    let look = netconfig.client.inspect_netns(request).await;
    let (claim, look) = (refusal(&claim.unwrap_err()), refusal(&look.unwrap_err()));
    assert_eq!(claim, look);
    claim
}

/// The reason also decides the code.
fn assert_refused(status: &Status, reason: Reason, field: &str) {
    let failure = failure_of(status);
    assert_eq!(
        (failure.reason, &*failure.field),
        (reason, field),
        "{status}"
    );
}

const UNREACHABLE: (Code, Reason) = (Code::Unavailable, Reason::NetnsUnreachable);
const MISSING: (Code, Reason) = (Code::NotFound, Reason::NetnsMissing);

#[tokio::test]
async fn a_netns_whose_name_is_gone_is_unreachable_as_long_as_a_process_is_in_it() {
    let mut netconfig = Netconfig::start().await;
    let fresh = pod_netns();
    let name = Name::new(&fresh, "living");
    let expected_netns = name.expected_netns(&fresh);
    netconfig
        .claim_at("c1", expected_netns.clone(), &["10.9.0.1"])
        .await
        .unwrap();
    assert!(netconfig.release("c1").await);
    let sleeper = Sleeper::inside(&fresh);
    name.unmount();
    assert_eq!(
        refused(&mut netconfig, expected_netns.clone()).await,
        UNREACHABLE,
        "mounted without propagation"
    );
    drop(name);
    assert_eq!(
        refused(&mut netconfig, expected_netns.clone()).await,
        UNREACHABLE
    );
    let proven = NetnsRef {
        cookie: Some(fresh.netns.id().cookie),
        ..expected_netns.clone()
    };
    assert_eq!(refused(&mut netconfig, proven).await, UNREACHABLE);
    drop(sleeper);
    assert_eq!(refused(&mut netconfig, expected_netns).await, MISSING);
}

#[tokio::test]
async fn a_netns_whose_name_is_gone_is_missing_where_it_is_not_the_one_that_a_process_is_in() {
    let mut netconfig = Netconfig::start().await;
    let fresh = pod_netns();
    let expected_netns = Name::new(&fresh, "another").expected_netns(&fresh);
    let _sleeper = Sleeper::inside(&fresh);
    // The next inode number may be another test's netns.
    let inode = Some(1);
    let device = Some(expected_netns.device() + 1);
    for (other, why) in [
        (
            NetnsRef {
                inode,
                ..expected_netns.clone()
            },
            "another inode",
        ),
        (
            NetnsRef {
                device,
                ..expected_netns.clone()
            },
            "another device",
        ),
        (
            NetnsRef {
                inode: None,
                ..expected_netns.clone()
            },
            "no inode",
        ),
        (
            NetnsRef {
                device: None,
                ..expected_netns.clone()
            },
            "no device",
        ),
        (
            NetnsRef {
                cookie: Some(1),
                ..expected_netns.clone()
            },
            "a recycled inode",
        ),
    ] {
        assert_eq!(refused(&mut netconfig, other).await, MISSING, "{why}");
    }
}

#[tokio::test]
async fn a_path_that_is_no_netns_below_the_roots_is_refused_with_its_reason() {
    let mut netconfig = Netconfig::start().await;
    for (path, reason) in [
        ("/dev/null", Reason::NetnsPathRefused),
        ("/proc/self/ns/mnt", Reason::NetnsPathRefused),
        ("/proc/../dev/null", Reason::NetnsPathRefused),
        ("/proc/cmdline", Reason::NetnsNotANetns),
        ("/proc/999999999/ns/net", Reason::NetnsMissing),
        ("relative", Reason::InvalidField),
    ] {
        let status = netconfig.claim_at("c1", at(path), &[]).await.unwrap_err();
        assert_refused(&status, reason, "netns.path");
    }
    assert!(netconfig.claims().await.is_empty());
}

#[tokio::test]
async fn a_netns_that_is_not_the_one_meant_is_refused_with_its_reason() {
    let mut netconfig = Netconfig::start().await;
    let (fresh, bare) = (pod_netns(), Fresh::new());
    let (good, bare) = (netns_ref(&fresh), netns_ref(&bare));
    let inode = NetnsRef {
        inode: Some(1),
        ..good.clone()
    };
    let cookie = NetnsRef {
        cookie: Some(1),
        ..good.clone()
    };
    for (netns, addresses, reason, field) in [
        (inode, vec![], Reason::NetnsMismatch, "netns"),
        (cookie, vec![], Reason::NetnsMismatch, "netns"),
        (good, vec!["10.9.0.7"], Reason::AddressMismatch, "addresses"),
        (bare, vec![], Reason::AddressMismatch, "addresses"),
    ] {
        let claimed = netconfig.claim_at("c1", netns, &addresses).await;
        assert_refused(&claimed.unwrap_err(), reason, field);
    }
    assert!(netconfig.claims().await.is_empty());
}

// scenario: 35
#[tokio::test]
async fn the_nodes_own_netns_is_refused_by_every_path() {
    let mut netconfig = Netconfig::start_beside_the_test().await;
    let (own, test) = (netconfig.process.id(), std::process::id());
    for path in [
        "/proc/self/ns/net".to_owned(),
        "/proc/thread-self/ns/net".to_owned(),
        format!("/proc/{own}/ns/net"),
        format!("/proc/{test}/ns/net"),
        format!("/proc/{test}/task/{test}/ns/net"),
    ] {
        let status = netconfig.claim_at("c1", at(&path), &[]).await.unwrap_err();
        assert_refused(&status, Reason::NetnsIsHost, "netns");
    }
    assert!(netconfig.claims().await.is_empty());
}

#[tokio::test]
async fn the_netns_that_it_runs_in_is_refused() {
    let mut netconfig = Netconfig::start().await;
    let path = netconfig.netns().netns.path().display().to_string();
    let status = netconfig.claim_at("c1", at(&path), &[]).await.unwrap_err();
    assert_refused(&status, Reason::NetnsIsHost, "netns");
}

#[tokio::test]
async fn a_netns_belongs_to_one_sandbox_and_a_sandbox_has_one_live_netns() {
    let mut netconfig = Netconfig::start().await;
    let (fresh, other) = (pod_netns(), pod_netns());
    netconfig.claim("c1", &fresh).await.unwrap();
    netconfig.claim("c1", &fresh).await.unwrap();
    let status = netconfig.claim("c2", &fresh).await.unwrap_err();
    assert_refused(&status, Reason::NetnsInUse, "netns");
    let status = netconfig.claim("c1", &other).await.unwrap_err();
    assert_refused(&status, Reason::NetnsMismatch, "netns");
    assert_eq!(netconfig.claims().await, [sandbox("c1").to_string()]);
    assert!(netconfig.release("c1").await);
    assert!(!netconfig.release("c1").await);
    netconfig.claim("c2", &fresh).await.unwrap();
}

#[tokio::test]
async fn a_dead_netns_gives_way_to_the_sandboxs_next_one() {
    let mut netconfig = Netconfig::start().await;
    let (mut fresh, other) = (pod_netns(), pod_netns());
    netconfig.claim("c1", &fresh).await.unwrap();
    fresh.abandon();
    let claimed = netconfig.claim("c1", &other).await.unwrap();
    assert_eq!(claimed.netns, Some(other.netns.id().into()));
}

#[tokio::test]
async fn without_addresses_those_that_are_there_are_read_and_given_back() {
    let mut netconfig = Netconfig::start().await;
    let fresh = pod_netns();
    let claimed = netconfig
        .claim_at("c1", netns_ref(&fresh), &[])
        .await
        .unwrap();
    assert_eq!(claimed.addresses, ["10.9.0.1"]);
}
