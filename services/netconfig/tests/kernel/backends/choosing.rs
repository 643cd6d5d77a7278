//! The backend is the configured one, or the one detected in this boot.

use std::{fs, path::Path};

use inpod_proto::{failure_of, netconfig::v1};
use inpod_types::Reason;
use netconfig::{Backend, Family};
use tonic::Code;

use crate::backends::{
    process::{Netconfig, command, pod_netns, programs_in},
    tools::{differences, program, saved},
};
use crate::programs::install_program;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_configured_backend_is_used_and_changes_what_is_there() {
    let run_dir = tempfile::tempdir().unwrap();
    let fresh = pod_netns();
    for backend in Backend::ALL {
        let mut netconfig = Netconfig::start(run_dir.path(), backend.name(), "").await;
        netconfig.claim(&fresh).await;
        let applied = netconfig.apply().await.unwrap();
        assert!(applied.changed);
        netconfig.until_ready().await;
        let name = v1::Backend::try_from(applied.backend)
            .unwrap()
            .as_str_name();
        assert_eq!(
            name.replace('_', "-").to_lowercase(),
            format!("backend-{backend}")
        );
        assert_eq!(netconfig.differences().await, [""; 0]);
        assert_eq!(differences(backend, &fresh), [""; 0]);
    }
    assert!(!run_dir.path().join("netconfig/backend.json").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_found_in_this_boot_is_kept_with_its_evidence_and_not_looked_for_again() {
    let run_dir = tempfile::tempdir().unwrap();
    let file = run_dir.path().join("netconfig/backend.json");
    let fresh = pod_netns();
    let mut first = Netconfig::start(run_dir.path(), "auto", "").await;
    first.claim(&fresh).await;
    let applied = first.apply().await.unwrap();
    assert_eq!(applied.backend(), v1::Backend::Nftables);
    drop(first);
    let kept = fs::read_to_string(&file).unwrap();
    let parsed: serde_json::Value = serde_json::from_str(&kept).unwrap();
    assert_eq!(parsed["backend"], "nftables");
    assert_eq!(parsed["evidence"]["nftables"], "usable");
    assert_eq!(parsed["evidence"]["iptables_legacy"]["trial"], "untried");
    assert_ne!(
        parsed["evidence"]["iptables_nft"]["version"],
        serde_json::Value::Null
    );

    fs::write(&file, kept.replace("\"nftables\",", "\"iptables-legacy\",")).unwrap();
    let mut second = Netconfig::start(run_dir.path(), "auto", "").await;
    second.claim(&fresh).await;
    let pinned = second.apply().await.unwrap();
    assert_eq!(pinned.backend(), v1::Backend::Nftables);
    let other = pod_netns();
    second
        .client
        .release_netns(v1::ReleaseNetnsRequest {
            sandbox: Some((&crate::support::sandbox("c1")).into()),
        })
        .await
        .unwrap();
    second.claim(&other).await;
    let chosen = second.apply().await.unwrap();
    assert_eq!(chosen.backend(), v1::Backend::IptablesLegacy);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_configured_backend_without_its_programs_is_not_ready_and_says_so() {
    let (run_dir, empty) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let fresh = pod_netns();
    for backend in ["iptables-nft", "iptables-legacy"] {
        let mut netconfig =
            Netconfig::start(run_dir.path(), backend, &programs_in(empty.path())).await;
        let refused = netconfig.until_refused().await;
        assert!(refused.contains("BACKEND_UNAVAILABLE"), "{refused}");
        assert!(!netconfig.is_ready());
        netconfig.claim(&fresh).await;
        let status = netconfig.apply().await.unwrap_err();
        let failure = failure_of(&status);
        assert_eq!(
            (status.code(), failure.reason),
            (Code::FailedPrecondition, Reason::BackendUnavailable)
        );
        assert!(
            failure
                .message
                .contains(&format!("{backend} cannot be used")),
            "{failure:?}"
        );
        assert!(failure.message.contains("ip6tables-"), "{failure:?}");
    }
    let mut netconfig = Netconfig::start(run_dir.path(), "auto", &programs_in(empty.path())).await;
    netconfig.until_ready().await;
    netconfig.claim(&fresh).await;
    assert!(netconfig.apply().await.unwrap().changed);
}

/// Without /proc/sys/net/ipv6 the IPv6 programs are not needed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_the_kernel_has_no_ipv6_only_rules_of_ipv4_are_written() {
    let (run_dir, programs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for act in ["save", "restore"] {
        let name = program(Backend::IptablesNft, Family::V4, act);
        install_program(
            Path::new("/usr/sbin/xtables-nft-multi"),
            &programs.path().join(name),
        );
    }
    let without_ipv6 = "mount -t tmpfs none /proc/sys/net;";
    let mounts = programs_in(programs.path()) + without_ipv6;
    let mut netconfig = Netconfig::start(run_dir.path(), "iptables-nft", &mounts).await;
    netconfig.until_ready().await;
    let fresh = pod_netns();
    netconfig.claim(&fresh).await;
    assert!(netconfig.apply().await.unwrap().changed);
    assert_eq!(netconfig.differences().await, [""; 0]);
    assert!(saved(&fresh, Backend::IptablesNft, Family::V4).contains("INPOD_OUTPUT"));
    assert!(!saved(&fresh, Backend::IptablesNft, Family::V6).contains("INPOD_OUTPUT"));
}

/// Another process holds the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_held_is_told_as_busy() {
    let run_dir = tempfile::tempdir().unwrap();
    let fresh = pod_netns();
    let mut netconfig = Netconfig::start(run_dir.path(), "iptables-legacy", "").await;
    netconfig.claim(&fresh).await;
    let id = fresh.netns.id();
    let locks = run_dir.path().join("netconfig/locks");
    let path = locks.join(format!("{}-{}.xtables", id.inode, id.cookie));
    let held = fs::File::create(&path).unwrap();
    held.lock().unwrap();
    let status = netconfig.apply().await.unwrap_err();
    let failure = failure_of(&status);
    assert_eq!(
        (status.code(), failure.reason),
        (Code::Unavailable, Reason::BackendBusy)
    );
    assert!(
        failure.message.contains(path.to_str().unwrap()),
        "{failure:?}"
    );
    drop(held);
    assert!(netconfig.apply().await.unwrap().changed);
}

#[test]
fn a_backend_that_is_none_is_refused_at_start() {
    let run_dir = tempfile::tempdir().unwrap();
    let output = command(run_dir.path(), "")
        .env("INPOD_BACKEND", "iptables")
        .output()
        .unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(
        errors.contains("is none of auto, nftables, iptables-nft and iptables-legacy"),
        "{errors}"
    );
}
