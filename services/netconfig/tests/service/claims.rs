//! Who may claim what.

use inpod_proto::types::v1::NetnsRef;
use tonic::Code;
use workload::Reason;

use crate::{
    harness::{Netconfig, at, netns_ref, pod_netns, refusal},
    support::{Fresh, sandbox},
};

#[tokio::test]
async fn a_path_that_is_no_netns_below_the_roots_is_refused_with_its_reason() {
    let mut netconfig = Netconfig::start().await;
    for (path, code, reason) in [
        ("/dev/null", Code::InvalidArgument, Reason::NetnsPathRefused),
        (
            "/proc/self/ns/mnt",
            Code::InvalidArgument,
            Reason::NetnsPathRefused,
        ),
        (
            "/proc/../dev/null",
            Code::InvalidArgument,
            Reason::NetnsPathRefused,
        ),
        (
            "/proc/cmdline",
            Code::InvalidArgument,
            Reason::NetnsNotANetns,
        ),
        (
            "/proc/999999999/ns/net",
            Code::NotFound,
            Reason::NetnsMissing,
        ),
        ("relative", Code::InvalidArgument, Reason::InvalidField),
    ] {
        let status = netconfig.claim_at("c1", at(path), &[]).await.unwrap_err();
        assert_eq!(refusal(&status), (code, reason), "{path}: {status}");
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
    for (netns, addresses, reason) in [
        (inode, vec![], Reason::NetnsMismatch),
        (cookie, vec![], Reason::NetnsMismatch),
        (good, vec!["10.9.0.7"], Reason::AddressMismatch),
        (bare, vec![], Reason::AddressMismatch),
    ] {
        let status = netconfig
            .claim_at("c1", netns, &addresses)
            .await
            .unwrap_err();
        assert_eq!(
            refusal(&status),
            (Code::FailedPrecondition, reason),
            "{status}"
        );
    }
    assert!(netconfig.claims().await.is_empty());
}

#[tokio::test]
async fn the_nodes_own_netns_is_refused_by_every_path() {
    let mut netconfig = Netconfig::start().await;
    let (own, test) = (netconfig.process.id(), std::process::id());
    for path in [
        "/proc/self/ns/net".to_owned(),
        "/proc/thread-self/ns/net".to_owned(),
        format!("/proc/{own}/ns/net"),
        format!("/proc/{test}/ns/net"),
        format!("/proc/{test}/task/{test}/ns/net"),
    ] {
        let status = netconfig.claim_at("c1", at(&path), &[]).await.unwrap_err();
        assert_eq!(
            refusal(&status),
            (Code::PermissionDenied, Reason::NetnsIsHost),
            "{path}"
        );
    }
    assert!(netconfig.claims().await.is_empty());
}

#[tokio::test]
async fn a_netns_belongs_to_one_sandbox_and_a_sandbox_has_one_live_netns() {
    let mut netconfig = Netconfig::start().await;
    let (fresh, other) = (pod_netns(), pod_netns());
    netconfig.claim("c1", &fresh).await.unwrap();
    netconfig.claim("c1", &fresh).await.unwrap();
    let status = netconfig.claim("c2", &fresh).await.unwrap_err();
    assert_eq!(
        refusal(&status),
        (Code::FailedPrecondition, Reason::NetnsInUse)
    );
    let status = netconfig.claim("c1", &other).await.unwrap_err();
    assert_eq!(
        refusal(&status),
        (Code::FailedPrecondition, Reason::NetnsMismatch)
    );
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
